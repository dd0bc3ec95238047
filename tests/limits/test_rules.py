"""The Lua of limits says what the pure rules say: same questions, same times, same answers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from machinery_py.connections.redis.client import RedisDriver
from machinery_py.limits import Rule, Slot
from machinery_py.limits.base import Entrant, slots_of
from machinery_py.limits.redis import RedisLimits
from machinery_py.limits.rows import RowsLimits
from machinery_py.limits.rules import MOST_WAITING
from machinery_py.rows.contract import Key, Version, Write
from machinery_py.rows.memory import MemoryRows
from machinery_py.testing.clocks import ManualClock
from tests.models.machine import EXAMPLES

LEASE = 10.0
RULES = (
    Rule(name="rate", interval=0.2),
    Rule(name="rate", key="t", interval=0.007, limit=3),
    Rule(name="interval", interval=60.0, strict=True),
    Rule(name="running"),
    Rule(name="running", key="t", limit=3),
)
CHANGES = ((), (Rule(name="rate", interval=0.333333, limit=2), Rule(name="running", limit=2)))
_scopes = itertools.count()


@dataclasses.dataclass
class Step:
    """After a pause: one of some askers enters, renews or leaves; or limits are changed."""

    pause: float
    kind: str
    who: int = 0
    rules: tuple[Rule, ...] = ()
    again: bool = False
    repeated: bool = False
    order: int = 0
    changes: tuple[Rule, ...] = ()


PAUSES = st.sampled_from((0.0, 0.0, 1e-6, 0.013, 0.05, 0.2, 0.3, 2.0, 11.0, 400.0))
ASKED = st.lists(st.sampled_from(RULES), min_size=1, max_size=3, unique_by=lambda rule: rule.name)
STEPS = st.builds(
    Step,
    pause=PAUSES,
    kind=st.sampled_from(("enter",) * 6 + ("renew", "leave", "leave", "change")),
    who=st.integers(0, 5),
    rules=ASKED.map(tuple),
    again=st.booleans(),
    repeated=st.booleans(),
    order=st.integers(0, 4),
    changes=st.sampled_from(CHANGES),
)


class KeptRows(MemoryRows):
    """Rows that never expire: Redis expires by a clock of its own, which stands still here."""

    def put(self, key: Key, write: Write) -> Version:
        return super().put(key, replace(write, expires_in=None))


class Both:
    """A store by the pure rules and one by Lua, with the same clock. Each call asks both."""

    def __init__(self, driver: RedisDriver) -> None:
        clock = driver.clock.host
        assert isinstance(clock, ManualClock)
        self.clock = clock
        self.pure, self.lua = RowsLimits(KeptRows(self.clock)), RedisLimits(driver)
        self.scope = f"scope {next(_scopes)}"
        self.tokens: dict[int, str] = {}
        self.held: dict[int, tuple[Slot, ...]] = {}
        self.asked: dict[int, tuple[Slot, ...]] = {}  # also under rates

    def do(self, step: Step) -> None:
        self.clock.advance(step.pause)
        held = self.held.get(step.who, ())
        match step.kind:
            case "enter":
                self.enter(step)
            case "renew":
                assert self.pure.renew(held, ttl=LEASE) == self.lua.renew(held, ttl=LEASE)
            case "leave":
                for store in (self.pure, self.lua):
                    store.leave(self.asked.get(step.who, ()) if step.again else held)
            case _:
                for store in (self.pure, self.lua):
                    store.change(self.scope, step.changes)

    def enter(self, step: Step) -> None:
        if not step.repeated or step.who not in self.tokens:
            self.tokens[step.who] = f"{step.who}/{len(self.tokens)}/{self.clock.monotonic()}"
        entrant = Entrant(
            scope=self.scope,
            who=str(step.who),
            token=self.tokens[step.who],
            rules=step.rules,
            ttl=LEASE,
            again=step.again,
            order=step.order,
        )
        pure, lua = (store.enter_all([entrant])[0] for store in (self.pure, self.lua))
        assert pure == lua
        self.held[step.who] = pure.held
        token = self.tokens[step.who]
        self.asked[step.who] = slots_of(self.scope, str(step.who), token, step.rules)

    def compare(self) -> None:
        assert [one for one in self.lua.read() if one.scope == self.scope] == self.pure.read()


@pytest.fixture
def driver(redis_url: str) -> Iterator[RedisDriver]:
    with closing(RedisDriver(redis_url, clock=ManualClock())) as driver:
        yield driver


def test_lua_answers_as_the_pure_rules(driver: RedisDriver) -> None:
    @settings(max_examples=EXAMPLES or 60, deadline=None, derandomize=not EXAMPLES, database=None)
    @given(st.lists(STEPS, min_size=1, max_size=40))
    def check(steps: list[Step]) -> None:
        both = Both(driver)
        for step in steps:
            both.do(step)
        both.compare()

    check()


def test_lua_answers_as_the_pure_rules_when_the_line_is_full(driver: RedisDriver) -> None:
    both = Both(driver)
    rules = RULES[1], RULES[4]
    for who in range(MOST_WAITING + 30):
        both.do(Step(0.0, "enter", who, rules=(rules[who % 2],)))
        both.do(Step(0.0, "enter", who, rules=(RULES[0], RULES[3])))
    for who in range(MOST_WAITING + 30):
        both.do(Step(0.03, "enter", who, rules=(RULES[0],), again=who % 3 > 0))
    both.compare()
    both.do(Step(30.0, "enter", 0, rules=RULES[:1]))
    both.do(Step(0.0, "enter", 1, rules=RULES[:1]))
    for who in range(0, MOST_WAITING + 30, 3):
        both.do(Step(0.03, "leave", who))
        both.do(Step(0.0, "enter", 5 * who, rules=RULES[3:4], again=who % 2 > 0))
    both.compare()


def test_lua_plans_by_the_same_mean_run(driver: RedisDriver) -> None:
    both = Both(driver)
    for length in (2.0, 0.2, 0.3, 11.0, 0.05):
        both.do(Step(0.0, "enter", 0, rules=RULES[3:4]))
        both.do(Step(0.01, "enter", 1, rules=RULES[3:4]))
        both.do(Step(0.0, "leave", 1))
        both.do(Step(length, "leave", 0))
