"""A message as MongoDB keeps it, and the session that holds it.

_id, uuid, name, queue, body, priority, due_at, parks, sent_at    of the message
order                                     its place in the queue; of one that has waited as WAITING
                                          its due_at - HEAD
tenant                                    in a fair queue alone; its order is its turn (turns.py)
status, lease, session                                            where it is; which claim has it
fence, strikes, begun                                             how often it came and failed;
                                          `fence` is Delivery.count
deed, deed_at                                                     its intent, once it is settled
reason, error, died_at                                            of a dead letter
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Sequence
from enum import IntEnum

import msgspec

from machinery_py.brokers.base import DeadLetter, Delivery, Message
from machinery_py.clock import micros, moment_of
from machinery_py.connections.mongodb.client import Document, Store
from machinery_py.connections.session_files import ALL, Run
from machinery_py.fences import Fence
from machinery_py.receipts import Receipt
from machinery_py.texts import printable


class Status(IntEnum):
    """Where a message is."""

    WAITING = 0
    DELAYED = 1
    HELD = 2
    ENDING = 3  # settled: what follows from it is its intent, and being carried out
    DEAD = 4
    TAKEN = 5  # by a claim that does not know yet whether the queue is paused; counts as waiting


#: Still in its queue, as listings see it.
WAITS = (Status.WAITING, Status.TAKEN)
QUEUED: Document = {"$in": list(WAITS)}


HEAD = 2**62  # above all places and moments


class MongoReceipt(msgspec.Struct, Receipt, frozen=True, gc=False):
    """`uuid`: of the task; `order`: of the message."""

    id: str
    lease: str
    uuid: str
    order: int = 0

    def __str__(self) -> str:
        return f"{self.id}/{self.lease}"


#: Fields of a message that nobody holds.
FREE: Document = {"lease": "", "session": "", "begun": 0}


def documents_of(
    messages: Sequence[Message], *, token: str, first: int, now: int
) -> list[Document]:
    """Return the documents of new messages.

    Args:
        token: names the put; "" one that is never repeated.
        first: the place of the first message.
    """
    name = token or secrets.token_hex(12)
    documents: list[Document] = []
    for number, message in enumerate(messages):
        due_at = 0 if message.eta is None else max(0, micros(message.eta))
        fair = {} if message.tenant is None else {"tenant": printable(message.tenant)}
        documents.append(
            {
                "_id": f"{name}.{number}",
                "uuid": printable(message.uuid),
                "name": printable(message.name),
                "queue": message.queue,
                "body": message.body,
                "priority": message.priority,
                "order": first + number,
                "status": Status.DELAYED if due_at > now else Status.WAITING,
                "due_at": due_at,
                "parks": message.parks,
                "strikes": 0,
                "fence": 0,
                **FREE,
                "sent_at": now,
                "deed": b"",
                "deed_at": 0,
                "reason": "",
                "error": "",
                "died_at": 0,
                **fair,
            }
        )
    return documents


def message_of(document: Document) -> Message:
    due_at = document["due_at"]
    return Message(
        uuid=document["uuid"],
        name=document["name"],
        queue=document["queue"],
        body=bytes(document["body"]),
        eta=moment_of(due_at) if due_at else None,
        priority=document["priority"],
        parks=document["parks"],
        tenant=document.get("tenant"),
    )


def delivery_of(document: Document, fence: Fence) -> Delivery:
    return Delivery(
        body=bytes(document["body"]),
        queue=document["queue"],
        count=document["fence"],
        fence=fence,
        strikes=document["strikes"],
        receipt=MongoReceipt(
            document["_id"], document["lease"], document["uuid"], document["order"]
        ),
        parks=document["parks"],
        priority=document["priority"],
        sent_at=moment_of(document["sent_at"]),
    )


def letter_of(document: Document) -> DeadLetter:
    return DeadLetter(
        id=document["_id"],
        uuid=document["uuid"],
        name=document["name"],
        queue=document["queue"],
        body=bytes(document["body"]),
        reason=document["reason"],
        error=document["error"],
        strikes=document["strikes"],
        died_at=moment_of(document["died_at"]),
    )


def held(delivery: Delivery) -> Document:
    """Return the query that finds a message's document while this delivery of it lasts."""
    receipt = receipt_of(delivery)
    return {"_id": receipt.id, "lease": receipt.lease, "status": Status.HELD}


def receipt_of(delivery: Delivery) -> MongoReceipt:
    """Return the delivery's receipt; one of another store gives a receipt that finds nothing."""
    receipt = delivery.receipt
    return receipt if isinstance(receipt, MongoReceipt) else MongoReceipt("", "none", "")


def run_of(id: str) -> Run:
    """Return what notes a message in its consumer's file."""
    digest = hashlib.blake2b(id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little"), ALL


def release(store: Store, session: str, began: Collection[Run] | None) -> None:
    """Give back what a session holds, each to its old place. May be repeated.

    Args:
        began: what gets a strike. None: what the database says has begun.
    """
    untake(store, {"session": session})
    messages = store.machinery_messages
    back: Document = {"$set": {**FREE, "status": Status.WAITING}}
    mine: Document = {"session": session, "status": Status.HELD}
    if began is None:
        messages.update_many({**mine, "begun": 1}, {**back, "$inc": {"strikes": 1}})
    elif began:
        ids = [one["_id"] for one in messages.find(mine, {"_id": 1})]
        blamed = {"_id": {"$in": [id for id in ids if run_of(id) in began]}}
        messages.update_many({**mine, **blamed}, {**back, "$inc": {"strikes": 1}})
    messages.update_many(mine, back)


def untake(store: Store, which: Document) -> None:
    """Undo the first step of claims, so that their second step finds nothing. May be repeated."""
    store.machinery_messages.update_many(
        {**which, "status": Status.TAKEN}, {"$set": {**FREE, "status": Status.WAITING}}
    )


def paused_of(store: Store, queues: Sequence[str]) -> set[str]:
    """Return those of these queues that are paused."""
    paused = {"_id": {"$in": list(queues)}, "paused": 1}
    return {one["_id"] for one in store.machinery_queues.find(paused, {"_id": 1})}
