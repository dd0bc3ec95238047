"""Queues and messages of the RabbitMQ backend (the list: connections/rabbitmq/queues.py).

Go's queues have Go's arguments. They are transient, and all in them expires `results_expire_in`
after it was written, whether the task is finished or not. Ours are durable, and those of a group
go a week after their last use.

A state is Go's document with a field of ours (go_documents.py):

    {"TaskUUID":…, "State":…, … "TTL":0,"machinery_py":{"seq":3,"epoch":…, …}}
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from machinery_py.backends.go_documents import encode_document, is_state_of, without_field
from machinery_py.backends.transactional import Row
from machinery_py.connections.rabbitmq.queue_records import OURS, Queue
from machinery_py.connections.rabbitmq.queues import RESULTS, TRIGGERED
from machinery_py.errors import ConfigError, DecodeError, NameRefused
from machinery_py.fences import NO_FENCE, Fence
from machinery_py.names import is_made, is_safe
from machinery_py.tasks.states import TaskState, advance
from machinery_py.texts import quoted
from machinery_py.values.malformed import MALFORMED
from machinery_py.wire.states import decode_state, extra_fields, extra_of

GROUP_LIFE = 7 * 86_400_000  # ms that a chord may go on without an arrival
LONGEST_EXPIRY = 2**31 - 1  # ms; Go writes it as a signed number of 32 bits
LONGEST_NAME = 200  # bytes of a UUID; AMQP has 255 for a queue with what we put before it
STRIPES = 8  # locks that the tasks and groups share

LOCKS = tuple(f"{RESULTS}lock.{number}" for number in range(STRIPES))
# Taken after the others: transactions take locks in the order of their names.
OUTBOX_LOCK, READY_LOCK = (f"{RESULTS}lock.{name}" for name in ("outbox", "ready"))
OUTBOX, READY = (Queue(RESULTS + name, OURS) for name in ("outbox", "ready"))


def name_of(uuid: str) -> str:
    """Return the name of a UUID's queue: Go's, or a digest where RabbitMQ refuses that."""
    raw = uuid.encode("utf-8", "surrogatepass")
    is_usable = is_safe(uuid) and not uuid.startswith(("amq.", "machinery."))
    if is_usable and 0 < len(raw) <= LONGEST_NAME:
        return uuid
    return f"machinery.sha256.{hashlib.sha256(raw).hexdigest()}"


def lock_of(uuid: str) -> str:
    """Return the lock that the task or group shares with others."""
    return LOCKS[zlib.crc32(uuid.encode("utf-8", "surrogatepass")) % STRIPES]


class ResultQueues:
    """The queues of tasks and groups."""

    def __init__(self, expire_in: float) -> None:
        """`expire_in`: seconds.

        Raises:
            ConfigError: Go cannot write this number.
        """
        expiry = int(expire_in * 1000)
        if not 0 < expiry <= LONGEST_EXPIRY:
            most = LONGEST_EXPIRY // 1000
            raise ConfigError(
                f"results_expire_in: found {expire_in:.0f} s (results in RabbitMQ: at most {most})"
            )
        self._shared = {"x-message-ttl": expiry, "x-expires": expiry}
        self._ours = {**OURS, "x-message-ttl": GROUP_LIFE, "x-expires": GROUP_LIFE}

    def _go(self, queue: str) -> Queue:
        is_ours = (
            queue.startswith("machinery.") or is_made(queue.removesuffix(TRIGGERED)) is not None
        )
        return Queue(queue, self._shared, durable=False, auto_delete=True, is_ours=is_ours)

    def task(self, uuid: str) -> Queue:
        """Go's queue of a task, or of a group's members."""
        return self._go(name_of(uuid))

    def triggered(self, group: str) -> Queue:
        return self._go(f"{name_of(group)}{TRIGGERED}")

    def group(self, group: str) -> Queue:
        return Queue(f"{RESULTS}group.{name_of(group)}", self._ours)

    def members(self, group: str) -> Queue:
        return Queue(f"{RESULTS}members.{name_of(group)}", self._ours)


# Tasks


class StoredTask(Row, kw_only=True):
    """A task.

    Attributes:
        seq: grows with each message; of several the greatest counts.
        of_go: a Go program has written some of it.
    """

    seq: int = 0
    of_go: bool = False


@extra_fields()
class _OwnField(msgspec.Struct, omit_defaults=True, gc=False):
    """Our field of a state's document."""

    seq: int
    epoch: Fence = NO_FENCE
    mark: str = ""
    stated: bool = True


_write = msgspec.json.Encoder().encode
_read = msgspec.json.Decoder(_OwnField).decode


def encode_record(uuid: str, row: Row, seq: int) -> bytes:
    """Return the message of a task.

    Raises:
        ArgumentError: a result cannot be sent.
    """
    is_stated = row.state is not None

    def field(state: TaskState) -> bytes:
        return _write(_OwnField(seq, row.epoch, row.mark, is_stated, **extra_of(state)))

    return encode_document(uuid, row.state, field)


def decode_record(uuid: str, bodies: Iterable[bytes]) -> StoredTask:
    """Return the task after all messages of its queue, oldest first.

    Raises:
        NameRefused: it holds something else than states of this task, which must stay.
    """
    found = StoredTask()
    for body in filter(None, bodies):  # an empty one is a probe of ours whether the queue is there
        document, ours = _split(body)
        if ours is not None and ours.seq < found.seq:
            continue
        try:
            state = decode_state(document) if ours is None or ours.stated else None
        except DecodeError as error:
            raise _foreign(uuid, str(error)) from error
        if state is not None and not is_state_of(uuid, state):
            raise _foreign(uuid, f"a state of {quoted(state.task_uuid)}")
        if ours is None:
            assert state is not None
            found.of_go = True
            after = advance(found.state, state)
            if after is not None:
                found.state, found.mark = after, ""  # by a Go program
        else:
            found = StoredTask(
                state=state and msgspec.structs.replace(state, **extra_of(ours)),
                mark=ours.mark,
                epoch=ours.epoch,
                seq=ours.seq,
                of_go=found.of_go,
            )
    return found


def _foreign(uuid: str, found: str) -> NameRefused:
    return NameRefused(
        f"queue {quoted(name_of(uuid))} in RabbitMQ holds what is no state of task {quoted(uuid)}, "
        f"and was left as it is (choose another UUID): {found}",
        uuid,
    )


def _split(body: bytes) -> tuple[bytes, _OwnField | None]:
    """Return Go's document and our field; a result of a Go program may look like the field."""
    document, field = without_field(body)
    try:
        return (document, _read(field)) if field else (body, None)
    except MALFORMED:
        return body, None


def document_of(body: bytes) -> bytes:
    """Return Go's document of a task's message."""
    return _split(body)[0]


# Groups, and what is listed


class GroupRecord(msgspec.Struct, array_like=True, gc=False):
    """A group. `document` is Go's, or nothing if only members of it are known; `made_at` in µs."""

    seq: int = 0
    document: bytes = b""
    made_at: int = 0
    total: int = 0
    callback: bytes = b""
    ready: bool = False
    failed_member: str = ""
    fired: bool = False


class Member(msgspec.Struct, array_like=True, gc=False):
    """A member that has arrived. `body`: the message of its task, if known."""

    uuid: str
    body: bytes = b""


class ReadyEntry(msgspec.Struct, array_like=True, gc=False):
    group: str
    callback: bytes
    failed_member: str


class OutboxEntry(msgspec.Struct, array_like=True, gc=False):
    """An open outbox. `kept_at` in µs."""

    key: str
    kept_at: int
    bodies: Sequence[bytes]


pack: Final = msgspec.msgpack.Encoder().encode
decode_group_record: Final = msgspec.msgpack.Decoder(GroupRecord).decode
decode_member: Final = msgspec.msgpack.Decoder(Member).decode
decode_ready: Final = msgspec.msgpack.Decoder(ReadyEntry).decode
decode_outbox: Final = msgspec.msgpack.Decoder(OutboxEntry).decode
