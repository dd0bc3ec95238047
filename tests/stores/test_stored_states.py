"""A task state in each store: the exact bytes, and that every field comes back.

`stored_states.json` is older than the stores' common declaration of our fields. Its bytes must
never change, because states of running programs are kept in them.
"""

from __future__ import annotations

import ast
import datetime as dt
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from machinery_py.backends.memcached import documents as memcached
from machinery_py.backends.mongodb import documents as mongodb
from machinery_py.backends.rabbitmq import documents as rabbitmq
from machinery_py.backends.redis import documents as redis
from machinery_py.backends.transactional import Row
from machinery_py.connections.sqlite import upgrade
from machinery_py.tasks.signature import Arg, AttemptNumber
from machinery_py.tasks.states import State, TaskState
from machinery_py.wire import bodies

GOLDEN = Path(__file__).with_name("stored_states.json")
NOW = dt.datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=dt.timezone.utc)
LATER = NOW + dt.timedelta(hours=1)

FULL = TaskState(
    task_uuid="task_1",
    task_name="add",
    state=State.FAILURE,
    error="no",
    created_at=NOW,
    ttl=3,
    run=2,
    attempt=AttemptNumber(4),
    queue="mail",
    error_type="ValueError",
    traceback="line 1\nline 2",
    progress=(1.5, 3.0),
    started_at=NOW,
    finished_at=LATER,
    eta=LATER,
    worker="w@host",
    message=b'{"UUID":"task_1"}\xff',
    keep_for=7.5,
    root="flow_1",
    parent="task_0",
)
CASES = {
    "full": FULL,
    "bare": TaskState(task_uuid="task_1"),
    "started": TaskState(
        task_uuid="task_1", state=State.STARTED, started_at=NOW, worker="w", queue="q"
    ),
    "alone": TaskState(task_uuid="task_1", state=State.STARTED, created_at=NOW, message=b"1"),
    "done": TaskState(
        task_uuid="task_1",
        task_name="add",
        state=State.SUCCESS,
        created_at=NOW,
        finished_at=LATER,
        results=(Arg(type="int64", value=3),),
    ),
    "no_utf8": msgspec.structs.replace(FULL, error="\ud800", queue="\ud801", worker="\ud802"),
}  # fmt: skip


def _redis(state: TaskState) -> object:
    packed, _ = redis.packed_states((state,), NOW, 60)
    return [bytes(one) if isinstance(one, msgspec.Raw) else one for one in packed]


def _memcached(state: TaskState) -> object:
    item = memcached.TaskItem(
        state=state, mark="m", epoch=7, nonce=b"n", kept_at=9, outbox=(b"o",), awaited=True
    )
    return memcached.encode_record("task_1", item)


def _rabbitmq(state: TaskState) -> object:
    return rabbitmq.encode_record("task_1", Row(state=state, mark="m", epoch=7), 5)


def _mongodb(state: TaskState) -> object:
    return mongodb.fields_of(Row(state=state, mark="m", epoch=7), version=3, now=11, expires_at=13)


WRITTEN: dict[str, Callable[[TaskState], object]] = {
    "redis": _redis,
    "memcached": _memcached,
    "rabbitmq": _rabbitmq,
    "mongodb": _mongodb,
    "rows": lambda state: bodies.MSGPACK.encode_task(state, "m", 7),
    "postgresql": lambda state: bodies.JSON.encode_task(state, "m", 7),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("store", WRITTEN)
def test_stored_state_has_its_recorded_bytes(store: str, case: str) -> None:
    golden = json.loads(GOLDEN.read_text())

    assert repr(WRITTEN[store](CASES[case])) == golden[store][case]


def _read_redis(written: Any) -> TaskState:
    document = "".join(written[3:6]).encode()
    raw = written[7]
    return redis.state_of("", document, b"2\n\n\n" + raw[5:])  # without a header of msgpack


READ: dict[str, Callable[[Any], TaskState | None]] = {
    "redis": _read_redis,
    "memcached": lambda body: memcached.decode_record("task_1", body).state,
    "rabbitmq": lambda body: rabbitmq.decode_record("task_1", [body]).state,
    "mongodb": lambda document: mongodb.state_of({"_id": "task_1", **document}),
    "rows": lambda body: bodies.MSGPACK.decode_task(body).state,
    "postgresql": lambda body: bodies.JSON.decode_task(body).state,
}


@pytest.mark.parametrize("store", READ)
def test_every_field_of_a_state_comes_back(store: str) -> None:
    assert READ[store](WRITTEN[store](FULL)) in (FULL, msgspec.structs.replace(FULL, results=[]))


@pytest.mark.parametrize("case", CASES)
def test_state_in_a_sqlite_file_of_version_10_is_carried_over(case: str) -> None:
    columns = ast.literal_eval(json.loads(GOLDEN.read_text())["sqlite 10"][case])
    carried = READ["rows"](upgrade.task_body(*(columns[name] for name in upgrade.TASK)))

    assert carried == READ["rows"](WRITTEN["rows"](CASES[case]))


# In a process of its own, because each module reads the fields of TaskState when it is imported.
_NEW_FIELD = """
import sys
from importlib.machinery import SourceFileLoader

sys.dont_write_bytecode = True
get_data = SourceFileLoader.get_data
message = b'    message: bytes = b""'


def get_changed_data(loader, path):
    if "states." in path and path.endswith(".pyc"):  # this module holds the message too
        raise OSError
    return get_data(loader, path).replace(message, message + b'\\n    note: str = ""')


SourceFileLoader.get_data = get_changed_data

import test_stored_states as stores
stores.FULL = stores.msgspec.structs.replace(stores.FULL, note="new")
for store, read in stores.READ.items():
    assert read(stores.WRITTEN[store](stores.FULL)).note == "new", store
"""


def test_a_new_field_of_a_state_is_kept_by_every_store() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _NEW_FIELD],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    found = json.loads(GOLDEN.read_text()) | {
        store: {case: repr(write(state)) for case, state in CASES.items()}
        for store, write in WRITTEN.items()
    }
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
