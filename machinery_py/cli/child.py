"""The program of a task process: `python -m machinery_py.cli.child TASKS:CONTROL:REPLIES:PARENT`.

Started by worker/processes/pool.py, with the numbers of its three pipes and of the worker's
process.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from typing import Any

from machinery_py.cli import logs
from machinery_py.cli.apps import AppBroken, load
from machinery_py.cli.processes import die_with_parent
from machinery_py.connections import forks, streams
from machinery_py.errors import MachineryError
from machinery_py.worker.processes.child import JobLoop
from machinery_py.worker.processes.frames import (
    FrameReader,
    FrameWriter,
    Job,
    KeepReply,
    Order,
    PipeEnd,
    Ready,
    Setup,
)


def main(option: str) -> int:
    """Import the app and run jobs until the worker has no more."""
    *pipes, parent = map(int, option.split(":"))
    for number in pipes:
        os.set_inheritable(number, False)
    # A service manager signals all processes of a service; the worker alone says when to end.
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        forks.handle(stop, lambda *_: None)
    die_with_parent(parent, signal.SIGKILL)
    streams.open_closed()
    streams.drop_unread()
    faulthandler.enable()
    tasks: FrameReader[Any] = FrameReader(pipes[0], Setup | Job)
    control: FrameReader[Order | KeepReply] = FrameReader(pipes[1], Order | KeepReply)
    replies = FrameWriter(pipes[2])
    setup = tasks.read()
    assert isinstance(setup, Setup)
    sys.path[:] = list(setup.path)
    if setup.log_level:
        logs.configure(setup.log_level, setup.log_format)
    try:
        server = load(setup.app, setup.folder)
    except MachineryError as error:
        if isinstance(error, AppBroken):
            print(error.trace, end="", file=sys.stderr)
        replies.write(Ready(str(error)))
        return 1
    if setup.counts:
        from machinery_py.cli import metrics

        metrics.install(server)
    loop = JobLoop(server.app, tasks, control, replies, tells_memory=setup.tells_memory)
    try:
        loop.run()
    except MachineryError as error:
        replies.write(Ready(str(error)))
        return 1
    server.close()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1]))
    except PipeEnd:  # the worker is gone
        sys.exit(1)
