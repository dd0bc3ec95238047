"""A store in one file: messages, states and groups in one MessagePack record.

Each transaction writes the record anew.

    file:///path/to/queue.mp    the record
    queue.mp.lock               locked by the process that reads or writes the record

Limits: POSIX, one machine. Each step reads and writes the whole file, so it is for hundreds of
tasks, not for millions. A waiter for a message or a result looks at the file every 20 ms.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec

from machinery_py.backends.base import BackendFeatures
from machinery_py.backends.mappings import MappingBackend, Tables
from machinery_py.brokers.base import (
    Broker,
    BrokerFeatures,
    Consumer,
    DeadLetter,
    Delivery,
    Disposal,
    Fate,
    Message,
    QueueStats,
    WorkerInfo,
)
from machinery_py.brokers.entries import Entry, new_letter, new_worker
from machinery_py.clock import SYSTEM_CLOCK, Clock, micros
from machinery_py.config.options import Section, option
from machinery_py.fences import Fence, fence_after
from machinery_py.stores.open import Family, FamilyOptions
from machinery_py.stores.transactional import OneStore

PAUSE = 0.02  # seconds between two looks at the file
TOKEN_LIFE = dt.timedelta(minutes=10)


class Kept(Entry):
    """Message until it is done: waiting, delayed until its eta, or held by consumer `holder`."""

    number: int = 0  # its place in its queue
    holder: str = ""
    receipt: int = 0
    running: bool = False

    def where(self, now: dt.datetime) -> str:
        if self.holder:
            return "running"
        return "delayed" if self.message.eta and self.message.eta > now else "waiting"

    def release(self) -> None:
        self.holder, self.running = "", False


class Content(msgspec.Struct):
    """All that the file holds. Lists and dicts, no sets: equal content must be equal bytes."""

    number: int = 0  # the last one that a message or a delivery got
    fence: Fence = Fence(0)  # the last one
    entries: list[Kept] = []
    queues: dict[str, None] = {}
    consumers: dict[str, WorkerInfo] = {}
    tokens: dict[str, dt.datetime] = {}
    dead: dict[str, DeadLetter] = {}
    results: Tables = msgspec.field(default_factory=Tables)

    def held(self, session: str) -> list[Kept]:
        return [entry for entry in self.entries if entry.holder == session]

    def waiting(self, queue: str, now: dt.datetime) -> list[Kept]:
        found = [one for one in self.entries if one.message.queue == queue]
        found = [one for one in found if one.where(now) == "waiting"]
        return sorted(found, key=lambda one: (-one.message.priority, one.number))


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Content).decode


class File:
    """The file. Broker and backend share one, and any threads may use it."""

    def __init__(self, path: Path, clock: Clock = SYSTEM_CLOCK, *, fsync: bool = True) -> None:
        self.path = path
        self.clock = clock
        self.fsync = fsync
        self._mutex = threading.RLock()
        self.content: Content | None = None  # of the transaction that is open

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Content]:
        """The content, whose changes are written at the end; after an error none is."""
        with self._mutex:
            if self.content is not None:
                yield self.content  # the transaction around this one writes it
                return
            with open(f"{self.path}.lock", "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, or this process dies
                before = self.path.read_bytes() if self.path.exists() else b""
                self.content = _decode(before) if before else Content()
                try:
                    yield self.content
                    after = _encode(self.content)
                finally:
                    self.content = None
                if after != before:
                    self._write(after)

    def _write(self, body: bytes) -> None:
        new = self.path.with_name(f"{self.path.name}.new")
        with open(new, "wb") as file:
            file.write(body)
            file.flush()
            if self.fsync:
                os.fsync(file.fileno())
        os.replace(new, self.path)  # so that a crash leaves the old content or the new one

    def version(self) -> object:
        """Another one after each write."""
        return self.path.exists() and (self.path.stat().st_ino, self.path.stat().st_mtime_ns)


class FileBroker(Broker):
    features = BrokerFeatures(
        name="file", embedded=True, peeking=False, pausing=False, keeps_turns=False
    )

    def __init__(self, file: File, *, lease: float = 10.0) -> None:
        self.file = file
        self.lease = lease

    def put(self, messages: Sequence[Message], *, token: str) -> bool:
        now = self.file.clock.now()
        with self.file.transaction() as content:
            if token in content.tokens:
                return False
            if token:
                content.tokens[token] = now
            for message in messages:
                content.number += 1
                content.entries.append(Kept(message, now, number=content.number))
                content.queues.setdefault(message.queue)
            return True

    def was_put(self, token: str) -> bool:
        with self.file.transaction() as content:
            return token in content.tokens

    def consume(self, queues: Sequence[str], *, worker: str) -> FileConsumer:
        return FileConsumer(self, queues, worker)

    def tend(self) -> float:
        now = self.file.clock.now()
        with self.file.transaction() as content:
            content.tokens = {t: at for t, at in content.tokens.items() if at > now - TOKEN_LIFE}
            for session, info in list(content.consumers.items()):
                if (now - info.beat_at).total_seconds() > self.lease:
                    del content.consumers[session]
                    for entry in content.held(session):
                        entry.strikes += entry.running
                        entry.release()
            etas = [one.message.eta for one in content.entries if one.where(now) == "delayed"]
            return min([self.lease / 4, *((eta - now).total_seconds() for eta in etas if eta)])

    def waiting(self, queue: str) -> int:
        return sum(one.waiting for one in self.stats() if one.queue == queue)

    def stats(self) -> list[QueueStats]:
        now = self.file.clock.now()
        with self.file.transaction() as content:
            counts = Counter((one.message.queue, one.where(now)) for one in content.entries)
            counts.update((letter.queue, "dead") for letter in content.dead.values())
            return [
                QueueStats(
                    queue=queue,
                    oldest_at=min((e.sent_at for e in content.waiting(queue, now)), default=None),
                    waiting=counts[queue, "waiting"],
                    running=counts[queue, "running"],
                    delayed=counts[queue, "delayed"],
                    dead=counts[queue, "dead"],
                )
                for queue in sorted(content.queues)
            ]

    def workers(self) -> list[WorkerInfo]:
        with self.file.transaction() as content:
            return [
                msgspec.structs.replace(info, holding=len(content.held(session)))
                for session, info in content.consumers.items()
            ]

    def purge(self, queue: str) -> int:
        with self.file.transaction() as content:
            before = len(content.entries)
            content.entries = [e for e in content.entries if e.holder or e.message.queue != queue]
            return before - len(content.entries)

    def dead_letters(self, *, limit: int, queue: str = "") -> list[DeadLetter]:
        with self.file.transaction() as content:
            found = [one for one in content.dead.values() if queue in ("", one.queue)]
            return found[::-1][:limit]

    def take_dead(self, ids: Sequence[str]) -> list[DeadLetter]:
        with self.file.transaction() as content:
            return [content.dead.pop(id) for id in ids if id in content.dead]

    def bury(self, message: Message, *, queue: str, reason: str, error: str) -> None:
        now = self.file.clock.now()
        letter = new_letter(message, now, queue=queue, reason=reason, error=error)
        with self.file.transaction() as content:
            content.dead[letter.id] = letter
            content.queues.setdefault(queue)


class FileConsumer(Consumer):
    def __init__(self, broker: FileBroker, queues: Sequence[str], worker: str) -> None:
        self._broker = broker
        self._file = broker.file
        self._queues = tuple(queues)
        self._worker = worker
        self._woken = threading.Event()
        self._closed = False
        self._register()

    def _register(self) -> None:
        info = new_worker(self._worker, self._queues, self._file.clock.now())
        self._session = info.session
        with self._file.transaction() as content:
            content.consumers[info.session] = info
            for queue in self._queues:
                content.queues.setdefault(queue)

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        deadline = time.monotonic() + (min(timeout, self._broker.tend()) if timeout else 0.0)
        while True:
            version = self._file.version()
            queues = [queue for queue in order or self._queues if queue in self._queues]
            found = self._claim(limit, queues)
            while time.monotonic() < deadline and not found and not self._woken.wait(PAUSE):
                if self._file.version() != version:
                    break
            else:
                self._woken.clear()
                return found

    def _claim(self, limit: int, queues: Sequence[str]) -> list[Delivery]:
        now = self._file.clock.now()
        with self._file.transaction() as content:
            if self._session not in content.consumers:
                return []
            found = [entry for queue in queues for entry in content.waiting(queue, now)]
            deliveries = []
            for entry in found[:limit]:
                content.number += 1
                content.fence = fence_after(content.fence, micros(now))
                entry.holder, entry.receipt = self._session, content.number
                deliveries.append(entry.deliver(entry.receipt, content.fence))
            return deliveries

    def serve(self, queues: Sequence[str]) -> None:
        self._queues = tuple(queues)
        with self._file.transaction() as content:
            if info := content.consumers.get(self._session):
                served = msgspec.structs.replace(info, queues=self._queues)
                content.consumers[self._session] = served
            for queue in queues:
                content.queues.setdefault(queue)
        self.wake()

    def dispose(self, disposals: Sequence[Disposal]) -> list[bool]:
        with self._file.transaction() as content:
            held = {entry.receipt: entry for entry in content.held(self._session)}
            return [self._dispose(content, held, disposal) for disposal in disposals]

    def _dispose(self, content: Content, held: dict[int, Kept], disposal: Disposal) -> bool:
        entry = held.pop(disposal.delivery.receipt, None)
        if entry is None:
            return False
        entry.release()
        match disposal.fate:
            case Fate.DONE:
                content.entries.remove(entry)
            case Fate.LATER:
                entry.put_off(disposal)
                content.number += 1
                entry.number = content.number  # to the end: it must not keep others from their turn
            case Fate.DEAD:
                content.entries.remove(entry)
                letter = entry.letter(disposal, self._file.clock.now())
                content.dead[letter.id] = letter
        return True

    def holds(self, deliveries: Sequence[Delivery]) -> list[bool]:
        with self._file.transaction() as content:
            held = {entry.receipt for entry in content.held(self._session)}
            return [delivery.receipt in held for delivery in deliveries]

    def run_begins(self, delivery: Delivery) -> None:
        self._set_running(delivery, True)

    def run_ends(self, delivery: Delivery) -> None:
        self._set_running(delivery, False)

    def _set_running(self, delivery: Delivery, running: bool) -> None:
        with self._file.transaction() as content:
            for entry in content.held(self._session):
                if entry.receipt == delivery.receipt:
                    entry.running = running

    def beat(self) -> bool:
        with self._file.transaction() as content:
            info = content.consumers.get(self._session)
            if info is not None:
                now = self._file.clock.now()
                content.consumers[self._session] = msgspec.structs.replace(info, beat_at=now)
            elif not self._closed:
                self._register()
                return False
            return True

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self._closed = True
        with self._file.transaction() as content:
            content.consumers.pop(self._session, None)
            for entry in content.held(self._session):
                entry.release()
        self.wake()


class FileBackend(MappingBackend):
    features = BackendFeatures(name="file", embedded=True, claims=True)

    def __init__(self, file: File, *, expire_in: float = 3600.0) -> None:
        super().__init__(file.clock, expire_in=expire_in)
        self._file = file

    def _transaction(self) -> contextlib.AbstractContextManager[object]:
        return self._file.transaction()

    @property
    def _tables(self) -> Tables:
        assert self._file.content is not None, "called outside a transaction"
        return self._file.content.results


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions(Section):
    """Own options: `[stores.file]` in a TOML file, MACHINERY_STORES=file.fsync:false."""

    PREFIX: ClassVar[str] = "stores.file."

    fsync: bool = option(True, "a write survives a power cut, and not the end of the process alone")


class FileFamily(Family):
    """What a URL opens: file:///absolute/path, or file://relative/path."""

    roles = ("broker", "result backend")
    section = FileOptions

    def __init__(self, url: str, options: FamilyOptions) -> None:
        super().__init__(url, options)
        own = options.own if isinstance(options.own, FileOptions) else FileOptions()
        self._file = File(Path(url.partition("://")[2]), options.clock, fsync=own.fsync)

    def broker(self) -> FileBroker:
        return FileBroker(self._file, lease=self.options.lease)

    def backend(self) -> FileBackend:
        return FileBackend(self._file, expire_in=self.options.expire_in)

    def together(self) -> OneStore:
        return OneStore(self.broker(), self.backend(), self._file.transaction)
