"""A process that kills itself after a chosen command to MongoDB; run by test_mongo_crashes.py.

    python mongo_crashing.py worker|send SHAPE NUMBER before|after
    python mongo_crashing.py unique NAME NUMBER before|after          send a unique task

The commands that write are counted from the moment that the work begins; `before`: the command is not sent, `after`: it was
carried out and its reply is not heard.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from pymongo import monitoring

from tests.system import crashing

WRITES = frozenset({"insert", "update", "delete", "findAndModify"})


class Killer(monitoring.CommandListener):
    """Ends this process at a write."""

    armed = False

    def __init__(self, number: int, when: str) -> None:
        self.left = number
        self.when = when
        self._target = -1  # the request at which it ends
        self._counting = threading.Lock()

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        if not Killer.armed or event.command_name not in WRITES:
            return
        with self._counting:
            self.left -= 1
            if self.left == 0:
                self._target = event.request_id
        if self._target == event.request_id and self.when == "before":
            die(event.command_name)

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        if self._target == event.request_id:
            die(event.command_name)

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        pass


def die(name: str) -> None:
    crashing.note("killed", name)
    os.kill(os.getpid(), signal.SIGKILL)


def main(command: str, shape: str, number: str, when: str) -> int:
    monitoring.register(Killer(int(number), when))
    server = crashing.server
    server.app.store.tend()  # the connection and the indexes are made
    Killer.armed = True
    if command == "unique":
        print(server.send(crashing.alone.signature(shape)).uuid, flush=True)
        return 0
    if command == "send":
        print(server.send(crashing.SHAPES[shape]()).uuid, flush=True)
        return 0
    return server.new_worker(concurrency=2, burst=True).launch()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
