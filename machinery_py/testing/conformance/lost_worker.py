"""A worker for conformance tests that runs tasks and never settles them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from machinery_py.brokers.base import Delivery
from machinery_py.revocation import revoked_among
from machinery_py.stores.base import Session
from machinery_py.testing.conformance.application import App, AppCase
from machinery_py.testing.waiting import wait_until
from machinery_py.worker.admission.intake import accept, peek
from machinery_py.worker.running.execution import Execution
from machinery_py.worker.running.hooks import WorkerHooks
from machinery_py.worker.running.runner import Run, run_here


class LostWorker:
    """A worker that runs tasks and never settles them."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.session: Session = self.open()
        self.executions: list[Execution] = []

    def open(self) -> Session:
        queue = self.app.server.config.default_queue
        return self.app.server.app.store.open_session([queue], worker="lost")

    def claim(self) -> Execution:
        """Claim the one waiting task."""
        [delivery] = self.claim_all()
        app = self.app.server.app
        execution = Execution(app, WorkerHooks(), delivery, "lost", session=self.session)
        self.executions.append(execution)
        assert peek(execution)
        assert accept(execution, revoked_among(app, [execution.signature]))
        return execution

    def claim_all(self) -> list[Delivery]:
        found: list[Delivery] = []

        def has_claimed() -> bool:
            found.extend(self.session.receive(1, 0.1))
            return bool(found)

        wait_until(has_claimed, what="the message")
        return found

    def run(self, execution: Execution) -> Any:
        """Run it, and return its outcome's state."""
        assert execution.begin()
        run_here(Run(execution))
        assert execution.settlement is not None
        return execution.settlement.states[0]

    def lose(self) -> None:
        """Give back what it holds, and go on with another session."""
        self.session.close()
        self.session = self.open()


class LostWorkerCase(AppCase):
    """Tests that have such a worker."""

    @pytest.fixture
    def lost(self, idle: App) -> Iterator[LostWorker]:
        worker = LostWorker(idle)
        yield worker
        worker.session.close()
