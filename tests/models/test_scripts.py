"""Every script declares what goes in and out, checks before it writes, and notices a full Redis."""

from __future__ import annotations

import datetime as dt
import functools
import importlib
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from redis.exceptions import ResponseError

import machinery_py
from machinery_py.backends.base import Rider
from machinery_py.backends.redis import scripts as backend
from machinery_py.backends.redis.documents import Changes
from machinery_py.brokers.redis import scripts as broker
from machinery_py.connections.redis.client import raw
from machinery_py.connections.redis.keys import FENCE, queue_keys
from machinery_py.connections.redis.scripts import Script, pack
from machinery_py.limits import redis as limits
from machinery_py.locks import redis as locks
from machinery_py.stores import redis as settlement
from machinery_py.stores import redis_steps as steps
from machinery_py.tasks.states import Arrival, GroupMeta, State, TaskState
from tests.models.beside import Beside
from tests.models.machine import START
from tests.models.redis import Hash
from tests.support.servers import RedisServer

PACKAGE = Path(machinery_py.__file__).parent
MODULES: dict[str, ModuleType] = {
    "broker": broker,
    "backend": backend,
    "settlement": settlement,
    "steps": steps,
    "locks": locks,
    "limits": limits,
}


def scripts_of(modules: dict[str, ModuleType]) -> dict[str, tuple[ModuleType, str]]:
    return {
        f"{name} {script}": (module, script)
        for name, module in modules.items()
        for script, value in vars(module).items()
        if isinstance(value, Script)
    }


SCRIPTS = scripts_of(MODULES)


@functools.cache
def modelled() -> frozenset[str]:
    """The texts of the scripts that a rule runs beside a model."""
    found: list[object] = []
    for path in Path(__file__).parent.glob("*_rules.py"):
        rules = importlib.import_module(f"tests.models.{path.stem}")
        for alias, script in re.findall(r"(\w+)\.(_?[A-Z_]+),\s+\w+\.\w+", path.read_text()):
            found.append(getattr(getattr(rules, alias), script))
    return frozenset(one.text for one in found if isinstance(one, Script))


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_header_names_inputs_and_outputs(name: str) -> None:
    module, script = SCRIPTS[name]
    header, _ = split(PACKAGE / vars(module)[script].path)

    assert "-- In: " in header
    assert "Out:" in header


def split(path: Path) -> tuple[str, str]:
    """Header and code of a file."""
    lines = path.read_text().splitlines()
    end = next(place for place, line in enumerate(lines) if not line.startswith("--"))
    return "\n".join(lines[:end]), "\n".join(lines[end:])


def test_each_lua_file_is_a_script_or_included() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.lua")}
    used = {vars(module)[script].path for module, script in SCRIPTS.values()}
    used.add("connections/redis/lua/tagged.lua")  # tags.py puts it in front of each
    for path in files.values():
        used.update(re.findall(r"^--! include (\S+)$", path.read_text(), re.MULTILINE))

    assert used == set(files)
    for name, path in files.items():
        header, code = split(path)
        assert header, f"{name} begins with what goes in and out, or what it is for"
        assert "--[" not in code, (
            f"{name}: the loader takes out lines that begin with --, not blocks"
        )
        assert len(code.splitlines()) < 500


#: Listings for people, and records behind one compare-and-swap: the conformance suites hold them.
#: Steps of large submissions: tests/stores/redis/test_steps.py compares them with SUBMIT.
#: What is too large for one step: tests/stores/redis/test_bounds.py goes on with it.
#: NEW: tests/stores/redis/test_new.py compares it with SUBMIT.
#: KEEP: CheckpointConformance, which tries each verdict.
#: Limits: tests/limits/test_rules.py holds them against the pure rules.
WITHOUT_MODEL = {
    "broker": {
        *(
            "BROADCAST",
            "BURY",
            "DEAD",
            "FORGET",
            "GIVE_BACK",
            "LATE",
            "LATE_NAMES",
            "LETTERS",
            "PENDING",
        ),
        *("PURGE", "REMOVE", "STATS", "TAKE_DEAD", "UNPARK", "WAITING", "WORKERS"),
    },
    "backend": {"BOXES", "KEEP", "LOOSEN", "RECORDS", "RELEASE"},
    "settlement": {"KEEP", "NEW"},
    "steps": {"CARRY", "COMMIT", "STAGE"},
    "limits": {"ENTER", "LEAVE", "READ", "RENEW"},
    "locks": {"ACQUIRE", "RELEASE", "RENEW"},
}


def test_scripts_of_delivery_and_settlement_have_a_model() -> None:
    without = {
        name for name, found in SCRIPTS.items() if vars(found[0])[found[1]].text not in modelled()
    }

    assert without == {
        f"{module} {name}" for module, names in WITHOUT_MODEL.items() for name in names
    }


# One call of each script, on a Redis in which it finds everything that it works on.

LIMITS = [(0, 1000), (1, 1000)]
QUEUES = [queue_keys("jobs"), queue_keys("mail")]
NOW = str(START + 10_000_000)
DAY = dt.datetime(2026, 11, 1, tzinfo=dt.timezone.utc)
LATE, SOON = START + 5_000_000, START + 900_000_000


def message(
    body: str, *, place: int = 0, level: int = 0, due: int = 0, label: str = ""
) -> tuple[Any, ...]:
    return place, level, due, raw(label.encode()), 0, raw(body.encode())


def changes(**more: Any) -> tuple[object, ...]:
    made = Changes(DAY, 3600)
    made.add(
        key="task_1",
        mark="m",
        states=[TaskState(task_uuid="task_1", state=State.SUCCESS), TaskState(task_uuid="task_2")],
        groups=[GroupMeta(group_uuid="group_2", task_uuids=["task_1"])],
        **more,
    )
    return made.packed()


ARRIVAL = Arrival(group_uuid="group_1", task_uuid="task_1", total=2, ok=True, callback=b"callback")
RIDERS = [
    Rider(name="nightly", expected=b"old", body=b"new"),
    Rider(name="claimed", expected=b"mine", body=b"next", life=60.0),
]
FULL = [
    message("a"),
    message("b", place=1),
    message("c", level=3),
    message("d", due=SOON),
    message("e", due=SOON, label="x"),
]
# As Go and this library write it, as far as the mover looks at it.
PLAIN = (
    '{"UUID":"task_9","Name":"n","RoutingKey":"mail","Priority":1,"Immutable":true,"RetryCount":0}'
)
DEAD = (LATE, raw(b"head"), FULL)
ENDS = [
    0,
    "1",
    "done",
    1,
    (0, raw(b""), FULL),
    1,
    "1",
    "back",
    0,
    (0, raw(b""), []),
    0,
    "2",
    "dead",
    0,
    DEAD,
]
DISPOSALS = [
    (0, "1", "later", LATE, raw(b"")),
    (0, "2", "dead", 0, raw(b"head")),
    (1, "1", "back", 0, raw(b"")),
]

RULES = [("rate", "", 5, 200_000, 0), ("running", "", 1, 0, 0)]
SLOTS = [("task add", "running:", "task_1", "token")]

KEPT = [raw(b"first"), raw(b"a value")]
CALLS: dict[str, tuple[Any, ...]] = {
    "limits ENTER": (NOW, [("task add", "task_1", "token", 10_000_000, 0, RULES, 0)]),
    "limits RENEW": (NOW, 10_000_000, SLOTS),
    "limits LEAVE": (NOW, 0, SLOTS),
    "limits READ": (NOW, "task add", 1000),
    "broker PUT": (NOW, "token", LIMITS, QUEUES, FULL),
    "broker REGISTER": (NOW, "s2", raw(b"record"), QUEUES),
    "broker BEAT": (NOW, "s1", QUEUES, True),
    "broker CLAIM": (NOW, "s1", QUEUES, 9, 2, [1], "12.a", True, True, True, FENCE, [0, 0]),
    "broker DISPOSE": (NOW, "s1", QUEUES, DISPOSALS),
    "broker BEGIN": ("s1", QUEUES[0][1], "1"),
    "broker HOLDS": ("s1", [(QUEUES[0][1], "1")]),
    "broker CONDEMN": (NOW, "s1", QUEUES, "", False, broker.TOMBSTONE),
    "broker GIVE_BACK": (NOW, "s0", QUEUES),
    "broker LOOK": (NOW, QUEUES, 1_000_000),
    "broker DUE": (NOW, 10, 10),
    "broker MOVE": (NOW, QUEUES, [message("late", place=1)]),
    "broker BURY_DELAYED": (NOW, QUEUES[0], raw(b"late"), raw(b"head")),
    "broker WAITING": (QUEUES[0],),
    "broker PENDING": (QUEUES[0], 10, 0),
    "broker LATE": (QUEUES, 10, 0, 0),
    "broker STATS": (NOW, QUEUES, 2),
    "broker LATE_NAMES": (NOW, 0, 2),
    "broker WORKERS": (QUEUES,),
    "broker FORGET": (QUEUES[0],),
    "broker PURGE": (QUEUES[0], [raw(b"late")]),
    "broker REMOVE": (QUEUES[0], [raw(b"body")]),
    "broker UNPARK": (QUEUES[0], [(False, raw(b"late")), (True, raw(b"parked"))]),
    "broker PAUSE": (QUEUES[0],),
    "broker RESUME": (QUEUES[0],),
    "broker DEAD": (QUEUES, 10),
    "broker LETTERS": ([(QUEUES[0], "4"), (QUEUES[1], "1")],),
    "broker BURY": (NOW, QUEUES[0], raw(b"head"), raw(b"label"), raw(b"body")),
    "broker BROADCAST": (NOW, "machinery:topic:news", 1000, [raw(b"record")]),
    "broker TAKE_DEAD": ([(QUEUES[0], "4"), (QUEUES[1], "1")],),
    "backend APPLY": (NOW, 3600, *changes(arrivals=[ARRIVAL], outbox=b"out")),
    "backend BEGIN": (
        NOW,
        FENCE,
        [("task_2", 0), ("task_1", 0)],
    ),
    "backend STATES": (["task_1", "task_2"], False),
    "backend MARKS": (["task_1", "task_2"],),
    "backend READY": (10,),
    "backend PARTIAL": (str(START + 60_000_000), 10),
    "backend BOXES": (["mpy:o:{task_1}"],),
    "backend UNSENT": (NOW, 0, 10, 0),
    "backend CLEAR": ([("task_2", raw(b"out")), ("task_1", raw(b"out"))],),
    "backend KEEP": ("task_1", "mark", FENCE, raw(b"mpy:kept:{task_1}"), 60, KEPT),
    "backend FIND": (["mpy:open", "mpy:done"], "", "", 0, 10, 10, ["PENDING"], '"add"'),
    "backend RATES": (NOW, START // 1_000_000, 60, "mpy:rate:"),
    "backend DELETE": ([("task_1", 60), ("task_2", 60)], "mpy:done"),
    "backend REVOKE": (NOW, 3 * 86400, ["task_1"]),
    "backend REVOKED": (["task_1"],),
    "backend FORGET_TASK": (["task_2", "task_1"], []),
    "backend FORGET_GROUP": ([], ["group_1"]),
    "backend TEND": (str(START + 4_000_000_000), 3600),
    "settlement KEEP": ("s1", QUEUES[0][1], "1", raw(b"mpy:kept:{task_1}"), 60, KEPT),
    "settlement NEW": (NOW, 3600, "token", QUEUES[0], 1, 1),
    "settlement SUBMIT": (NOW, 3600, "token", LIMITS, QUEUES, FULL, *changes(riders=RIDERS)),
    "settlement SETTLE": (
        NOW,
        3600,
        "s1",
        QUEUES,
        ENDS,
        [],
        *changes(arrivals=[ARRIVAL], riders=RIDERS),
    ),
    "settlement FIRE": (NOW, 3600, QUEUES, FULL, *changes(fires="group_1", riders=RIDERS)),
    "backend RECORDS": (NOW, "0", "mpy:records", "mpy:records:n"),
    "backend RELEASE": ([("claimed", raw(b"mine"))],),
    "steps STAGE": (NOW, 3600, "token", "0", QUEUES, FULL, *changes()),
    "steps COMMIT": (NOW, 3600, "staged", 1, [(0, 99)], QUEUES, *changes(riders=RIDERS)),
    "steps CARRY": (NOW, "left", 0),
    "backend LOOSEN": (3600,),
    "locks ACQUIRE": (NOW, "other", "bb", 100_000),
    "locks RENEW": ("lock", "aa", 100_000),
    "locks RELEASE": ("lock", "aa", 0),
}

#: Arguments behind the packed one.
MORE: dict[str, tuple[bytes, ...]] = {
    settlement.NEW.path: (b"task_3", b"document", b"companion", b"60", b"group_4", b"group", b"a")
}

GOS = ("jobs", "mail", "delayed_tasks", "task_1", "task_2", "group_1", "group_2")


@pytest.fixture
def beside(empty_redis: RedisServer) -> Iterator[Beside]:
    beside = Beside(empty_redis.url)
    yield beside
    beside.ask("CONFIG", "SET", "maxmemory", "0")
    beside.close()


def call(beside: Beside, script: Script, values: Any) -> str:
    """What it was refused with, or "" if it was carried out."""
    try:
        beside.link.ask(b"EVAL", script.body, b"0", pack(values), *MORE.get(script.path, ()))
    except ResponseError as error:
        return str(error)
    return ""


def fill(beside: Beside) -> None:
    """Fill a Redis for the scripts.

    Messages that wait, are in flight, delayed, parked and dead; open tasks; an incomplete group.
    """
    start = str(START)
    made = Changes(DAY, 3600)
    made.add(
        key="task_2",
        states=[TaskState(task_uuid="task_1"), TaskState(task_uuid="task_2")],
        groups=[GroupMeta(group_uuid="group_1", task_uuids=["task_2"])],
        outbox=b"out",
        arrivals=[
            Arrival(group_uuid=group, task_uuid="task_2", total=2, ok=True, callback=b"callback")
            for group in ("group_1", "group_3")
        ],
    )
    kept = Changes(DAY, 3600)
    kept.add(
        key="",
        riders=[
            Rider(name="nightly", expected=None, body=b"old"),
            Rider(name="claimed", expected=None, body=b"mine", life=600.0),
        ],
    )
    calls: list[tuple[Script, Any]] = [
        (broker.REGISTER, (start, "s1", raw(b"record"), QUEUES)),
        (
            broker.PUT,
            (
                start,
                "",
                LIMITS,
                QUEUES,
                [message("1"), message("2"), message("3"), message("4", place=1)],
            ),
        ),
        (
            broker.CLAIM,
            (start, "s1", QUEUES, 4, 1, [], "11.a", False, False, False, FENCE, [0, 0]),
        ),
        (broker.DISPOSE, (start, "s1", QUEUES, [(0, "3", "dead", 0, raw(b"head"))])),
        (
            broker.PUT,
            (
                start,
                "",
                LIMITS,
                QUEUES,
                [
                    *FULL,
                    *(message(one, due=LATE) for one in ("late", PLAIN, PLAIN.replace("1", "2"))),
                    message("parked", due=LATE, label="x", place=0),
                ],
            ),
        ),
        (
            broker.CLAIM,
            (
                start,
                "s1",
                [queue_keys("none"), *QUEUES],
                0,
                1,
                [],
                "11.a",
                True,
                False,
                True,
                FENCE,
                [0, 0, 0],
            ),
        ),
        (backend.APPLY, (start, 3600, made.changes, made.states)),
        (backend.APPLY, (start, 3600, *kept.packed())),
        (locks.ACQUIRE, (start, "lock", "aa", 100_000)),
        *(
            (steps.STAGE, (start, 3600, token, "0", QUEUES, FULL, *changes()))
            for token in ("staged", "left")
        ),
        (steps.COMMIT, (start, 3600, "left", 1, [], [], [], [])),
    ]
    for script, values in calls:
        assert call(beside, script, values) == ""
    # What a blocked client has just been given, and a session that is over.
    for session in ("s1", "dead"):
        beside.ask("RPUSH", f"mpy:{{jobs}}:i:{session}", f"given to {session}")
    beside.ask("ZADD", "mpy:{jobs}:t", str(START), "dead")
    beside.ask("SADD", "mpy:{jobs}:r:s1", "2")
    beside.ask("SADD", "mpy:{jobs}:v", "13")
    beside.ask("SADD", "mpy:loose", "group_1")


def test_each_script_is_called() -> None:
    assert set(CALLS) == set(SCRIPTS)


@pytest.mark.parametrize("name", CALLS)
def test_a_script_that_finds_another_type_changes_nothing(beside: Beside, name: str) -> None:
    """Or does all that it is to do. Go's keys: anybody may write them. Ours nobody else writes."""
    module, script = SCRIPTS[name]
    for key, command in itertools.product(
        GOS, (("HSET", "somebody", "else's"), ("SET", "somebody else's"))
    ):
        beside.ask("FLUSHDB")
        fill(beside)
        beside.ask("DEL", key)
        beside.ask(command[0], key, *command[1:])
        before, expires = beside.dump()

        refused = call(beside, vars(module)[script], CALLS[name])

        after, expires_now = beside.dump()
        assert not refused or "WRONGTYPE" in refused
        assert (after[key], key in expires_now) == (before[key], key in expires)
        if refused:
            assert after == before, f"{name} was refused for {key}, and has changed something"


@pytest.mark.parametrize("name", CALLS)
def test_script_that_finds_another_type_at_a_key_of_ours_stops(beside: Beside, name: str) -> None:
    """Nobody writes there but us; should somebody do it, no message is lost for that.

    Except by a claim that finds a foreign value under its session's key, whose random name
    nobody knows.
    """
    module, script = SCRIPTS[name]
    fill(beside)

    found = half_done(beside, lambda: call(beside, vars(module)[script], CALLS[name]))

    assert [key for key in found if name != "broker CLAIM" or not key.endswith(":f:s1")] == []


@pytest.mark.parametrize("finds", [True, False])
def test_usual_claim_stops_at_another_type(beside: Beside, finds: bool) -> None:
    fill(beside)
    if not finds:
        beside.ask("DEL", "mail")
    values = NOW, "s1", QUEUES[1:], 9, 2, [], "12.a", True, True, True, FENCE, [0]

    found = half_done(beside, lambda: call(beside, broker.CLAIM, values))

    assert [key for key in found if not (finds and key.endswith(":f:s1"))] == []


def test_settling_a_group_with_a_foreign_key_changes_nothing(
    beside: Beside,
) -> None:
    fill(beside)
    assert call(beside, backend.APPLY, CALLS["backend APPLY"]) == ""
    assert beside.ask("ZRANGE", "mpy:ready", "0", "-1") == ["group_1"]
    made, ready = Changes(DAY, 3600), beside.snapshot()
    made.add(key="group_1", fires="group_1")
    values = NOW, 3600, QUEUES, FULL, made.changes, made.states
    assert call(beside, settlement.FIRE, values) == ""
    assert beside.ask("ZRANGE", "mpy:ready", "0", "-1") == []
    beside.restore(ready)

    assert half_done(beside, lambda: call(beside, settlement.FIRE, values)) == []


def test_tending_a_group_with_a_foreign_key_changes_nothing(
    beside: Beside,
) -> None:
    fill(beside)
    beside.ask("DEL", "task_2")

    assert half_done(beside, lambda: call(beside, backend.TEND, CALLS["backend TEND"])) == []


def half_done(beside: Beside, call: Callable[[], str]) -> list[str]:
    """The keys that, when they hold a foreign value, make the call refuse after a first change."""
    full, before = beside.snapshot(), beside.dump()[0]
    assert call() == ""
    there = beside.dump()[0] | before
    found: list[str] = []
    for key, value in sorted(there.items()):
        commands = [
            ("RPUSH", key, "somebody else's")
            if isinstance(value, Hash)
            else ("HSET", key, "somebody", "else's")
        ]
        if isinstance(value, str) and value.isdigit():
            commands.append(("SET", key, "no number"))
        for command in commands:
            beside.restore(full)
            beside.ask("DEL", key)
            beside.ask(*command)
            before = beside.dump()[0]
            refused = call()
            if refused and beside.dump()[0] != before:
                found.append(key)
    return found


NEEDS_ROOM = {
    "broker PUT",
    "broker REGISTER",
    "broker BEGIN",
    "backend APPLY",
    "backend BEGIN",
    "backend PARTIAL",
    "backend REVOKE",
    "limits ENTER",
    "steps COMMIT",
    "steps STAGE",
    "settlement SUBMIT",
    "settlement KEEP",
    "locks ACQUIRE",
    "backend AMEND",
    "settlement AMEND",
    "broker BROADCAST",
    "broker BURY",
}


@pytest.mark.parametrize("name", CALLS)
def test_full_redis_refuses_whole_scripts_except_those_that_free(beside: Beside, name: str) -> None:
    module, script = SCRIPTS[name]
    fill(beside)
    before, _ = beside.dump()
    beside.ask("CONFIG", "SET", "maxmemory", "1")

    refused = call(beside, vars(module)[script], CALLS[name])

    beside.ask("CONFIG", "SET", "maxmemory", "0")
    if name in NEEDS_ROOM:
        assert "used memory > 'maxmemory'" in refused
        assert beside.dump()[0] == before
    else:
        assert refused == ""
