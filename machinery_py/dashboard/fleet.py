"""The parts of a Server that the dashboard looks at and acts on."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from machinery_py.config.config import Config
from machinery_py.control.client import Control
from machinery_py.inspection import Inspector
from machinery_py.schedules.api import Schedules


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The parts of a Server.

    Attributes:
        parameters: returns the names of a task's positional parameters; empty if it is unknown.
    """

    config: Config
    inspect: Inspector
    schedules: Schedules
    control: Control
    now: Callable[[], dt.datetime]
    parameters: Callable[[str], Sequence[str]]
