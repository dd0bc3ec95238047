"""Locks as rows: one row for each name that is held. Its version is the fence."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence

from machinery_py.clock import moment_of
from machinery_py.locks.base import Lock, LockHolding
from machinery_py.rows.contract import (
    Committed,
    Key,
    Rows,
    RowStep,
    StoredRow,
    Write,
    id_of,
)


class RowsLock(Lock):
    """Rows of a store, which belongs to whoever made it."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def acquire(self, name: str, *, ttl: float) -> LockHolding | None:
        key = _key(name)
        if self._rows.read([key]) != [None]:
            return None  # most who lose find out here, without keeping a writer waiting
        token, began_at = secrets.token_hex(16), time.monotonic()
        write = Write(body=token.encode(), expires_in=_micros(ttl))
        [done] = self._rows.commit([RowStep(once=key, write={key: write})])
        if isinstance(done, Committed):
            fence, since = done.version, done.at
        else:  # somebody has it: we, if the reply was lost and the store has repeated the step
            [row] = self._rows.read([key])
            if row is None or row.body != write.body:
                return None
            fence, since = row.version, self._rows.now() - _micros(time.monotonic() - began_at)
        until = moment_of(since + _micros(ttl))
        return LockHolding(name=name, token=token, fence=fence, expires_at=until)

    def renew(self, held: LockHolding, *, ttl: float) -> bool:
        return self._change(held, ttl)

    def release(self, held: LockHolding) -> bool:
        return self._change(held, None)

    def _change(self, held: LockHolding, ttl: float | None) -> bool:
        """Hold it for `ttl` seconds from now, or release it; return whether it was ours."""
        key = _key(held.name)

        def decide(
            rows: Sequence[StoredRow | None], now: int
        ) -> tuple[Mapping[Key, Write | None], bool]:
            del now
            row = rows[0]
            if row is None or row.body != held.token.encode():
                return {}, False
            if ttl is None:
                return {key: None}, True
            return {key: Write(body=row.body, expires_in=_micros(ttl))}, True

        return self._rows.change([key], decide)

    def close(self) -> None:
        pass


def _key(name: str) -> Key:
    return Key("lock", id_of(name))


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)
