"""Tools for tests of tasks and of stores: a Server under test, a manual clock, injected faults.

harness       Harness: lists what was sent, and runs it when the test says so
crash_points  CrashPoints: kills a task at each of its writes
plugin        the pytest fixtures `machinery`, `machinery_worker` and `crash_points`
clocks        ManualClock
waiting       wait_until, together: tests without sleep
flaky         stores with injected faults
conformance   what every broker, backend and store must pass
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from machinery_py.testing.clocks import ManualClock
    from machinery_py.testing.crash_points import CrashPoints
    from machinery_py.testing.harness import Harness
    from machinery_py.testing.waiting import wait_until

__all__ = ["CrashPoints", "Harness", "ManualClock", "wait_until"]


def __getattr__(name: str) -> object:
    # Every pytest run imports this package for its plug-in. Other modules are loaded at first use.
    if name == "CrashPoints":
        from machinery_py.testing.crash_points import CrashPoints

        return CrashPoints
    if name == "Harness":
        from machinery_py.testing.harness import Harness

        return Harness
    if name == "ManualClock":
        from machinery_py.testing.clocks import ManualClock

        return ManualClock
    if name == "wait_until":
        from machinery_py.testing.waiting import wait_until

        return wait_until
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
