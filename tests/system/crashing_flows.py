"""The process of crashing.py with limited, debounced and batch tasks, and with workflows.

    python -m tests.system.crashing_flows worker POINT          run a worker until killed or idle
    python -m tests.system.crashing_flows serve POINT           run a worker until killed
    python -m tests.system.crashing_flows debounce NAME POINT   send a debounced task
    python -m tests.system.crashing_flows cancel UUID POINT     cancel a workflow
    python -m tests.system.crashing_flows retry UUID POINT      retry a workflow

At the point `step-3` the third write of the call is done. A run is in the ledger from `begin` to
`end`, or until the line of the kill.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from machinery_py import BatchFailed, group
from machinery_py.backends.base import Verdict
from machinery_py.limits import Admission, Entrant
from machinery_py.stores.base import Mark, Session, Settlement
from machinery_py.workflows import retry
from tests.system import crashing
from tests.system.crashing import KillingSession, KillingStore, around, killer, note, server

MOST = 2  # runs of `limited` at a time
CLAIMED = 0.3  # seconds that a killed retry keeps others away
DEBOUNCE = 0.3  # seconds


@server.task(max_running=MOST, rate="200/s")
def limited(number: int) -> int:
    note("begin", number, os.getpid())
    killer.reach("in-task")
    time.sleep(0.02)
    note("end", number, os.getpid())
    return number


@server.task(debounce=DEBOUNCE, unique_key="name")
def debounced(name: str, text: str) -> str:
    note("debounced", text)
    killer.reach("in-task")
    return text


@server.task(batch=3, batch_within=0.1)
def gathered(names: list[str]) -> list[str]:
    note("batch", *names)
    killer.reach("in-task")
    bad = {place: ValueError(name) for place, name in enumerate(names) if name == "bad"}
    if bad:
        raise BatchFailed(bad, [name.upper() for name in names])
    return [name.upper() for name in names]


def is_mended() -> bool:
    return os.path.exists(os.environ["CRASH_LEDGER"] + ".mended")


@server.task
def fetch(name: str) -> str:
    note("fetch", name)
    killer.reach("in-task")
    if name == "b" and not is_mended():
        raise ConnectionError("refused")
    return name


@server.task
def merge(*names: str) -> str:
    note("merge", *names)
    killer.reach("in-task")
    return "+".join(names)


def limits() -> Any:
    return group(limited.signature(number) for number in range(5))


def batch() -> Any:
    return group(
        gathered.signature(name).catch(crashing.on_error.partial()) for name in ("a", "bad", "c")
    )


def flow() -> Any:
    """Return a workflow whose task b fails until it is mended."""
    members = group(fetch.signature(name) for name in "abc")
    return members | merge.partial().catch(crashing.on_error.partial()) | merge.partial()


#: Of a limited task: it has not asked; it is to wait; it is put back; it was let in; it runs; it is
#: over, and not settled; it is settled, and holds its slot; its slot is given back.
LIMIT_POINTS = (
    "before-enter",
    "after-wait",
    "after-later",
    "after-enter",
    "in-task",
    "before-end",
    "after-end",
    "after-leave",
)
#: Of a debounced task: around the step that frees its key, and those of its run.
DEBOUNCE_POINTS = ("after-claim", "before-free", "after-free", "in-task", "before-end", "after-end")
#: Of a batch; `before-end` and `after-end` once for each settlement of one of its calls.
BATCH_POINTS = ("after-claim", "in-task", "before-end", "after-end")
#: Of a retry: claim, spare, purge, group, purge, replay, and the claim is released.
RETRY_POINTS = tuple(f"step-{number}" for number in range(1, 8))
#: Of cancelling: the workflow is revoked; its tasks are, and fail, step by step from the last one.
CANCEL_POINTS = tuple(f"step-{number}" for number in range(1, 5))


class FlowStore(KillingStore):
    """The store, whose settlements tell an end of a task from its going back."""

    def open_session(self, queues: Sequence[str], *, worker: str) -> Session:
        return FlowSession(self._store.open_session(queues, worker=worker))


class FlowSession(KillingSession):
    def settle(
        self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
    ) -> list[Verdict]:
        words = sorted({"end" if one.states else "later" for one in settlements})
        for word in words:
            killer.reach(f"before-{word}")
        verdicts = super().settle(settlements, marks)
        for word in words:
            killer.reach(f"after-{word}")
        return verdicts


class FlowStores:
    """What the app asks for its stores."""

    def __init__(self, stores: Any) -> None:
        self._stores = stores
        self.store = FlowStore(stores.store)
        self.clock = stores.clock
        self.limits = stores.limits
        enter_all = self.limits.enter_all

        def killing_enter(entrants: Sequence[Entrant]) -> list[Admission]:
            killer.reach("before-enter")
            answers: list[Admission] = enter_all(entrants)
            for answer in answers:
                killer.reach("after-wait" if answer.wait else "after-enter")
            return answers

        self.limits.enter_all = killing_enter
        self.limits.leave = around("", self.limits.leave, "after-leave")

    def close(self) -> None:
        self._stores.close()


def count_writes() -> None:
    """Let the killer in behind each write of a process that cancels or retries."""
    numbers = itertools.count(1)

    def counted(write: Callable[..., Any]) -> Callable[..., Any]:
        def carry_out(*what: Any, **options: Any) -> Any:
            done = write(*what, **options)
            killer.reach(f"step-{next(numbers)}")
            return done

        return carry_out

    store: Any = server.app.store
    for owner, names in (
        (store.backend, ("apply", "purge_group_meta", "release", "revoke")),
        (store, ("submit", "fire")),
    ):
        for name in names:
            setattr(owner, name, counted(getattr(owner, name)))


def main(command: str, *words: str) -> int:
    *what, killer.point = words
    if command in ("cancel", "retry"):
        retry.LONGEST = CLAIMED
        workflow = server.workflow(what[0])
        count_writes()
        getattr(workflow, command)()
        return 0
    stores: Any = FlowStores(server.app.stores)
    server.app.swap(server.config, server.clock, stores)
    backend: Any = stores.store.backend
    if command == "debounce":
        stores.store.submit = around("before-take", stores.store.submit, "after-take")
        server.send(debounced.signature(what[0], "last"))
        return 0
    backend.amend = around("before-free", backend.amend, "after-free")
    # What waits for its turn, or is gathered, does not end a worker that is to be killed.
    return server.new_worker(concurrency=3, burst=command == "worker").launch()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
