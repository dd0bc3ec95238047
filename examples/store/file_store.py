"""A store in one file: its rows, messages and holds as one MessagePack record.

    file:///path/to/queue.mp    16 random bytes, others with each write, and the record
    queue.mp.lock               locked by the process that reads or writes the record

A transaction loads the record if another process has changed it, and writes it anew.

Limits: POSIX, one machine. Each step handles the whole file, so it is for hundreds of tasks, not
for millions. A waiter for a message or a result looks at the file every 20 ms. A process that is
stopped (SIGSTOP) inside a transaction holds up all others. Time is the clock's on the wall: one
that is set ahead expires rows early.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import msgspec

from machinery_py.backends.rows import RowsBackend
from machinery_py.brokers.rows import RowsBroker
from machinery_py.clock import SYSTEM_CLOCK, Clock, micros
from machinery_py.config.options import Section, option
from machinery_py.connections.forks import ForkLock
from machinery_py.errors import MachineryError, PublishUnknown, StoreUnusable
from machinery_py.rows.memory import MemoryRows, Tables
from machinery_py.rows.memory_messages import KeptHold, MemoryHold, MemoryTopicListener
from machinery_py.rows.messages import ClaimReceipt
from machinery_py.stores.open import FamilyOptions
from machinery_py.stores.rows import RowsFamily

PAUSE = 0.02  # seconds between two looks at the file
MARK = 16  # bytes, by which a write is known
NEWS = 1000  # topics


class Record(msgspec.Struct):
    """All that the file holds. `told`: how many topics were, ever; `news`: the last of them."""

    tables: Tables = msgspec.field(default_factory=Tables)
    told: int = 0
    news: list[str] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class FileUnusable(StoreUnusable, PublishUnknown):
    """The file cannot be read or written. Of a step that wrote, nobody knows."""


class FileRows(MemoryRows):
    """Tables in a file, under a lock that is these rows: inside of it they are as the file is.

    What has changed is written at its end, and nothing after an error. A thread may enter it again.
    Any threads may use the rows, and forked children.
    """

    def __init__(self, path: Path, clock: Clock = SYSTEM_CLOCK, *, fsync: bool = True) -> None:
        super().__init__(clock)
        self.path = path
        self.lock = self
        self._fsync = fsync
        self._mutex = ForkLock(reentrant=True)
        self._entered: list[contextlib.AbstractContextManager[None]] = []
        self._mark: bytes | None = None  # of the write that the tables are as of; None: unknown
        self._body = b""  # of the same
        self._record = Record()

    def now(self) -> int:
        return micros(self.clock.now())  # all processes see the same, also after a reboot

    def is_entered(self) -> bool:
        return self._mutex.is_mine()

    def together(self) -> FileRows:
        return self

    def hold_of(self, id: str, kept: KeptHold) -> FileHold:
        return FileHold(self, id, kept)

    def listen(self) -> FileTopicListener:
        return FileTopicListener(self)

    def tell(self, topics: set[str]) -> None:
        self._record.told += len(topics)
        self._record.news = [*self._record.news, *topics][-NEWS:]
        super().tell(topics)

    def look(self) -> None:
        """Load what another process has written, if it has."""
        with self._our_errors(), self._opened() as file:
            is_behind = file.read(MARK) != self._mark
        if is_behind:
            with self:
                pass

    # Transactions

    def __enter__(self) -> None:
        transaction = self._transact()
        transaction.__enter__()
        self._entered.append(transaction)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    @contextlib.contextmanager
    def _transact(self) -> Iterator[None]:
        is_inner = self.is_entered()
        with self._mutex:
            if is_inner:
                yield
                return
            with self._our_errors(), open(f"{self.path}.lock", "ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # until the end of this process at most
                pid = os.getpid()
                try:
                    known, self._mark = self._mark, None  # unknown after an error, and in a child
                    mark = self._load(known)
                    yield
                    if (body := self._encode()) != self._body:
                        mark, self._body = self._save(body), body
                    self._mark = mark
                finally:
                    if pid == os.getpid():
                        fcntl.flock(file, fcntl.LOCK_UN)  # a child may have the file open, too

    def _load(self, known: bytes | None) -> bytes:
        """Take over the record, unless it is known, and tell what others have told since then."""
        with self._opened() as file:
            mark, body = file.read(MARK), file.read()
        if mark != known:
            before, self._record, self._body = self._record.told, _record(body), body
            self.load(self._record.tables)
            new, news = self._record.told - before, self._record.news
            if known is not None and 0 <= new <= len(news):
                super().tell(set(news[len(news) - new :]))
            else:
                for listener in tuple(self.listeners):
                    listener.wake()
        return mark

    def _encode(self) -> bytes:
        self._record.tables = self.dump()
        try:
            return _encode(self._record)
        except UnicodeEncodeError:  # half a surrogate pair in a name: JSON can write it
            return json.dumps(msgspec.to_builtins(self._record, str_keys=True)).encode()

    def _save(self, body: bytes) -> bytes:
        mark, new = secrets.token_bytes(MARK), Path(f"{self.path}.new")
        new.write_bytes(mark + body)
        self._sync(new)
        os.replace(new, self.path)  # so that a crash leaves the old content or the new one
        self._sync(self.path.parent)
        return mark

    def _sync(self, path: Path) -> None:
        if self._fsync:
            file = os.open(path, os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def _opened(self) -> BinaryIO:
        return open(self.path, "rb") if self.path.exists() else io.BytesIO()

    @contextlib.contextmanager
    def _our_errors(self) -> Iterator[None]:
        try:
            yield
        except MachineryError:
            raise
        except (OSError, msgspec.MsgspecError, json.JSONDecodeError) as error:
            raise FileUnusable(f"file store {str(self.path)!r}: {error}") from error


def _record(body: bytes) -> Record:
    if body.startswith(b"{"):
        return msgspec.convert(json.loads(body), Record, strict=False, str_keys=True)
    return _decode(body) if body else Record()


class FileHold(MemoryHold):
    """A hold that writes down what runs: whoever gives its messages back is another process."""

    def begin_run(self, receipt: ClaimReceipt) -> None:
        with contextlib.suppress(FileUnusable), self.rows.lock:  # else the next death counts
            super().begin_run(receipt)

    def end_run(self, receipt: ClaimReceipt) -> None:
        with contextlib.suppress(FileUnusable), self.rows.lock:
            super().end_run(receipt)


class FileTopicListener(MemoryTopicListener):
    """A listener that looks for what other processes have told."""

    def __init__(self, rows: FileRows) -> None:
        super().__init__(rows)
        self._file = rows

    def wait(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0 and not self.event.wait(min(left, PAUSE)):
            self._file.look()
        self.event.clear()


class FileBroker(RowsBroker):
    features = msgspec.structs.replace(RowsBroker.features, name="file", embedded=True)


class FileBackend(RowsBackend):
    features = msgspec.structs.replace(RowsBackend.features, name="file", embedded=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions(Section):
    """Own options: `[stores.file]` in a TOML file, MACHINERY_STORES=file.fsync:false."""

    PREFIX: ClassVar[str] = "stores.file."

    fsync: bool = option(True, "a write survives a power cut, and not the end of the process alone")


class FileFamily(RowsFamily):
    """What a URL opens: file:///absolute/path, or file://relative/path."""

    section = FileOptions
    broker_type = FileBroker
    backend_type = FileBackend

    def __init__(self, url: str, options: FamilyOptions) -> None:
        super().__init__(url, options)
        own = options.own if isinstance(options.own, FileOptions) else FileOptions()
        self.rows = FileRows(Path(url.partition("://")[2]), options.clock, fsync=own.fsync)
