"""What both scripts of the baseline know: its keys, and what is written to them.

    raw           list     waiting messages
    raw:held      hash     messages that a worker has
    raw:count     number   messages sent
    raw:ended     number   tasks settled
    raw:sleepers  set      as ours has it; nobody is ever in it
    raw:t:<id>    string   that a send was carried out
    raw:s:<id>    string   the state of a task
    raw:done      channel  ids of tasks that have ended

Limits: a batch is in neither place between its claim and the note that it is held; a worker that
dies then loses it.
"""

from __future__ import annotations

import json
import uuid

from redis import Redis

from benchmarks.peers.driving import URL

QUEUE, HELD, COUNT, ENDED, SLEEPERS = "raw", "raw:held", "raw:count", "raw:ended", "raw:sleepers"
TOKEN, STATE, DONE = "raw:t:", "raw:s:", "raw:done"
BATCH = 250  # messages in one claim or settlement; our worker reaches this when many wait
KEPT = 3600  # seconds that a state is kept


def connect() -> Redis:
    return Redis.from_url(f"{URL}/0")


def message(number: int) -> tuple[str, bytes]:
    """An id, and a message of about the length of ours."""
    id = f"task_{uuid.uuid4()}"
    return id, json.dumps(
        {
            "UUID": id,
            "Name": "noop",
            "Args": [{"Type": "int64", "Value": number}],
            "Headers": {},
            "RoutingKey": "raw",
            "RetryCount": 0,
            "Priority": 0,
        }
    ).encode()


def state(id: str, word: str, number: int) -> bytes:
    results = [{"Type": "int64", "Value": number}]
    return json.dumps(
        {"TaskUUID": id, "TaskName": "noop", "State": word, "Results": results}
    ).encode()
