"""Queues and messages of SQS: names, what a message carries beside its body, requests of ten."""

from __future__ import annotations

import base64
import datetime as dt
import math
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from botocore.exceptions import BotoCoreError, ClientError

from machinery_py.brokers.base import DeadLetter
from machinery_py.errors import BrokerUnavailable, NameRefused, PublishUnknown, StoreUnusable

from .aws import asking, failure, was_carried_out

NAME = re.compile(r"[A-Za-z0-9_-]{1,75}(\.fifo)?")
UNSENDABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
DEAD = "-dead"  # ends the name of a queue of dead letters
TEN = 10  # messages in a request
MOST = 262_144  # bytes in a request, whatever its region allows today
RESERVED = 10_240  # bytes of a message for the attribute, with the error of a dead letter
LONGEST_DELAY = 900  # seconds
LONGEST_HIDING = 43_000  # seconds; SQS says 12 hours


class Extra(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The message attribute `machinery`, which Go's messages lack.

    Attributes:
        binary: the body is base64 after a `=`, since SQS takes text only.
        eta: not to be handed out before.
        fence: deliveries of its former copies.
        sent_at: of the first copy.
        letter: it is a dead letter, with this; `body` and `id` are empty here.
    """

    binary: bool = False
    eta: dt.datetime | None = None
    parks: int = 0
    fence: int = 0
    sent_at: dt.datetime | None = None
    letter: DeadLetter | None = None


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Extra).decode
PLAIN = Extra()


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A queue that exists. `dead`: the queue of its dead letters, as SQS knows it."""

    name: str
    url: str
    dead: str
    room: int

    @property
    def is_fifo(self) -> bool:
        return self.name.endswith(".fifo")


def extra_of(raw: dict[str, Any]) -> Extra:
    """Return what a received message carries; nothing if that cannot be read."""
    text = raw.get("MessageAttributes", {}).get("machinery", {}).get("StringValue", "{}")
    try:
        return _decode(text)
    except msgspec.DecodeError:
        return PLAIN


def body_of(raw: dict[str, Any], extra: Extra) -> bytes:
    text = str(raw["Body"])
    try:
        return base64.b64decode(text[1:]) if extra.binary else text.encode()
    except ValueError:
        return text.encode()


def receives_of(raw: dict[str, Any]) -> int:
    return int(raw["Attributes"]["ApproximateReceiveCount"])


def sent_at_of(raw: dict[str, Any]) -> dt.datetime:
    return dt.datetime.fromtimestamp(
        int(raw["Attributes"]["SentTimestamp"]) / 1000, dt.timezone.utc
    )


def entry_of(body: bytes, extra: Extra) -> dict[str, Any]:
    """Return a message to be sent. Text, such as Go's JSON, goes as it is."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = ""
    if not text or UNSENDABLE.search(text):
        text = "=" + base64.b64encode(body).decode()
        extra = msgspec.structs.replace(extra, binary=True)
    entry: dict[str, Any] = {"MessageBody": text}
    if extra != PLAIN:
        value = UNSENDABLE.sub("?", _encode(extra).decode())
        entry["MessageAttributes"] = {"machinery": {"DataType": "String", "StringValue": value}}
    return entry


def size_of(entry: dict[str, Any]) -> int:
    extra = entry.get("MessageAttributes", {}).get("machinery", {}).get("StringValue", "")
    return (
        len(entry["MessageBody"].encode()) + len(extra.encode()) + 30
    )  # the attribute's name, too


def delay_of(eta: dt.datetime | None, now: dt.datetime) -> int:
    """Return the whole seconds until then; never too few."""
    return math.ceil((eta - now).total_seconds()) if eta and eta > now else 0


def in_tens(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), TEN):
        yield items[start : start + TEN]


class Queues:
    """The queues below a prefix. Any thread may use it."""

    def __init__(self, client: Any, prefix: str) -> None:
        self.client = client
        self.prefix = prefix
        self._known: dict[str, Queue] = {}
        self._watched: set[str] = set()
        self._mutex = threading.Lock()

    def watch(self, name: str) -> None:
        """Let `names` have this one if it is there, though it was not used here yet."""
        self._watched.add(name)

    def names(self) -> set[str]:
        """Return the queues below the prefix; without one, those that were used here."""
        if not self.prefix:
            with self._mutex:
                return {name for name in (*self._known, *self._watched) if not is_dead(name)}
        with asking("listing queues", BrokerUnavailable):
            pages = self.client.get_paginator("list_queues").paginate(QueueNamePrefix=self.prefix)
            urls = [url for page in pages for url in page.get("QueueUrls", [])]
        names = {url.rpartition("/")[2].removeprefix(self.prefix) for url in urls}
        return {name for name in names if not is_dead(name)}

    def open(self, name: str) -> Queue:
        """Return a queue, made if it is not there.

        Raises:
            NameRefused: SQS cannot have it.
        """
        if not NAME.fullmatch(name) or len(self.prefix + name) > 80 or is_dead(name):
            raise NameRefused(
                f"queue {name!r}: SQS takes up to 75 letters, digits, - and _, and .fifo at the "
                f"end; {DEAD} ends the names of dead letters' queues (choose another name)",
                name,
            )
        return self._open(self.prefix + name, make=True)

    def open_dead(self, queue: Queue) -> Queue:
        return self._open(queue.dead, make=True)

    def find(self, name: str) -> Queue | None:
        """Return a queue if it is there."""
        return self._find(self.prefix + name)

    def find_dead(self, queue: Queue) -> Queue | None:
        """Return the queue of its dead letters if it is there."""
        return self._find(queue.dead)

    def _find(self, full: str) -> Queue | None:
        try:
            return self._open(full, make=False)
        except LookupError:
            return None

    def _open(self, full: str, *, make: bool) -> Queue:
        name = full.removeprefix(self.prefix)
        with self._mutex:
            if known := self._known.get(name):
                return known
        with asking(f"opening queue {name!r}", BrokerUnavailable):
            try:
                url = self.client.get_queue_url(QueueName=full)["QueueUrl"]
            except self.client.exceptions.QueueDoesNotExist:
                if not make:
                    raise LookupError(name) from None
                attributes = {"FifoQueue": "true"} if full.endswith(".fifo") else {}
                attributes["MessageRetentionPeriod"] = "1209600"  # 14 days, all that there are
                url = self.client.create_queue(QueueName=full, Attributes=attributes)["QueueUrl"]
            found = self.attributes(url, "MaximumMessageSize", "RedrivePolicy")
        base, dot, fifo = full.partition(".")
        policy = msgspec.json.decode(found.get("RedrivePolicy", "{}"))
        dead = str(policy.get("deadLetterTargetArn", "")).rpartition(":")[2]
        queue = Queue(
            name=name,
            url=url,
            dead=dead or f"{base}{DEAD}{dot}{fifo}",
            room=int(found.get("MaximumMessageSize", MOST)),
        )
        with self._mutex:
            self._known[name] = queue
        return queue

    def attributes(self, url: str, *names: str) -> dict[str, str]:
        with asking("reading a queue's attributes", BrokerUnavailable):
            reply = self.client.get_queue_attributes(QueueUrl=url, AttributeNames=list(names))
        return dict(reply.get("Attributes", {}))

    def send(
        self, queue: Queue, rows: Sequence[tuple[int, dict[str, Any]]], stored: set[int]
    ) -> None:
        """Send the messages of (number, message), and add the numbers of those that are stored.

        Raises:
            BrokerUnavailable, StoreUnusable: the others are not.
            PublishUnknown: one of the others may be.
        """
        what = f"sending to queue {queue.name!r}"
        for batch in _fitting(rows):
            request = [{"Id": str(number), **entry} for number, entry in batch]
            try:
                reply = self.client.send_message_batch(QueueUrl=queue.url, Entries=request)
            except (BotoCoreError, ClientError) as error:
                if was_carried_out(error):
                    raise PublishUnknown(f"{what}: the reply was lost") from error
                raise failure(what, error, BrokerUnavailable) from error
            stored.update(int(one["Id"]) for one in reply.get("Successful", []))
            for one in reply.get("Failed", []):
                kind = StoreUnusable if one.get("SenderFault") else BrokerUnavailable
                raise kind(f"{what}: AWS answers {one.get('Code')}")

    def delete(self, queue: Queue, handles: Sequence[str]) -> list[bool]:
        """Delete up to ten messages in hand. Returns whether each was ours."""
        request = [{"Id": str(i), "ReceiptHandle": one} for i, one in enumerate(handles)]
        with asking(f"deleting from queue {queue.name!r}", BrokerUnavailable):
            reply = self.client.delete_message_batch(QueueUrl=queue.url, Entries=request)
        return _verdicts(reply, len(handles))

    def hide(self, queue: Queue, handles: Sequence[str], seconds: int) -> list[bool]:
        """Hide up to ten messages in hand for so long. Returns whether each was ours."""
        request = [
            {"Id": str(i), "ReceiptHandle": one, "VisibilityTimeout": seconds}
            for i, one in enumerate(handles)
        ]
        with asking(f"hiding messages of queue {queue.name!r}", BrokerUnavailable):
            reply = self.client.change_message_visibility_batch(QueueUrl=queue.url, Entries=request)
        return _verdicts(reply, len(handles))

    def receive(self, queue: Queue, *, limit: int, hidden: int, wait: int) -> list[dict[str, Any]]:
        """Receive up to ten messages, which nobody else gets for `hidden` seconds."""
        with asking(f"receiving from queue {queue.name!r}", BrokerUnavailable):
            reply = self.client.receive_message(
                QueueUrl=queue.url,
                MaxNumberOfMessages=limit,
                VisibilityTimeout=hidden,
                WaitTimeSeconds=wait,
                MessageAttributeNames=["machinery"],
                AttributeNames=["ApproximateReceiveCount", "SentTimestamp"],
            )
        return list(reply.get("Messages", []))


def is_dead(name: str) -> bool:
    return name.removesuffix(".fifo").endswith(DEAD)


def _verdicts(reply: dict[str, Any], count: int) -> list[bool]:
    failed = {int(one["Id"]): one for one in reply.get("Failed", [])}
    for one in failed.values():
        if not one.get("SenderFault"):
            raise BrokerUnavailable(f"queue: AWS answers {one.get('Code')}")
    return [place not in failed for place in range(count)]


def _fitting(
    rows: Sequence[tuple[int, dict[str, Any]]],
) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    """The rows that go into one request each."""
    batch: list[tuple[int, dict[str, Any]]] = []
    size = 0
    for number, entry in rows:
        if batch and (len(batch) == TEN or size + size_of(entry) > MOST):
            yield batch
            batch, size = [], 0
        batch.append((number, entry))
        size += size_of(entry)
    if batch:
        yield batch
