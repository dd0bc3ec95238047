"""The contract of rows: read some, decide, and commit a step that holds only if they are the same.

A feature that keeps its records as rows is written once, for every store that has rows. A row has a
key, bytes that the feature alone understands, and a version. A step is carried out whole or not at
all: first it is compared with what is there, then its rows are written.

    read ──► decide (pure) ──► commit ──► Committed
     ▲                            │
     └──────── Conflict ──────────┘            `Rows.change` is this loop

Invariants, on every store:

- The versions of a row only grow: also when it was deleted or expired in between, and when the
  clock was set back. So a version never means two bodies, and serves as a fence of its row. Those
  of two rows say nothing of each other.
- An expired row does not exist: for `read`, `list`, `once`, `expect` and `create` alike, whether it
  was deleted or not.
- NO_ROW says that there is no row, not that there was none: one that was made and deleted since the
  decision is NO_ROW again. Who must know keeps a row that says so.
- A step that lost its reply may be repeated. With `once` the repeat is Repeated, as long as that
  row is there; else it conflicts with itself, and the feature reads again and finds what it wrote.

Expired rows are deleted while others are written, and by `expire`.

Bounds: a row is as large as its feature makes it, and a step writes few rows. Steps and listings
are carried in pieces of bounds.STEP_BYTES, with one step or row at least. An id has ID_BYTES at
most: stores order and index by it.
"""

from __future__ import annotations

import hashlib
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NewType, Protocol, TypeVar, final

import msgspec

from machinery_py.bounds import STEP_BYTES
from machinery_py.errors import BackendUnavailable, NameRefused, Unsupported
from machinery_py.fences import Fence
from machinery_py.texts import quoted

PATIENCE = 5.0  # seconds for rows that others change all the time
PAUSE = 0.0005, 0.02  # seconds until they are read again
PAGE = 1000  # rows
ID_BYTES = 1000  # of UTF-8
T = TypeVar("T")

Version = NewType("Version", Fence)
NO_ROW = Version(Fence(0))


class Key(msgspec.Struct, frozen=True, order=True, gc=False, cache_hash=True):
    """The name of a row. `kind`: a constant of a feature, ASCII; `id`: any text of ID_BYTES."""

    kind: str
    id: str


class Facts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Properties that rows of a kind are listed by.

    Attributes:
        at: µs since 1970; listings begin with the latest. An index has it: of a row that is written
            often it should stay the same.
        name: rows of one name can be listed alone. Bounded as ids.
    """

    at: int
    name: str = ""


class StoredRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A row as it was at one moment."""

    key: Key
    body: bytes
    version: Version
    facts: Facts | None = None
    kept_by: Key | None = None


class Write(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New content of a row.

    Attributes:
        expires_in: µs from the moment of the step, by the store's clock, until the row is not there
            any more; None: it stays.
        facts: None: the row is in no listing.
        kept_by: while there is a row of this key, this one does not expire (where there are
            messages).
    """

    body: bytes
    expires_in: int | None = None
    facts: Facts | None = None
    kept_by: Key | None = None


@final
class RowStep(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Changes that become true together, or not at all.

    Attributes:
        once: a row of `write`, by which a repeat of this step is known: the step is Repeated while
            there is this row, whatever else it expects.
        expect: all rows that the decision has read, written or not, with their versions; NO_ROW:
            there was none.
        create: rows that are written if they are not there; if they are, that is no conflict.
        write: the new content of each row; None: delete it.
        durable: False: a power cut may undo it, where that is cheaper.
    """

    once: Key | None = None
    expect: Mapping[Key, Version] = {}
    create: Mapping[Key, Write] = {}
    write: Mapping[Key, Write | None] = {}
    durable: bool = True


class Committed(msgspec.Struct, frozen=True, gc=False):
    """The step is true.

    Attributes:
        version: of the row that it wrote, of several the last one; NO_ROW if `write` made none.
        at: µs since 1970 by the store's clock; what it wrote expires so long after it.
    """

    version: Version
    at: int


class Conflict(msgspec.Struct, frozen=True, gc=False):
    """A row is another one than the step expects; nothing was written. Read again, decide again."""


class Repeated(msgspec.Struct, frozen=True, gc=False):
    """The row `once` is there: the step was carried out before, and is not again."""


class Gone(msgspec.Struct, frozen=True, gc=False):
    """A message is not where the step says; nothing was written. No repeat of it changes that.

    Where there are messages (messages.py).
    """


class NoRoom(msgspec.Struct, frozen=True, gc=False):
    """In a queue, where so many messages wait, there is no room for the step; nothing was written.

    Where there are messages (messages.py).
    """

    queue: str
    waiting: int


StepResult = Committed | Conflict | Repeated | Gone | NoRoom


#: Gets the rows and the store's time in µs, and returns what to write, and a result. It is called
#: again when a row has changed meanwhile, so it must be pure.
Decision = Callable[[Sequence[StoredRow | None], int], tuple[Mapping[Key, Write | None], T]]


class Patience:
    """Pauses of somebody whose rows were changed by others."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + PATIENCE

    def wait(self) -> None:
        """Let others go on.

        Raises:
            BackendUnavailable: after PATIENCE.
        """
        if time.monotonic() > self._deadline:
            raise BackendUnavailable(
                f"rows were changed by others for {PATIENCE} s (too many processes change one row)"
            )
        time.sleep(random.uniform(*PAUSE))


class OwnTransaction(ABC):
    """A transaction that a store has begun for user code. Belongs to one thread.

    Attributes:
        connection: for the user's statements. It refuses `commit` and `rollback`.
        rows: as `Rows.on`; its last step may take messages and join sets.
    """

    connection: Any
    rows: Rows

    @abstractmethod
    def commit(self) -> None:
        """Commit. Any error says that it was rolled back, but for one that `is_unknown`."""

    @abstractmethod
    def is_raced(self, error: BaseException) -> bool:
        """Return whether it is not the task's fault, by an error or its causes, before `close`.

        Others were in the way, or the connection was lost before the commit: the same may work.
        """

    @abstractmethod
    def is_unknown(self, error: BaseException) -> bool:
        """Return whether a `commit` with this error may have been carried out; before `close`."""

    @abstractmethod
    def abandon(self) -> None:
        """End the statement that the task waits for, and let nothing be committed; from any thread.

        It may take seconds.
        """

    @abstractmethod
    def close(self) -> None:
        """Roll back what is not committed, and give the connection back. May be called twice."""


class Rows(ABC):
    """A store of rows. Any thread may call any method.

    Raises (each method):
        BackendUnavailable: the store did not answer in time; a step may have become true.
        StoreUnusable: the store cannot be worked with.
    """

    @abstractmethod
    def now(self) -> int:
        """Return the time by the store's clock, in µs since 1970."""

    @abstractmethod
    def read(self, keys: Sequence[Key]) -> list[StoredRow | None]:
        """Return the row of each key, or None; each as it was at some moment of the call.

        An id that is too long has no row: whoever looks for any text is not refused.
        Whether they were so together is what a step says that expects them, and may write nothing.
        """

    @abstractmethod
    def commit(self, steps: Sequence[RowStep]) -> list[StepResult]:
        """Carry out each step by itself, in this order; later ones see what earlier ones wrote.

        All that writes or expects a row at the same time does so one after the other, whether the
        row is there or not. Rows that are locked are locked in one order, for all steps of a call.

        Raises:
            BackendUnavailable: any of the steps may have been carried out.
            NameRefused: an id or a name is too long; nothing was done.
        """

    @abstractmethod
    def list(
        self,
        kind: str,
        *,
        name: str | None = None,
        after: StoredRow | None = None,
        items: int = PAGE,
        size: int = STEP_BYTES,
    ) -> list[StoredRow]:
        """Return rows of the kind that have facts: a page, which is empty only behind the last row.

        The latest `Facts.at` comes first; of one moment the greater id.

        Args:
            name: only those with this `Facts.name`.
            after: begin behind this row of an earlier page, which may be gone by now.
            items, size: end the page with so many rows, or before the bodies exceed so many bytes.
        """

    def list_all(self, kind: str) -> Iterator[StoredRow]:
        """Yield all that `list` has of the kind, page by page: not as of one moment."""
        after = None
        while page := self.list(kind, after=after):
            yield from page
            after = page[-1]

    def on(self, connection: object) -> Rows:
        """Return these rows inside a transaction that its caller has begun on the connection.

        There `commit` takes one step with `once`, `expect`, `create` and `write` (where there are
        messages, also with `pushes` of new ones, and `tell`), sends it in one statement, and
        neither begins, ends nor repeats anything: what it wrote is true when the caller commits,
        and never if not. What waits for others or repeats by itself is refused: `change`, and all
        that other steps would have to wait for until that commit. Settings of the connection stay
        as they are.

        Raises:
            Unsupported: the store has no transactions that a caller could share.
        """
        del connection
        raise Unsupported(
            f"{type(self).__name__}: a step cannot be part of your transaction "
            "(this store has none that it could share: send after the commit, or by an outbox)"
        )

    def open_transaction(self) -> OwnTransaction:
        """Return a transaction on a connection of its own, which its caller closes.

        Raises:
            Unsupported: as `on`.
        """
        self.on(None)
        raise AssertionError

    def forget(self, rows: Sequence[StoredRow]) -> None:
        """Delete the rows that are still as they were read.

        One that another step or a caller's transaction changes at this moment may stay: this does
        not wait for the end of that. So it is for rows that nobody is hindered by.
        """
        self.commit([RowStep(expect={row.key: row.version}, write={row.key: None}) for row in rows])

    @abstractmethod
    def expire(self, items: int) -> bool:
        """Delete up to so many expired rows, of all kinds; return whether more may be left."""

    def change(self, keys: Sequence[Key], decide: Decision[T], *, durable: bool = True) -> T:
        """Write what `decide` makes of these rows, as one step, and return its result.

        If it writes nothing, nothing says that the rows were so together.

        Raises:
            BackendUnavailable: also if others change the rows all the time.
        """
        patience = Patience()
        while True:
            rows = self.read(keys)
            write, result = decide(rows, self.now())
            if not write:
                return result
            seen = [NO_ROW if row is None else row.version for row in rows]
            expect = dict(zip(keys, seen, strict=True))
            [done] = self.commit([RowStep(expect=expect, write=write, durable=durable)])
            if not isinstance(done, Conflict):
                return result
            patience.wait()


class _HasBody(Protocol):
    @property
    def body(self) -> bytes: ...


B = TypeVar("B", bound=_HasBody)


def page_of(rows: Sequence[B], size: int) -> list[B]:
    """Return the first rows whose bodies are so many bytes at most; one row at least."""
    taken = 0
    for count, row in enumerate(rows):
        taken += len(row.body)
        if count and taken > size:
            return list(rows[:count])
    return list(rows)


def id_of(text: str) -> str:
    """Return an id for a text of any length: itself, or a hash of it if it is too long."""
    if (raw := _too_long(text)) is None:
        return text
    return "sha256:" + hashlib.sha256(raw).hexdigest()


SURE = ID_BYTES // 4  # characters, which no text can make too many bytes of


def check_writes(rows: Mapping[Key, Write | None]) -> None:
    """Raise NameRefused if an id or a name is too long."""
    for key, write in rows.items():
        if len(key.id) > SURE:
            _check(key.kind, key.id)
        if write is not None and write.facts is not None and len(write.facts.name) > SURE:
            _check(f"{key.kind} {quoted(key.id)}, listed as", write.facts.name)


def check_keys(keys: Iterable[Key]) -> None:
    """Raise NameRefused if an id is too long."""
    for key in keys:
        if len(key.id) > SURE:
            _check(key.kind, key.id)


def _check(of: str, text: str) -> None:
    if (raw := _too_long(text)) is not None:
        raise NameRefused(
            f"{of} {quoted(text)}: it has {len(raw):,} bytes (at most {ID_BYTES:,})", text
        )


def _too_long(text: str) -> bytes | None:
    """Return its bytes if they are too many."""
    if len(text) <= SURE:
        return None
    raw = text.encode("utf-8", "surrogatepass")
    return raw if len(raw) > ID_BYTES else None
