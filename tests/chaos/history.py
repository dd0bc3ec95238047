"""A run's history as records: read from ledgers, journals and stores, or made by hand for tests."""

from __future__ import annotations

import json
import pathlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from machinery_py.tasks.states import State
from tests.chaos.plan import Call, by_uuid
from tests.chaos.plan import Item as Item

RANK = {
    State.PENDING: 0,
    State.RECEIVED: 1,
    State.STARTED: 2,
    State.RETRY: 3,
    State.SUCCESS: 3,
    State.FAILURE: 3,
}


@dataclass(slots=True, kw_only=True)
class Run:
    """One execution, as its process wrote it down."""

    uuid: str
    run: int  # how many runs had ended in RETRY before
    fence: int  # which delivery of the message
    worker: str
    start: float
    started_at: float = 0.0  # unix time
    digest: str = ""
    again: bool = False  # its message had been handed over before, to whomever
    end: float | None = None  # None: it was cut off
    ok: bool = False
    settled: float | None = None  # when its worker was told that its outcome is true


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A worker was told that an outcome is true."""

    uuid: str
    run: int
    worker: str
    state: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """A fault that was injected. `worker` "" is everybody."""

    kind: str
    worker: str
    start: float
    end: float
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a sender was told. `word`: accepted, refused or unknown."""

    word: str
    at: float = 0.0
    tried: float = 0.0  # since when
    eta: float = 0.0  # unix time
    parent: str = ""  # of what a task sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Final:
    """A task's state at the end."""

    state: State
    results: tuple[object, ...] = ()
    error: str = ""
    error_type: str = ""


@dataclass(slots=True, kw_only=True)
class History:
    """All that is known of a run."""

    calls: dict[str, Call]
    sent: dict[str, Sent] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    settled: list[Settled] = field(default_factory=list)
    faults: list[Happened] = field(default_factory=list)
    samples: dict[str, list[tuple[int, State]]] = field(default_factory=dict)
    states: dict[str, Final] = field(default_factory=dict)
    strikes: dict[str, int] = field(default_factory=dict)  # of each dead letter
    # What is published or held during a fault may be there twice, or a state without its message.
    doubles: bool = False
    forgets: bool = False  # a server that is killed may forget what it has just let be claimed
    left: list[str] = field(default_factory=list)  # what should not be in the stores any more
    incidents: list[str] = field(
        default_factory=list
    )  # workers that ended by themselves, or not when they were asked to
    drained: bool = True
    finished: int | None = None  # how many tasks the store counted as finished

    def runs_of(self) -> dict[str, list[Run]]:
        """The executions of each task, the first first."""
        found: dict[str, list[Run]] = defaultdict(list)
        for run in sorted(self.runs, key=lambda one: one.start):
            found[run.uuid].append(run)
        return found


def new_history(items: Sequence[Item]) -> History:
    return History(calls=by_uuid(items))


def read_folder(history: History, folder: pathlib.Path) -> None:
    """Add what ledgers and journal say."""
    for path in sorted(folder.glob("ledger-*")):
        _read_ledger(history, path, path.name.partition("-")[2])
    for word, at, uuid, eta in _lines(folder / "journal"):
        before = history.sent.get(uuid)
        tried = float(at) if before is None else before.tried
        if word != "attempt":
            history.sent[uuid] = Sent(word=word, at=float(at), eta=float(eta), tried=tried)
        elif before is None:  # a loader that ends in between leaves this
            history.sent[uuid] = Sent(word="unknown", at=float(at), eta=float(eta), tried=tried)


def _read_ledger(history: History, path: pathlib.Path, worker: str) -> None:
    open_: dict[tuple[str, str], dict[str, Run]] = defaultdict(dict)
    for event, at, uuid, *facts in _lines(path):
        match event, facts:
            case "start", [run, fence, digest, started_at, times]:
                one = Run(
                    uuid=uuid,
                    run=int(run),
                    fence=int(fence),
                    worker=worker,
                    start=float(at),
                    started_at=float(started_at),
                    digest=digest,
                    again=times == "again",
                )
                open_[uuid, run][fence] = one
                history.runs.append(one)
            case "end", [run, fence, word]:
                one = open_[uuid, run][fence]
                one.end, one.ok = float(at), word == "ok"
            case "settled", [run, state]:
                history.settled.append(
                    Settled(uuid=uuid, run=int(run), worker=worker, state=state, at=float(at))
                )
                if same := open_[uuid, run].values():
                    # The event does not tell which. After a freeze a worker may run both its
                    # old delivery and its new one; only the new one can be settled.
                    max(same, key=lambda one: one.fence).settled = float(at)
            case "attempt", [parent]:
                history.sent[uuid] = Sent(
                    word="unknown", at=float(at), tried=float(at), parent=parent
                )
            case "accepted", [parent]:
                history.sent[uuid] = Sent(
                    word="accepted", at=float(at), tried=history.sent[uuid].tried, parent=parent
                )
            case _:
                raise ValueError(f"{path}: {event} {facts}: unknown")


def _lines(path: pathlib.Path) -> Iterator[list[str]]:
    if path.exists():
        for line in path.read_text().splitlines():
            yield line.split("\t")


def dump_faults(faults: Sequence[Happened], path: pathlib.Path) -> None:
    path.write_text(
        "".join(
            json.dumps(
                {
                    "kind": one.kind,
                    "worker": one.worker,
                    "start": one.start,
                    "end": one.end,
                    "note": one.note,
                }
            )
            + "\n"
            for one in faults
        )
    )
