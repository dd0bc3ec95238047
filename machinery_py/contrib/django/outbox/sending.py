"""`outbox.send(call)`: the call is a row of Django's transaction; what a relay does with it.

Its steps and crash points are those of contrib/outbox.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections, router, transaction
from django.utils import timezone

from machinery_py.contrib.django.outbox.models import OutboxRow
from machinery_py.contrib.django.project import server
from machinery_py.contrib.kept_calls import encode_kept, keeping
from machinery_py.contrib.outbox import (
    AnyOutbox,
    LockedRows,
    OutboxTable,
    check_file,
    ended_after,
    forget_notices,
)
from machinery_py.errors import ConfigError
from machinery_py.server import Server
from machinery_py.tasks.signature import Step
from machinery_py.texts import cut

CHANNEL = "machinery_outbox"

_Row: Any = OutboxRow  # Django brings no types
_atomic: Any = transaction.atomic


class DjangoOutbox(AnyOutbox):
    """Calls that are sent if, and only if, a transaction is committed. Any thread may use it.

    Args:
        using: alias of the database; by default that to which the router writes its rows.
    """

    def __init__(self, server: Server, using: str | None = None) -> None:
        super().__init__(server, f"outbox {using or DEFAULT_DB_ALIAS}")
        self._using = using

    @property
    def using(self) -> str:
        return self._using or str(router.db_for_write(OutboxRow))

    def send(self, step: Step[Any]) -> Any:
        """Send a call, chain, group or chord with the current transaction; without one, at once.

        Returns:
            The result, which has its UUID now. It is PENDING until the call is published.

        Raises:
            ArgumentError, NameRefused, Unsupported, WorkflowError: as `Server.send`.
            django.db.Error: the row could not be inserted.
        """
        using = self.using
        with keeping(self.server, step) as (kept, result):
            if kept is not None:
                with _atomic(using=using, savepoint=False):
                    _Row(uuid=kept.uuid, name=cut(kept.name, 200), body=encode_kept(kept)).save(
                        using=using, force_insert=True
                    )
                    if connections[using].vendor == "postgresql":
                        with connections[using].cursor() as cursor:
                            cursor.execute("SELECT pg_notify(%s, '')", [CHANNEL])
                    transaction.on_commit(self._wake, using=using)
        return result

    def _part(self) -> object:
        # The database of a test: its threads would lock each other's tables.
        connection = connections[self.using]
        if connection.vendor == "sqlite" and connection.is_in_memory_db():
            return _NoRelay()
        return self.relay()

    def _open_table(self) -> OutboxTable:
        connection = connections[self.using]
        if connection.vendor == "sqlite":
            check_file(self.server, str(connection.settings_dict["NAME"]))
        elif not connection.features.has_select_for_update_skip_locked:
            raise ConfigError(f"an outbox cannot be in this {connection.display_name}")
        return DjangoTable(self.using)


class _NoRelay:
    """In place of a relay: `outbox.publish()` does its work."""

    def start(self, worker: object) -> None:
        pass

    def stop(self, worker: object) -> None:
        pass


class DjangoTable(OutboxTable):
    """The rows in one database. Its connection is that of the relay's thread."""

    name = CHANNEL

    def __init__(self, using: str) -> None:
        self._using = using
        self._listener: Any = None  # the driver's connection

    @property
    def _waiting(self) -> Any:
        return _Row.objects.using(self._using).filter(failed_at=None).order_by("id")

    def is_waiting(self) -> bool:
        connection, is_waiting = connections[self._using], bool(self._waiting.exists())
        if not is_waiting and getattr(connection, "pool", None):
            connection.close_if_unusable_or_obsolete()  # back into Django's pool
        return is_waiting

    @contextmanager
    def take(self, limit: int, life: float) -> Iterator[LockedRows]:
        rows, connection = _Row.objects.using(self._using), connections[self._using]
        is_ours = not connection.in_atomic_block  # else a test's, which ends when it likes
        with _atomic(using=self._using):
            if is_ours and connection.vendor == "postgresql":
                with connection.cursor() as cursor:
                    cursor.execute(ended_after(life))
            yield (batch := LockedRows(self._rows(limit)))
            if batch.done:
                rows.filter(id__in=batch.done).delete()
            for number, text in batch.refused.items():
                rows.filter(id=number).update(failed_at=timezone.now(), error=text)

    def _rows(self, limit: int) -> Sequence[tuple[int, bytes]]:
        connection = connections[self._using]
        oldest = self._waiting.values_list("id", "body")
        if not connection.features.has_select_for_update_skip_locked:
            with connection.cursor() as cursor:
                # A write, so that this transaction has the lock of the file before it reads.
                cursor.execute(f"DELETE FROM {_Row._meta.db_table} WHERE 1 = 0")
            return [(number, bytes(body)) for number, body in oldest[:limit]]
        found = list(oldest.select_for_update(skip_locked=True)[:limit])
        # Another relay may have locked older ones, or some in between, for a moment.
        first = list(self._waiting.values_list("id", flat=True)[: len(found)]) if found else []
        ours = takewhile(lambda pair: pair[0][0] == pair[1], zip(found, first, strict=False))
        return [(number, bytes(body)) for (number, body), _ in ours]

    def listen(self) -> Sequence[int]:
        connection = connections[self._using]
        if connection.vendor != "postgresql":
            return ()
        if self._listener is None:
            # Beside Django's pool, which may have room for one connection.
            self._listener = connection.Database.connect(**connection.get_connection_params())
            self._listener.autocommit = True
            self._listener.cursor().execute(f"LISTEN {CHANNEL}")
        return (self._listener.fileno(),)

    def heard(self) -> None:
        if self._listener is not None:
            forget_notices(self._listener)

    def text_of(self, error: Exception) -> str:
        return f"{type(error).__name__}: {error}"

    def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(Exception):  # of any driver; it is closed in any case
                listener.close()
        with suppress(Exception):
            connections[self._using].close()


outbox: DjangoOutbox = DjangoOutbox(server)
