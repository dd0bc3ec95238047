"""The parts of a Server that the dashboard looks at and acts on."""

from __future__ import annotations

from dataclasses import dataclass

from machinery_py.app import Application
from machinery_py.control.client import Control
from machinery_py.inspection import Inspector
from machinery_py.schedules.api import Schedules


@dataclass(frozen=True, slots=True)
class Fleet:
    """The parts of a Server."""

    app: Application
    inspect: Inspector
    schedules: Schedules
    control: Control
