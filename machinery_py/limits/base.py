"""Contract of a store of limits: who may run now, and when it is the others' turn.

A scope is what is limited: a task, or a limiter used by hand. It has rules; each rule counts for
itself under each key (a tenant, a user). States, crash points and invariants:
docs/explanation/limits.md.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

LONGEST_NAME = 255  # bytes of a scope, a key or a UUID that is stored as it is


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One limit of a scope.

    Attributes:
        name: tells the rules of a scope apart, as in "rate"; what `change` sets is found by it.
        key: whose runs are counted together; "" for all of the scope.
        limit: runs at a time; with an interval, runs at once after a pause (the burst).
        interval: seconds for each run; 0: the runs at a time are counted instead.
        strict: from each begin to the next it is never less than the interval. Otherwise one that
            came late to its turn does not delay those behind it.
    """

    name: str
    key: str = ""
    limit: int = 1
    interval: float = 0.0
    strict: bool = False


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One run in a rule that counts runs at a time; or a place among those that wait.

    Attributes:
        who: UUID of the task, or what else waits.
        token: tells this delivery of it from others. The same one may ask again.
    """

    scope: str
    name: str
    key: str
    who: str
    token: str


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `Limits.enter`.

    Attributes:
        wait: 0.0: it runs now. Else seconds until it should ask again.
        name, key: of the rule that holds it back the longest.
        held: for `renew` and `leave`: the slots of a run; of one that waits its places in line.
    """

    wait: float = 0.0
    name: str = ""
    key: str = ""
    held: tuple[Slot, ...] = ()


class Entrant(msgspec.Struct, frozen=True, kw_only=True):
    """One of those for whom `Limits.enter_all` asks; the arguments of `Limits.enter`.

    Attributes:
        order: place among those who wait under one key: the lower one goes first, whoever asked
            first (workers give `Delivery.order`, or its fence). 0: behind all who wait.
    """

    scope: str
    who: str
    token: str
    rules: Sequence[Rule]
    ttl: float
    again: bool = False
    order: int = 0


class UsageReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a rule under one key.

    Attributes:
        limit, interval: as the last that asked was held to them.
        running: slots that are held.
        waiting: how many wait, up to `rules.MOST_WAITING`.
        wait: seconds until a newcomer's turn, as far as known; 0.0: at once.
    """

    name: str
    key: str
    limit: int
    interval: float = 0.0
    running: int = 0
    waiting: int = 0
    wait: float = 0.0


class ScopeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A scope that is in use, or was changed.

    Attributes:
        changed: what `change` has set.
        usage: at most `rules.MOST_REPORTED`, those who were asked for last.
    """

    scope: str
    changed: tuple[Rule, ...] = ()
    usage: tuple[UsageReport, ...] = ()


class Limits(ABC):
    """Store of limits. All methods may be called from any thread.

    Any text is a scope, a key, a `who` or a token; long ones are stored as a hash. The time is the
    store's: no clock of a worker counts.

    Raises (each method):
        BackendUnavailable: the store did not answer in time.
        StoreUnusable: the store cannot be worked with.

    Attributes:
        asks_together: one `enter_all` costs less than many `enter` at the same time.
    """

    asks_together: ClassVar[bool] = False

    @abstractmethod
    def enter(
        self,
        scope: str,
        who: str,
        token: str,
        rules: Sequence[Rule],
        *,
        ttl: float,
        again: bool = False,
    ) -> Admission:
        """Let it run by all rules, or say how long to wait. Does not wait.

        Of those who wait under one key, the first to ask has the first turn; who asks again keeps
        its place, and loses it ten seconds after it should have asked. Nothing is counted before
        it runs. May be repeated with the same token: it is counted once.

        Args:
            rules: with different names; what `change` has set wins over them.
            ttl: seconds after which a slot is free again, unless it is renewed.
            again: it was told to wait before (or comes back after a crash). Where more wait than
                the store has places for, it goes before newcomers.
        """

    def enter_all(self, entrants: Sequence[Entrant]) -> list[Admission]:
        """Answer each as `enter` would, asked one after the other in this order.

        A store that does not override it (this default) knows no `Entrant.order`: there the first
        to ask is the first in line.

        Raises:
            MachineryError: of any of them; others may have been let in. May be repeated.
        """
        return [
            self.enter(one.scope, one.who, one.token, one.rules, ttl=one.ttl, again=one.again)
            for one in entrants
        ]

    @abstractmethod
    def renew(self, held: Sequence[Slot], *, ttl: float) -> Sequence[bool | None]:
        """Hold the slots for `ttl` seconds from now, and return for each whether it is held.

        A slot that has expired, or that the store has forgotten, is taken again if there is room.
        False: others took it, or another delivery of the same task has it. None: the part of the
        store that has it did not answer, and others did.
        """

    @abstractmethod
    def leave(self, held: Sequence[Slot]) -> None:
        """Give back slots, or places in line. What is not ours any more stays as it is.

        With the name of a rule that has an interval: it did not run, and is not counted, unless
        another was let in since.
        """

    @abstractmethod
    def change(self, scope: str, rules: Sequence[Rule]) -> None:
        """Let these win over the rules of the same name in `enter`, whatever their key.

        Counts for all processes, from their next `enter` on, until the next `change`. No rules:
        those of the code count again. Who waits already asks again within `rules.LOOK_AGAIN`.
        """

    @abstractmethod
    def changed(self) -> Mapping[str, Sequence[Rule]]:
        """Return what `change` has set, by scope as stored. Each worker asks once a second."""

    @abstractmethod
    def read(self) -> list[ScopeReport]:
        """Return what is limited now, sorted by scope."""

    @abstractmethod
    def close(self) -> None:
        """Close connections; what is held stays held. May be called twice."""


def stored_name(text: str) -> str:
    """Return a text as it is stored: as it is, or a hash if it is long or cannot be printed."""
    if text.isprintable() and len(text) <= LONGEST_NAME and len(text.encode()) <= LONGEST_NAME:
        return text
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def slots_of(scope: str, who: str, token: str, rules: Sequence[Rule]) -> tuple[Slot, ...]:
    """Return the slots, or the places in line, that rules give."""
    return tuple(
        Slot(scope=scope, name=rule.name, key=rule.key, who=who, token=token) for rule in rules
    )
