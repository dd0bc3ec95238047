"""Watch of the limits that were set at run time for tasks whose code sets none.

A task without limits asks nobody before it runs. So a worker looks once a second, in a thread of
its own, which limits were set, and lets the tasks ask that have new ones.
"""

from __future__ import annotations

from machinery_py.app import Application
from machinery_py.errors import MachineryError, Unsupported
from machinery_py.limits.base import stored_name
from machinery_py.limits.settings import scope_of
from machinery_py.registry.unique_keys import owner
from machinery_py.texts import get_logger
from machinery_py.threads import LoopThread

logger = get_logger(__name__)

EVERY = 1.0  # seconds
AFTER_FAILURE = 5.0  # seconds until a store that is away is asked again


class LimitWatch:
    """Watch of one worker, which may start it again."""

    def __init__(self, app: Application, name: str) -> None:
        self._app = app
        self._name = name
        # Some task may have limits that its code does not set: a worker before this one set them.
        self._has_set = True
        self._loop: LoopThread | None = None

    def start(self) -> None:
        """Look at once, and then once a second; not where the lock store keeps no limits."""
        pause = self._look()
        if pause:
            loop = LoopThread(f"{self._name}-limits", lambda: self._work(loop, pause))
            self._loop = loop
            loop.start()

    def stop(self, timeout: float) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop()
            loop.join(timeout)

    def _work(self, loop: LoopThread, pause: float) -> None:
        while pause and not loop.pause(pause):
            pause = self._look()

    def _look(self) -> float:
        """Return the seconds to the next look; 0: never."""
        try:
            self._update()
        except Unsupported:
            return 0.0
        except MachineryError as error:
            logger.debug("the limits that were set cannot be read: %s", error)
            return AFTER_FAILURE
        except Exception:  # the loop must live on
            logger.exception("the limits that were set cannot be read")
            return AFTER_FAILURE
        return EVERY

    def _update(self) -> None:
        changed = self._app.stores.limits.changed()
        if changed or self._has_set:
            whose = owner(self._app.config)
            for task in self._app.registry:
                scope = stored_name(scope_of(task.name, owner=whose))
                task.limit_also(changed.get(scope, ()))
        self._has_set = bool(changed)
