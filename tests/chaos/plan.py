"""The calls, faults and moments of a chaos run. The same seed gives the same plan.

A call is one task to be made, with its future UUID, so that the checker knows the required end of
each before the run. Calls say how they follow each other:

    follows     this call is sent when that one has succeeded, and gets its result (chains)
    catches     this call is sent when that one has failed for good, and gets its error text
    gathers     this call is sent when all of those have succeeded, and gets their results in order
                (chords)
    none        the loader sends it
"""

from __future__ import annotations

import itertools
import json
import pathlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

MODULUS = 1_000_003  # results stay below it
NAP = 0.1  # seconds that a `nap` takes, on average

#: Which share of the items is of which kind.
MIX: Mapping[str, float] = {
    "noop": 36, "nap": 30, "fails": 6, "flaky": 6, "chain": 10, "broken_chain": 2, "group": 4,
    "chord": 6, "broken_chord": 2,
    "diamond": 2, "delayed": 6, "spawn": 4,
}  # fmt: skip

#: How often which fault comes beside the kills, for each kill.
FAULTS: Mapping[str, float] = {"freeze": 0.12, "term": 0.12, "child": 0.9}
SERVER_FAULTS: Mapping[str, float] = {
    "server": 0.10, "clients": 0.20, "scripts": 0.10, "drop": 0.15, "reset": 0.15, "hole": 0.08,
}  # fmt: skip

SURE_FREEZE = 3  # with this kill a worker is frozen, in every plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One task and what must come of it."""

    uuid: str
    task: str
    args: tuple[float | str, ...]  # its own; results and error texts come beside them
    follows: str = ""
    catches: str = ""
    gathers: tuple[str, ...] = ()
    fails: bool = False  # every try raises
    retries: int = 0  # tries that raise before one succeeds
    delay: float = 0.0  # seconds between sending and its ETA

    @property
    def is_sent(self) -> bool:
        """Whether it comes from the loader, not from another call."""
        return not (self.follows or self.catches or self.gathers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Calls that are sent as one workflow. `shape` says how the loader links them, see `load`."""

    number: int
    kind: str
    shape: Any  # indexes of `calls`: a number, or ["chain" | "group" | "chord", shapes …]
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something the nemesis will do. `victim` picks one of the workers that are there then."""

    at: float  # seconds after the start
    kind: str
    victim: float  # 0 to 1
    length: float = 0.0  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole run. `faults` go on for ever: take as many as the run is long."""

    seed: int
    tasks: int
    workers: int
    kill_every: float
    lease: float
    with_server: bool = False  # there is a server, and a proxy to it, to do harm to
    spared: tuple[str, ...] = ()  # faults that this server cannot have
    mix: Mapping[str, float] = field(default_factory=lambda: dict(MIX))
    rates: Mapping[str, float] = field(default_factory=lambda: dict(FAULTS))

    def items(self) -> list[Item]:
        """Workflows with `tasks` calls, some more to make the last one whole."""
        random_ = random.Random(f"items {self.seed}")
        kinds, weights = list(self.mix), list(self.mix.values())
        items: list[Item] = []
        count = 0
        while count < self.tasks:
            kind = random_.choices(kinds, weights)[0]
            item = _Maker(self.seed, len(items), kind, random_).make()
            items.append(item)
            count += len(item.calls)
        return items

    def faults(self) -> Iterator[Fault]:
        """What the nemesis does, in order, without end."""
        random_ = random.Random(f"faults {self.seed}")
        rates = {**self.rates, **(SERVER_FAULTS if self.with_server else {})}
        for number in itertools.count(1):
            at = self.kill_every * (number + random_.uniform(-0.3, 0.3))
            yield Fault(at=at, kind="kill", victim=random_.random())
            for kind, rate in rates.items():
                if kind in self.spared:
                    continue
                if random_.random() < rate or (kind == "freeze" and number == SURE_FREEZE):
                    yield Fault(
                        at=at,
                        kind=kind,
                        victim=random_.random(),
                        length=self._length(kind, random_),
                    )

    def _length(self, kind: str, random_: random.Random) -> float:
        match kind:
            case "freeze":
                return self.lease * random_.uniform(1.5, 3.0)
            case "server":
                return random_.uniform(0.0, 0.3)
            case "hole":
                return self.lease * random_.uniform(0.5, 2.0)
            case "drop":
                return random_.uniform(0.3, 1.0)
            case _:
                return 0.0

    def store(self, path: pathlib.Path, *, faults: int = 200) -> None:
        """Write it down: the settings, the items and the first faults."""
        first = list(itertools.islice(self.faults(), faults))
        content = {
            **asdict(self),
            "items": [asdict(item) for item in self.items()],
            "faults": [asdict(one) for one in first],
        }
        path.write_text(json.dumps(content, indent=1))


class _Maker:
    """Makes the calls of one item."""

    def __init__(self, seed: int, number: int, kind: str, random_: random.Random) -> None:
        self._prefix = f"task_{seed}-{number}-"
        self._number = number
        self._kind = kind
        self._random = random_
        self._calls: list[Call] = []

    def make(self) -> Item:
        shape = getattr(self, f"_{self._kind}")()
        return Item(number=self._number, kind=self._kind, shape=shape, calls=tuple(self._calls))

    def _add(self, task: str, *args: float | str, **facts: Any) -> int:
        place = len(self._calls)
        self._calls.append(Call(uuid=f"{self._prefix}{place}", task=task, args=args, **facts))
        return place

    def _uuid(self, place: int) -> str:
        return self._calls[place].uuid

    def _number_of_steps(self, most: int) -> int:
        # Small ones are more frequent, big ones do occur.
        return min(most, 2 + int(self._random.expovariate(4 / most)))

    def _noop(self) -> int:
        return self._add("noop", self._number)

    def _nap(self) -> int:
        return self._add("nap", round(min(1.5, self._random.expovariate(1 / NAP)), 4), self._number)

    def _fails(self) -> int:
        place = self._add("fails", self._number, fails=True)
        self._add("on_failure", self._number, catches=self._uuid(place))
        return place

    def _flaky(self) -> int:
        tries = self._random.randint(1, 3)
        return self._add("flaky", tries, self._number, retries=tries)

    def _delayed(self) -> int:
        return self._add("noop", self._number, delay=round(self._random.uniform(0.0, 3.0), 3))

    def _spawn(self) -> int:
        return self._add("spawn", self._random.randint(1, 4), self._number)

    def _chain(self) -> list[Any]:
        first = self._add("step", self._number)
        places = [first]
        for _ in range(self._random.randint(1, 5)):
            places.append(self._add("step", self._number, follows=self._uuid(places[-1])))
        return ["chain", *places]

    def _broken_chain(self) -> list[Any]:
        first = self._add("step", self._number)
        middle = self._add("fails", self._number, follows=self._uuid(first), fails=True)
        self._add("on_failure", self._number, catches=self._uuid(middle))
        last = self._add("step", self._number, follows=self._uuid(middle))
        return ["chain", first, middle, last]

    def _group(self) -> list[Any]:
        return [
            "group",
            *(self._add("step", self._number + n) for n in range(self._number_of_steps(20))),
        ]

    def _chord(self) -> list[Any]:
        members = [self._add("step", self._number + n) for n in range(self._number_of_steps(50))]
        return self._gathered(members, ["group", *members])

    def _broken_chord(self) -> list[Any]:
        members = [self._add("step", self._number + n) for n in range(self._number_of_steps(20))]
        place = self._random.randrange(len(members) + 1)
        members.insert(place, self._add("fails", self._number, fails=True))
        self._add("on_failure", self._number, catches=self._uuid(members[place]))
        return self._gathered(members, ["group", *members])

    def _diamond(self) -> list[Any]:
        """A task, a group of chains behind it, a callback behind them, and a step behind that."""
        first = self._add("step", self._number)
        ends: list[int] = []
        chains: list[Any] = []
        for n in range(self._random.randint(2, 5)):
            start = self._add("step", self._number + n, follows=self._uuid(first))
            end = self._add("step", self._number + n, follows=self._uuid(start))
            ends.append(end)
            chains.append(["chain", start, end])
        shape = self._gathered(ends, ["group", *chains])
        last = self._add("step", self._number, follows=self._uuid(shape[2]))
        return ["chain", first, *shape[1:], last]

    def _gathered(self, members: Sequence[int], group: list[Any]) -> list[Any]:
        callback = self._add(
            "gather", self._number, gathers=tuple(self._uuid(place) for place in members)
        )
        self._add("on_failure", self._number, catches=self._uuid(callback))
        return ["chord", group, callback]


def result_of(call: Call, given: Sequence[float]) -> float:
    """What a call returns that was given these results."""
    match call.task:
        case "step" | "gather":
            return fold(int(call.args[-1]), [int(one) for one in given])
        case _:
            return call.args[-1]  # type: ignore[return-value]  # the number


def fold(start: int, values: Sequence[int]) -> int:
    """A number that depends on each of the values and on their order."""
    for value in values:
        start = (start * 31 + value + 7) % MODULUS
    return start


def by_uuid(items: Sequence[Item]) -> dict[str, Call]:
    """Every call of a plan."""
    return {call.uuid: call for item in items for call in item.calls}


def caught_by(calls: Mapping[str, Call]) -> Callable[[str], Call | None]:
    """Finds the error callback of a call."""
    found = {call.catches: call for call in calls.values() if call.catches}
    return found.get
