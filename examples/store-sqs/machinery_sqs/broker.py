"""Messages in SQS.

    sqs://eu-west-1/shop-       region, and how the names of its queues begin; both may be empty

    <prefix><queue>             messages; the body is Go's JSON. Go's URL has no prefix
    <prefix><queue>.fifo        a FIFO queue: one task of a message group runs at a time
    <prefix><queue>-dead        dead letters; or the queue that the queue's redrive policy names

Each message may have an attribute `machinery` (`queues.Extra`): what Go's messages lack.

Limits: see `SQSBroker.features` and README.md.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, ClassVar

import msgspec

from machinery_py.brokers.base import (
    Broker,
    BrokerFeatures,
    Consumer,
    DeadLetter,
    Message,
    QueueStats,
    WorkerInfo,
)
from machinery_py.brokers.entries import close_all, new_letter
from machinery_py.clock import SYSTEM_CLOCK, Clock
from machinery_py.config.options import Section, option
from machinery_py.errors import (
    DecodeError,
    MachineryError,
    PublishRefused,
    PublishUnknown,
    StoreUnusable,
    Unsupported,
    for_good,
)
from machinery_py.stores.open import Family, FamilyOptions
from machinery_py.texts import cut, printable
from machinery_py.wire.signatures import decode_signature

from .aws import connect, split
from .consumer import SQSConsumer
from .queues import (
    LONGEST_DELAY,
    RESERVED,
    Extra,
    Queue,
    Queues,
    body_of,
    delay_of,
    entry_of,
    extra_of,
    in_tens,
    sent_at_of,
    size_of,
)

TOKEN_LIFE = 600.0  # seconds
MAX_LETTER_ERROR = 2_048  # bytes of the error that a dead letter keeps
LOOK = 30  # seconds for which dead letters are hidden while they are looked at
COUNTS = (
    "ApproximateNumberOfMessages",
    "ApproximateNumberOfMessagesNotVisible",
    "ApproximateNumberOfMessagesDelayed",
)


class Token(msgspec.Struct):
    """A put, whose messages at the positions `stored` are stored."""

    used_at: float
    mutex: Any
    stored: set[int]
    done: bool = False


class SQSBroker(Broker):
    """A broker over a client of boto3, which it does not close."""

    features = BrokerFeatures(
        message_groups=True,
        name="sqs",
        priorities=False,
        peeking=False,
        pausing=False,
        deduplicates=False,
        whole_batches=False,
        keeps_turns=False,
        tells_age=False,
    )

    def __init__(
        self, client: Any, *, prefix: str = "", lease: float = 10.0, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.queues = Queues(client, prefix)
        self.lease = lease
        self.clock = clock
        self._mutex = threading.Lock()
        self._tokens: dict[str, Token] = {}
        self._consumers: list[SQSConsumer] = []

    def put(self, messages: Sequence[Message], *, token: str) -> bool:
        used = self._token(token)
        with used.mutex:
            if used.done:
                return False
            left = [place for place in range(len(messages)) if place not in used.stored]
            rows: dict[Queue, list[tuple[int, dict[str, Any]]]] = {}
            for place in left:
                queue = self.queues.open(messages[place].queue)
                entry = self._entry(queue, messages[place], f"{token}/{place}" if token else "")
                rows.setdefault(queue, []).append((place, entry))
            try:
                for queue, row in rows.items():
                    self.queues.send(queue, row, used.stored)
            except PublishUnknown as error:
                error.left = frozenset(left) - used.stored
                raise
            except (PublishRefused, StoreUnusable) as error:
                raise _refused(error, frozenset(left), used.stored) from error
            used.done = True
            return True

    def _token(self, token: str) -> Token:
        now = self.clock.monotonic()
        if not token:
            return Token(now, threading.Lock(), set())
        with self._mutex:
            for old in list(self._tokens):  # the oldest first
                if self._tokens[old].used_at > now - TOKEN_LIFE:
                    break
                del self._tokens[old]
            return self._tokens.setdefault(token, Token(now, threading.Lock(), set()))

    def was_put(self, token: str) -> bool:
        with self._mutex:
            used = self._tokens.get(token)
            return used is not None and (used.done or bool(used.stored))

    def _entry(self, queue: Queue, message: Message, token: str) -> dict[str, Any]:
        if message.priority:
            raise Unsupported(
                f"{message.name or 'message'} {message.uuid}: SQS has no priorities (found "
                f"{message.priority}; take a queue for each priority, and weights)"
            )
        delay = delay_of(message.eta, self.clock.now())
        far = delay > LONGEST_DELAY or (queue.is_fifo and delay)
        extra = Extra(parks=message.parks, eta=message.eta if far else None)
        entry = entry_of(message.body, extra)
        if size_of(entry) > queue.room - RESERVED:
            raise for_good(
                PublishRefused(
                    f"{message.name or 'message'} {message.uuid}: {size_of(entry):,} bytes, and "
                    f"queue {queue.name!r} takes {queue.room - RESERVED:,} (hand over where the "
                    "data lies, such as a key in S3)"
                )
            )
        group = _group_of(queue, message)
        if queue.is_fifo:
            entry["MessageGroupId"] = group
            # Never the task's UUID, as Go has it: SQS would swallow a retry within five minutes.
            entry["MessageDeduplicationId"] = sha256((token or _unique()).encode()).hexdigest()
        elif delay:
            entry["DelaySeconds"] = min(delay, LONGEST_DELAY)
        return entry

    def resend(self, queue: Queue, body: bytes, extra: Extra) -> None:
        """Send a message again to a queue that is no FIFO queue, with what it carries."""
        delay = delay_of(extra.eta, self.clock.now())
        if delay <= LONGEST_DELAY:
            extra = msgspec.structs.replace(extra, eta=None)
        entry = entry_of(body, extra)
        self.queues.send(queue, [(0, {**entry, "DelaySeconds": min(delay, LONGEST_DELAY)})], set())

    def keep_dead(self, queue: Queue, letter: DeadLetter) -> None:
        """Put a dead letter into the queue of those."""
        dead = self.queues.open_dead(queue)
        bare = msgspec.structs.replace(
            letter,
            id="",
            body=b"",
            uuid=printable(letter.uuid),
            name=printable(letter.name),
            reason=printable(letter.reason),
            error=cut(printable(letter.error), MAX_LETTER_ERROR),
        )
        entry = entry_of(letter.body, Extra(letter=bare))
        if dead.is_fifo:
            unique = _unique()
            entry |= {"MessageGroupId": unique, "MessageDeduplicationId": unique}
        self.queues.send(dead, [(0, entry)], set())

    def consume(self, queues: Sequence[str], *, worker: str) -> Consumer:
        consumer = SQSConsumer(self, queues, worker)
        with self._mutex:
            self._consumers.append(consumer)
        return consumer

    def forget(self, consumer: SQSConsumer) -> None:
        with self._mutex:
            if consumer in self._consumers:
                self._consumers.remove(consumer)

    def declare(self, queues: Sequence[str]) -> Sequence[str]:
        for name in queues:
            self.queues.open_dead(self.queues.open(name))
        return [f"SQS: queue {name} and the queue of its dead letters" for name in queues]

    def tend(self) -> float:
        return 1.0  # SQS keeps house itself, by whole seconds

    def waiting(self, queue: str) -> int:
        found = self.queues.find(queue)
        return self._count(found).waiting if found else 0

    def stats(self) -> list[QueueStats]:
        lines: list[QueueStats] = []
        for name in sorted(self.queues.names()):
            if queue := self.queues.find(name):
                dead = self.queues.find_dead(queue)
                letters = self._count(dead).waiting if dead else 0
                lines.append(self._count(queue, dead=letters))
        return lines

    def _count(self, queue: Queue, dead: int = 0) -> QueueStats:
        found = self.queues.attributes(queue.url, *COUNTS)
        waiting, running, delayed = (int(found.get(name, 0)) for name in COUNTS)
        return QueueStats(
            queue=queue.name, waiting=waiting, running=running, delayed=delayed, dead=dead
        )

    def workers(self) -> list[WorkerInfo]:
        """The consumers of this process: SQS knows none."""
        with self._mutex:
            alive = [one for one in self._consumers if one.is_alive]
        return [msgspec.structs.replace(one.info, holding=one.holding) for one in alive]

    def purge(self, queue: str) -> int:
        """Delete the waiting messages. SQS shows nobody the delayed ones, and they stay."""
        found, count = self.queues.find(queue), 0
        while found and (raws := self.queues.receive(found, limit=10, hidden=LOOK, wait=0)):
            count += sum(self.queues.delete(found, [raw["ReceiptHandle"] for raw in raws]))
        return count

    def dead_letters(self, *, limit: int, queue: str = "") -> list[DeadLetter]:
        return self._look(frozenset(), [queue] if queue else sorted(self.queues.names()))[:limit]

    def take_dead(self, ids: Sequence[str]) -> list[DeadLetter]:
        letters = self._look(frozenset(ids), sorted(self.queues.names()))
        return [letter for letter in letters if letter.id in ids]

    def _look(self, takes: frozenset[str], names: Sequence[str]) -> list[DeadLetter]:
        """Return the letters of these queues, the newest first, and delete those to be taken."""
        letters: dict[str, DeadLetter] = {}
        queues = {dead.url: (dead, queue) for name in names for dead, queue in self._dead_of(name)}
        for dead, queue in queues.values():
            shown: list[str] = []
            try:
                while raws := self.queues.receive(dead, limit=10, hidden=LOOK, wait=0):
                    taken: list[str] = []
                    for raw in raws:
                        letter = _letter_of(queue.name, raw)
                        letters[letter.id] = letter
                        (taken if letter.id in takes else shown).append(raw["ReceiptHandle"])
                    if taken:
                        self.queues.delete(dead, taken)
            finally:
                for part in in_tens(shown):
                    self.queues.hide(dead, part, 0)
        return sorted(letters.values(), key=lambda letter: letter.died_at, reverse=True)

    def _dead_of(self, name: str) -> list[tuple[Queue, Queue]]:
        queue = self.queues.find(name)
        dead = self.queues.find_dead(queue) if queue else None
        return [(dead, queue)] if dead and queue else []

    def bury(self, message: Message, *, queue: str, reason: str, error: str) -> None:
        now = self.clock.now()
        letter = new_letter(message, now, queue=queue, reason=reason, error=error)
        try:
            self.keep_dead(self.queues.open(queue), letter)
        except StoreUnusable as failure:
            raise for_good(PublishRefused(str(failure))) from failure

    def close(self) -> None:
        with self._mutex:
            consumers = list(self._consumers)
        close_all(consumers)


def _refused(error: MachineryError, places: frozenset[int], stored: set[int]) -> PublishRefused:
    """Return the refusal of a put, of which some messages may be stored."""
    refused = error if isinstance(error, PublishRefused) else for_good(PublishRefused(str(error)))
    if stored:
        refused.left = places - stored
    return refused


def _group_of(queue: Queue, message: Message) -> str:
    """Return Go's BrokerMessageGroupId, which FIFO queues need and other queues cannot keep to."""
    group = ""
    if queue.is_fifo or b'"BrokerMessageGroupId":""' not in message.body:
        try:
            group = decode_signature(message.body).broker_message_group_id
        except DecodeError:
            group = ""
    if bool(group) != queue.is_fifo:
        raise for_good(
            PublishRefused(
                f"{message.name or 'message'} {message.uuid}: queue {queue.name!r} "
                + (
                    "is a FIFO queue, and needs broker_message_group_id in the signature"
                    if queue.is_fifo
                    else f"keeps no order of group {cut(group, 80)!r} (take a queue whose name "
                    "ends in .fifo)"
                )
            )
        )
    return group


def _letter_of(queue: str, raw: dict[str, Any]) -> DeadLetter:
    """Return a dead letter, which SQS may have put there by itself (a redrive policy)."""
    extra, id = extra_of(raw), str(raw["MessageId"])
    body = body_of(raw, extra)
    if extra.letter is not None:
        return msgspec.structs.replace(extra.letter, id=id, body=body)
    try:
        signature = decode_signature(body)
        uuid, name = signature.uuid, signature.name
    except DecodeError:
        uuid, name = "", ""
    died_at = sent_at_of(raw)
    return DeadLetter(
        id=id, uuid=uuid, name=name, queue=queue, body=body, reason="redrive", died_at=died_at
    )


def _unique() -> str:
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class SQSOptions(Section):
    """Own options: `[stores.sqs]` in a TOML file, MACHINERY_STORES=sqs.endpoint:http://…"""

    PREFIX: ClassVar[str] = "stores.sqs."

    endpoint: str = option("", "the address of the service; empty: AWS, in the URL's region")


class SQSFamily(Family):
    """What a URL opens: sqs://region/prefix."""

    roles = ("broker",)
    section = SQSOptions

    def __init__(self, url: str, options: FamilyOptions) -> None:
        super().__init__(url, options)
        own = options.own if isinstance(options.own, SQSOptions) else SQSOptions()
        region, self._prefix = split(url)
        self._client = connect("sqs", region, own.endpoint, options.timeout)

    def broker(self) -> SQSBroker:
        options = self.options
        broker = SQSBroker(
            self._client, prefix=self._prefix, lease=options.lease, clock=options.clock
        )
        broker.queues.watch(options.default_queue)
        return broker

    def close(self) -> None:
        self._client.close()
