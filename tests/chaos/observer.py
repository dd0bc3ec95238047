"""Looks at states while they change: one thread that samples some tasks again and again."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from machinery_py import Server
from machinery_py.errors import MachineryError
from machinery_py.tasks.states import State
from tests.chaos.app import config_of

EVERY = 0.03  # seconds between two samples
WINDOW = 150  # tasks that are looked at at a time
AFTER = 20  # looks at a finished task, to see that it stays so
MISSED = 2000  # looks at a task without a state; then it never comes


class Observer:
    """A context. `samples`: for each task that was seen, how (run, state) changed."""

    def __init__(self, url: str, lease: float, uuids: Sequence[str]) -> None:
        self.samples: dict[str, list[tuple[int, State]]] = {}
        self._server = Server(config_of(url, lease))
        self._uuids = iter(uuids)
        self._looks: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="observer", daemon=True)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60.0)
        self._server.close()

    def _work(self) -> None:
        while not self._stop.wait(EVERY):
            while len(self._looks) < WINDOW and (uuid := next(self._uuids, "")):
                self._looks[uuid] = AFTER
            try:
                self._sample()
            except MachineryError:
                continue  # the store is being harmed

    def _sample(self) -> None:
        states = self._server.backend.get_states(list(self._looks))
        for uuid in list(self._looks):
            state = states.get(uuid)
            seen = self.samples.setdefault(uuid, []) if state else self.samples.get(uuid, [])
            now = (state.run, state.state) if state else None
            if now is not None and (not seen or seen[-1] != now):
                seen.append(now)
            if (state is not None and state.is_finished) or (state is None and not seen):
                self._looks[uuid] -= 1
                if self._looks[uuid] <= (0 if state else AFTER - MISSED):
                    del self._looks[uuid]
