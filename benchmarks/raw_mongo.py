"""Operations of the MongoDB store without the library: the limit of server and pymongo.

    send     the token with the submission; the PENDING state; the message; the token's submission
             is emptied
    claim    the ids that wait are read and taken; the queue is asked for a pause; they are held,
             and read; their states are read
    settle   the messages end with all that follows; the states are read and written; the messages
             are deleted

The documents and indexes are the store's own, as far as these operations touch them. One thread
does one after the other.
"""

from __future__ import annotations

import os
import time
import uuid
from typing import Any

BODY = (
    b'{"UUID":"task_0","Name":"noop","Args":[{"Type":"int64","Value":1}],'
    b'"RoutingKey":"machinery_tasks"}'
)
DEED = BODY * 4  # a submission, or the end of a task, as the store keeps it until all of it is done
STATE = BODY * 2  # what we keep of a state beside Go's fields
QUEUE = "machinery_tasks"
WAITING, HELD, ENDING, TAKEN = 0, 2, 3, 5
FILLED = 1000  # documents in an insert where sending is not what is measured

Document = dict[str, Any]


def connect(url: str) -> Any:
    """Separate database, with the indexes that the operations use."""
    from pymongo import MongoClient

    client: MongoClient[Document] = MongoClient(url, w="majority")
    database = client["bench_raw"]
    for keys in (
        [("status", 1), ("queue", 1), ("priority", -1), ("order", 1)],
        [("status", 1), ("due_at", 1)],
        [("session", 1)],
        [("lease", 1)],
        [("deed_at", 1)],
    ):
        database.messages.create_index(keys)
    for name in ("changed_at", "expires_at", "deed_at", "outbox_at"):
        database.tasks.create_index(name)
    for name in ("at", "deed_at"):
        database.tokens.create_index(name)
    return database


def now() -> int:
    return time.time_ns() // 1000


def message(key: str, order: int) -> Document:
    return {
        "_id": f"{uuid.uuid4().hex}.0",
        "uuid": key,
        "name": "noop",
        "queue": QUEUE,
        "body": BODY,
        "priority": 0,
        "order": order,
        "status": WAITING,
        "due_at": 0,
        "parks": 0,
        "strikes": 0,
        "fence": 0,
        "lease": "",
        "session": "",
        "begun": 0,
        "sent_at": order,
        "deed": b"",
        "deed_at": 0,
        "reason": "",
        "error": "",
        "died_at": 0,
    }


def task(key: str, moment: int) -> Document:
    return {
        "_id": key,
        "state": "PENDING",
        "task_name": "noop",
        "results": [],
        "error": "",
        "run": 0,
        "mark": "",
        "epoch": 0,
        "queue": QUEUE,
        "changed_at": moment,
        "expires_at": 0,
        "version": 1,
        "ours": STATE,
        "deed": b"",
        "deed_at": 0,
        "outbox": b"",
        "outbox_at": 0,
        "stamp": "0123456789abcdef",
    }


class RawSender:
    """Sender of blocks, to be run in turns with the library, so that load affects both alike."""

    def __init__(self, url: str) -> None:
        self._database = connect(url)

    def __enter__(self) -> RawSender:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.client.close()

    def send(self, count: int) -> float:
        """Send a block; return the seconds it took."""
        tokens, tasks, messages = (
            self._database.tokens,
            self._database.tasks,
            self._database.messages,
        )
        began = time.perf_counter()
        for _ in range(count):
            key, token, moment = f"task_{uuid.uuid4()}", str(uuid.uuid4()), now()
            tokens.insert_one(
                {"_id": token, "at": moment, "kind": "submission", "deed": DEED, "deed_at": moment}
            )
            tasks.find_one({"_id": key}, {"results": 0, "outbox": 0})
            tasks.insert_one(task(key, moment))
            messages.insert_one(message(key, moment))
            tokens.update_one({"_id": token}, {"$set": {"deed": b"", "deed_at": 0}})
        return time.perf_counter() - began


def drain_raw(url: str, count: int, *, claim: int, settle: int) -> float:
    """Return the tasks per second, with a claim per `claim` tasks, a settlement per `settle`."""
    database = connect(url)
    keys = [f"task_{number:036d}" for number in range(count)]
    for start in range(0, count, FILLED):
        part = keys[start : start + FILLED]
        database.tasks.insert_many([task(key, now()) for key in part])
        database.messages.insert_many([message(key, now()) for key in part])
    began = time.perf_counter()
    held: list[Document] = []
    done = number = 0
    while done < count:
        while len(held) < min(settle, count - done):
            number += 1
            held += _claim(database, f"session.{number}", claim)
        some, held = held[:settle], held[settle:]
        _settle(database, some)
        done += len(some)
    rate = count / (time.perf_counter() - began)
    database.client.close()
    return rate


def _claim(database: Any, lease: str, limit: int) -> list[Document]:
    order = [("priority", -1), ("order", 1)]
    waits = {"status": WAITING, "queue": QUEUE}
    ids = [
        one["_id"]
        for one in database.messages.find(waits, {"_id": 1})
        .sort(order)
        .limit(limit)
        .batch_size(limit)
    ]
    mine = {"$set": {"status": TAKEN, "lease": lease, "session": "session", "begun": 0}}
    database.messages.update_many({"_id": {"$in": ids}, "status": WAITING}, mine)
    database.queues.find_one({"_id": QUEUE, "paused": 1}, {"_id": 1})
    taken = {"queue": QUEUE, "lease": lease, "status": TAKEN}
    database.messages.update_many(taken, {"$set": {"status": HELD}, "$inc": {"fence": 1}})
    found = list(
        database.messages.find({**taken, "status": HELD}).sort(order).batch_size(limit + 1)
    )
    _states(database, found)
    return found


def _states(database: Any, messages: list[Document]) -> list[Document]:
    keys = [one["uuid"] for one in messages]
    return list(
        database.tasks.find({"_id": {"$in": keys}}, {"results": 0, "outbox": 0}).batch_size(
            len(keys) + 1
        )
    )


def _settle(database: Any, messages: list[Document]) -> None:
    from pymongo import UpdateOne

    moment = now()
    database.messages.bulk_write(
        [
            UpdateOne(
                {"_id": one["_id"], "lease": one["lease"], "status": HELD},
                {"$set": {"status": ENDING, "deed": DEED, "deed_at": moment}},
            )
            for one in messages
        ],
        ordered=False,
    )
    after = {
        "state": "SUCCESS",
        "task_name": "noop",
        "results": [{"type": "int64", "value": 1}],
        "error": "",
        "run": 0,
        "mark": f"bench-{os.getpid()}",
        "epoch": 0,
        "queue": QUEUE,
        "changed_at": moment,
        "expires_at": moment,
        "version": 2,
        "ours": STATE,
        "stamp": "fedcba9876543210",
    }
    database.tasks.bulk_write(
        [
            UpdateOne(
                {"_id": one["_id"], "state": one["state"], "version": one["version"]},
                {"$set": after},
            )
            for one in _states(database, messages)
        ],
        ordered=False,
    )
    ids = [one["_id"] for one in messages]
    database.messages.delete_many({"_id": {"$in": ids}, "status": ENDING})
