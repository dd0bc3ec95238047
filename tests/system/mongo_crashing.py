"""A process that kills itself after a chosen command to MongoDB; run by test_mongo_crashes.py.

    python mongo_crashing.py worker|send SHAPE NUMBER before|after

The commands that write are counted from the moment that the work begins; `before`: the command is not sent, `after`: it was
carried out and its reply is not heard.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from pymongo import monitoring

from tests.system import crashing

WRITES = frozenset({"insert", "update", "delete", "findAndModify"})


class Killer(monitoring.CommandListener):
    """Ends this process at a write."""

    armed = False

    def __init__(self, number: int, when: str) -> None:
        self.left = number
        self.when = when

    def _reached(self, event: Any, when: str) -> None:
        if not Killer.armed or event.command_name not in WRITES:
            return
        if when == "before":
            self.left -= 1
        if self.left == 0 and when == self.when:
            crashing.note("killed", event.command_name)
            os.kill(os.getpid(), signal.SIGKILL)

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        self._reached(event, "before")

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        self._reached(event, "after")

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        pass


def main(command: str, shape: str, number: str, when: str) -> int:
    monitoring.register(Killer(int(number), when))
    server = crashing.server
    server.engine.store.tend()  # the connection and the indexes are made
    Killer.armed = True
    if command == "send":
        print(server.send(crashing.SHAPES[shape]()).uuid, flush=True)
        return 0
    return server.new_worker(concurrency=2, burst=True).launch()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
