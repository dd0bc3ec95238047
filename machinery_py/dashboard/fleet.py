"""The parts of a Server that the dashboard looks at and acts on."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass

from machinery_py.app import Application
from machinery_py.config.config import Config
from machinery_py.control.client import Control
from machinery_py.inspection import Inspector
from machinery_py.schedules.api import Schedules
from machinery_py.workflows.workflow import Workflow, find_workflow, recent_workflows


@dataclass(frozen=True, slots=True)
class Fleet:
    """The parts of a Server."""

    app: Application
    inspect: Inspector
    schedules: Schedules
    control: Control

    @property
    def config(self) -> Config:
        return self.app.config

    def now(self) -> dt.datetime:
        return self.app.now()

    def parameters(self, task: str) -> Sequence[str]:
        """Return the names of a task's positional parameters; empty if it is unknown."""
        return self.app.registry.parameters(task)

    def workflow(self, uuid: str) -> Workflow:
        """Find a workflow, as Server.workflow."""
        return find_workflow(self.app, uuid)

    def workflows(self, limit: int) -> Sequence[Workflow]:
        """Return the last changed workflows."""
        return recent_workflows(self.app, limit)
