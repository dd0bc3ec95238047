"""Keys, scripts and messages of the prototype.

    ceiling                 list     waiting messages
    ceiling:workers         set      workers that have begun
    ceiling:held:<worker>   hash     number → message that the worker has
    ceiling:arrivals:<worker>  list  a message that came while the worker was blocked
    ceiling:beat:<worker>   string   expires if the worker does not beat
    ceiling:g:<group>       list     results of a chord's members; gc: how many are missing;
                                     gb: the callback
    task_<uuid>             string   the state of a task

At least once: a message is held by its worker until its state is stored, in one script; what a
worker without a heartbeat holds goes back. States PENDING and SUCCESS are stored, the messages have
Go's fields. Everything else is left out: errors, retries, delays, priorities, pauses, leases that
are checked, repeats after a lost reply, foreign keys.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from redis import Redis

from benchmarks.peers.driving import URL

QUEUE, WORKERS = "ceiling", "ceiling:workers"
HELD, ARRIVALS, BEAT = "ceiling:held:", "ceiling:arrivals:", "ceiling:beat:"
MISSING, CALLBACK, MEMBERS = "ceiling:gc:", "ceiling:gb:", "ceiling:g:"

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder().decode
Message = tuple[str, bytes, bytes]  # id, PENDING state, body


def connect() -> Redis:
    return Redis.from_url(f"{URL}/0")


def script(name: str) -> str:
    return Path(__file__).with_name(f"{name}.lua").read_text()


def state(id: str, name: str, word: str, value: int | None = None) -> bytes:
    results = None if value is None else [{"Type": "int64", "Value": value}]
    return encode(
        {
            "TaskUUID": id,
            "TaskName": name,
            "State": word,
            "Results": results,
            "Error": "",
            "CreatedAt": None,
            "TTL": 0,
        }
    )


def signature(name: str, numbers: Sequence[int | str], **fields: object) -> dict[str, Any]:
    return {
        "UUID": f"task_{uuid.uuid4()}",
        "Name": name,
        "RoutingKey": QUEUE,
        "ETA": None,
        "GroupUUID": "",
        "GroupTaskCount": 0,
        "Args": [{"Name": "", "Type": "int64", "Value": number} for number in numbers],
        "Headers": {},
        "Priority": 0,
        "Immutable": False,
        "RetryCount": 0,
        "RetryTimeout": 0,
        "OnSuccess": None,
        "OnError": None,
        "ChordCallback": None,
        "BrokerMessageGroupId": "",
        "SQSReceiptHandle": "",
        "StopTaskDeletionOnError": False,
        "IgnoreWhenTaskNotRegistered": False,
        **fields,
    }


def message(task: dict[str, Any]) -> Message:
    return task["UUID"], state(task["UUID"], task["Name"], "PENDING"), encode(task)
