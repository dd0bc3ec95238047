"""A task that waits for signals and other tasks, in any order of what happens meanwhile.

After each move the task has one of a message, a delivery, a wait and an end. In the end it has got
the accepted signals in their order, the results of the others, and nothing else but timeouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from machinery_py import Config, Server, State, TaskFailed, current_task
from machinery_py.backends.base import CONFLICT, FENCED
from machinery_py.errors import SignalRefused, SignalTimeout
from machinery_py.revocation import end_if_revoked, revoked_among
from machinery_py.stores.base import Session
from machinery_py.tasks.mailboxes import SILENT, decode, record_of
from machinery_py.testing import Harness
from machinery_py.worker.admission.intake import accept, peek
from machinery_py.worker.running.execution import Execution
from machinery_py.worker.running.hooks import WorkerHooks
from machinery_py.worker.running.runner import Run, run_here
from machinery_py.worker.running.waiting import run_again
from tests.models.machine import EXAMPLES

WAITS, TIMEOUT, WORKERS = 4, 100, 3
LATE, BROKEN = -1, -2  # in place of a value


@dataclass
class Worker:
    """A worker that does one thing at a time. `execution`: the task, if it has its delivery."""

    session: Session
    execution: Execution | None = None
    has_run: bool = False


class World:
    """The task, its workers, and what its senders were told."""

    def __init__(self, server: Server, harness: Harness) -> None:
        self.server, self.harness, self.app = server, harness, server.app
        self.workers = [self._worker() for _ in range(WORKERS)]
        self.zombies: list[Worker] = []
        self.accepted: list[int] = []
        self.is_revoked = False

        @server.task
        def other(number: int) -> int:
            if number == 2:
                raise ValueError(number)
            return number

        @server.task
        def flow() -> list[tuple[int, int]]:
            task, found = current_task(), list[tuple[int, int]]()
            for number in range(WAITS):
                timeout = TIMEOUT if number % 2 else None
                try:
                    told = task.wait_for("go", timeout=timeout)
                except SignalTimeout:
                    told = LATE
                try:
                    result = task.wait_for(other.signature(number), timeout=timeout)
                except SignalTimeout:
                    result = LATE
                except TaskFailed:
                    result = BROKEN
                found.append((told, result))
            return found

        self.result: Any = flow.send()

    def _worker(self) -> Worker:
        queue = self.server.config.default_queue
        return Worker(self.app.store.open_session([queue], worker="w"))

    @property
    def state(self) -> State:
        state: State = self.result.get_state().state
        return state

    def moves(self) -> Iterator[tuple[float, tuple[str, int]]]:
        """Yield what can be done now, with weights. Revocation ends the task, so it is rare."""
        for number, one in enumerate(self.workers):
            if one.execution is None:
                yield 2.0, ("claim", number)
            else:
                yield 4.0, ("settle" if one.has_run else "run", number)
                yield 0.3, ("die", number)
        if self.zombies:
            yield 0.5, ("zombie", 0)
        yield 1.0, ("time", 0)
        if not self.is_revoked:  # then it ends by itself
            yield 1.0, ("signal", 0)
            yield 0.2, ("revoke", 0)

    def move(self, what: str, number: int) -> None:
        worker = self.workers[number]
        match what:
            case "claim" if worker.execution is None:
                self._claim(worker)
            case "run" if worker.execution is not None and not worker.has_run:
                self._run(worker)
            case "settle" if worker.has_run:
                self._settle(worker)
            case "signal":
                self._signal()
            case "die":
                worker.session.close()  # gives it back, as the end of its lease does
                if worker.execution is not None:
                    self.zombies.append(worker)
                self.workers[number] = self._worker()
            case "zombie" if self.zombies:
                self._go_on(self.zombies.pop())
            case "time":
                self.harness.clock.advance(TIMEOUT / 2)
                for one in self.workers:
                    one.session.beat()
                self.app.store.tend()
            case "revoke":
                self.server.revoke(self.result.uuid)
                self.is_revoked = True

    def _claim(self, worker: Worker) -> None:
        for delivery in worker.session.receive(1, 0.0):
            one = Execution(self.app, WorkerHooks(), delivery, "w", session=worker.session)
            revoked = revoked_among(self.app, [one.signature]) if peek(one) else {}
            if accept(one, revoked):
                worker.execution, worker.has_run = one, False
            else:
                assert one.settlement is not None
                worker.session.settle([one.settlement])

    def _run(self, worker: Worker) -> None:
        assert worker.execution is not None
        worker.execution.begin()
        worker.execution.phase = State.STARTED
        mark = worker.execution.mark()
        assert mark is not None
        worker.session.settle([], [mark])
        run_here(Run(worker.execution))
        worker.has_run = True

    def _settle(self, worker: Worker) -> None:
        one = worker.execution
        assert one is not None
        assert one.settlement is not None
        [verdict] = worker.session.settle([one.settlement])
        if verdict is CONFLICT:
            run_again(one)
            [verdict] = worker.session.settle([one.settlement])
        assert verdict is not CONFLICT
        if one.settlement.riders:
            end_if_revoked(self.app, one.signature)
        worker.execution, worker.has_run = None, False

    def _go_on(self, zombie: Worker) -> None:
        """Let a worker that has lost the task run and settle it: nothing of that counts."""
        one = zombie.execution
        assert one is not None
        if not zombie.has_run:
            self._run(zombie)
        assert one.settlement is not None
        assert zombie.session.settle([one.settlement]) == [FENCED]

    def _signal(self) -> None:
        number = len(self.accepted) + 1
        try:
            assert self.server.signal(self.result.uuid, "go", number)
        except SignalRefused:
            assert self.state.is_finished
        else:
            self.accepted.append(number)

    def check(self, seed: str) -> None:
        """The task is at one place."""
        broker, uuid = self.app.store.broker, self.result.uuid
        queue = self.server.config.default_queue
        messages = [*broker.pending(queue, 100), *broker.delayed(100)]
        [body] = self.app.store.backend.claims([record_of(uuid)])
        places = {
            "message": sum(one.uuid == uuid for one in messages),
            "delivery": sum(
                one.execution is not None and one.execution.signature.uuid == uuid
                for one in self.workers
            ),
            "wait": int(decode(body).wait is not None),
        }
        if self.state.is_finished:
            assert places["wait"] == 0, (seed, places)
        else:
            assert sum(places.values()) == 1, (seed, places)
        assert all(one.name in ("other", *SILENT) or one.uuid == uuid for one in messages)

    def end(self, seed: str) -> None:
        """Let it come to its end, and look at what it has got."""
        for _ in range(30 * WAITS):
            for number in range(WORKERS):
                for what in ("claim", "run", "settle"):
                    self.move(what, number)
            self.check(seed)
            if self.state.is_finished:
                break
            self.move("time", 0)
            if not self.is_revoked:  # else it ends by itself
                self.move("signal", 0)
        state = self.result.get_state()
        if self.is_revoked and state.state is State.FAILURE:
            return
        assert state.state is State.SUCCESS, (seed, state)
        found = self.result.get(timeout=1)
        told = [number for number, _ in found if number != LATE]
        assert told == self.accepted[: len(told)], seed
        for number, (_, result) in enumerate(found):
            expected = BROKEN if number == 2 else number
            assert result == expected or (number % 2 and result == LATE), (seed, found)


@pytest.mark.parametrize("part", range(4))
def test_task_is_at_one_place_and_gets_each_signal_once(part: int) -> None:
    for number in range(EXAMPLES or 40):
        seed = f"{part}.{number}"
        random = Random(seed)
        server = Server(Config(broker="memory://"))
        with Harness(server) as harness:
            world = World(server, harness)
            for _ in range(random.randrange(20, 160)):
                moves = list(world.moves())
                [(_, move)] = random.choices(moves, [weight for weight, _ in moves])
                world.move(*move)
                world.check(seed)
            world.end(seed)
        server.close()
