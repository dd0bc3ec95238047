"""Something done in a forked child."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

from machinery_py.testing.waiting import wait_until


def forked(work: Callable[[], object], meanwhile: Callable[[], object] | None = None) -> None:
    """Fork, and see that `work` comes true in the child, which ends with this call.

    The parent does `meanwhile`.
    """
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 1)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(2)
    try:
        if meanwhile is not None:
            meanwhile()
        wait_until(
            lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT),
            what="the end of the forked child",
        )
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        status = os.waitpid(child, 0)[1]
    assert status == 0
