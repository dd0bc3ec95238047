"""The steps of a machine that changes schedules and claims, and sends with them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from machinery_py.backends.redis import scripts as backend_scripts
from machinery_py.connections.redis.client import raw
from machinery_py.stores import redis as settlement_scripts
from tests.models import amend as amending
from tests.models.backend_rules import Expire, GroupUuid, StateRules, States
from tests.models.machine import QUEUES, Messages, Passed
from tests.models.messages import DELAYED

NAMES = ("nightly", "a}b\u00e9")
LIVES = (0, 0, 600, 7200)  # seconds; 0: a record
HELD = (b"", b"one", b"\xfftwo")  # b"": none

Name = st.sampled_from(NAMES)
Body = st.sampled_from(HELD)
NewAmendment = st.fixed_dictionaries(
    {
        "name": Name,
        "life": st.sampled_from(LIVES),
        "guess": st.sampled_from(["right"] * 4 + ["wrong"]),
        "body": Body,
        "key": st.sampled_from(["tick 1", "tick 1", "task_1"]),
        "states": st.lists(States, max_size=2),
        "groups": st.lists(GroupUuid, max_size=1),
        "outbox": st.sampled_from([b"", b"\xc0out"]),
    }
)


def paired(reply: Any) -> Any:
    """The reply of RECORDS, with its names and bodies in pairs."""
    if reply == "WRONGTYPE":
        return reply
    return [
        *reply[:2],
        *([list(pair) for pair in zip(rest[::2], rest[1::2], strict=True)] for rest in reply[2:]),
    ]


class AmendMachine(StateRules):
    def amendment(self, drawn: dict[str, Any], now: str, expire: int) -> tuple[object, ...]:
        """What both scripts take first."""
        name, life = drawn["name"], drawn["life"]
        key = amending.claim_key(name.encode().decode("latin-1")) if life else amending.RECORDS
        there = self.model.keys.get(key, "")
        text = there.get(name.encode().decode("latin-1"), "") if isinstance(there, dict) else there
        expected = text.encode("latin-1") if isinstance(text, str) else b""
        if drawn["guess"] == "wrong":
            expected += b"?"
        one = {name: drawn[name] for name in ("key", "states", "groups", "outbox")}
        changes = self.changes(
            [one] if one["states"] or one["groups"] or one["outbox"] else [], expire
        )
        return (
            now,
            expire,
            name,
            raw(expected),
            raw(drawn["body"]),
            life,
            changes.changes,
            changes.states,
        )

    @rule(passed=Passed, expire=Expire, drawn=NewAmendment)
    def amend(self, passed: int, expire: int, drawn: dict[str, Any]) -> None:
        self.run(
            backend_scripts.AMEND,
            amending.amend,
            *self.amendment(drawn, self.passed(passed), expire),
        )

    @rule(passed=Passed, expire=Expire, drawn=NewAmendment, messages=Messages)
    def amend_and_send(
        self, passed: int, expire: int, drawn: dict[str, Any], messages: list[Any]
    ) -> None:
        values = self.amendment({**drawn, "outbox": b""}, self.passed(passed), expire)
        self.run(
            settlement_scripts.AMEND, amending.amend_and_send, *values, *self.messages(messages)
        )

    @rule(passed=Passed, behind=st.integers(0, 1))
    def read_records(self, passed: int, behind: int) -> None:
        known = self.model.keys.get(amending.VERSION, "0")
        known = str(int(known) - behind) if isinstance(known, str) and known.isdigit() else known
        self.run(
            backend_scripts.RECORDS, amending.records, self.passed(passed), known, reading=paired
        )

    @rule(claims=st.lists(st.tuples(Name, Body.filter(bool)), max_size=3))
    def release(self, claims: list[tuple[str, bytes]]) -> None:
        self.run(
            backend_scripts.RELEASE, amending.release, [(name, raw(body)) for name, body in claims]
        )

    @rule(passed=Passed, name=Name, body=Body.filter(bool), released=Body.filter(bool))
    def a_claim_is_made_and_released(
        self, passed: int, name: str, body: bytes, released: bytes
    ) -> None:
        self.spoil(amending.claim_key(name.encode().decode("latin-1")), "none")
        now = self.passed(passed)
        self.run(
            backend_scripts.AMEND, amending.amend, now, 3600, name, raw(b""), raw(body), 600, [], []
        )
        self.release([(name, released)])

    @rule(name=Name)
    def a_claim_expires(self, name: str) -> None:
        self.beside.both("DEL", amending.claim_key(name.encode().decode("latin-1")))

    @rule(name=Name, kind=st.sampled_from(["list", "set", "none", "none"]))
    def spoil_a_claim(self, name: str, kind: str) -> None:
        self.spoil(amending.claim_key(name.encode().decode("latin-1")), kind)

    @rule(
        key=st.sampled_from([amending.RECORDS, DELAYED, *QUEUES]),
        kind=st.sampled_from(["set", "none", "none"]),
    )
    def spoil_another_key(self, key: str, kind: str) -> None:
        self.spoil(key, kind)

    @rule(
        passed=Passed,
        expire=Expire,
        drawn=NewAmendment,
        messages=Messages.filter(bool),
        key=st.sampled_from([DELAYED, *QUEUES]),
    )
    def what_is_sent_finds_another_type(
        self, passed: int, expire: int, drawn: dict[str, Any], messages: list[Any], key: str
    ) -> None:
        self.spoil(key, "set")
        self.amend_and_send(passed, expire, {**drawn, "guess": "right"}, messages)
        self.spoil(key, "none")
