"""Flows of twenty steps, a sleep and a wait, while a worker is killed each second."""

from __future__ import annotations

import os
import re
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from machinery_py import AsyncResult, Server
from machinery_py.testing.waiting import wait_until
from tests.support.supervised import kill_all
from tests.system.killing import STEPS
from tests.system.test_kills import Fleet, fleet, server

__all__ = ["fleet", "server"]

FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))
FLOWS = 24
KILLS = 60 if FULL else 6
EACH = 1.0  # seconds between two kills
HANG = 300.0  # seconds; a guard, nothing is measured with it
SAW = re.compile(r"^saw_(\d+)_(\w+) (task_[0-9a-f-]{36}) \d+$", re.MULTILINE)


@pytest.mark.timeout(2 * HANG)
def test_flows_under_kills_end_right_and_keep_each_step_once(fleet: Fleet, server: Server) -> None:
    fleet.environment["KILL_STRIKES"] = "1000"  # they are killed for nothing that they do
    flow = server.register_task("flow", lambda: None)
    sent = [flow.send() for _ in range(FLOWS)]
    workers = [fleet.start(), fleet.start()]

    for number in range(KILLS):
        threading.Event().wait(EACH)
        kill_all(workers[number % 2])
        workers[number % 2] = fleet.start()
        _signal(server, sent)

    def all_are_over() -> bool:
        _signal(server, sent)
        return all(one.get_state().is_finished for one in sent)

    wait_until(all_are_over, HANG, "the end of all flows")
    found = {one.uuid: one.get(timeout=HANG) for one in sent}
    saw: dict[tuple[str, int], set[str]] = defaultdict(set)
    for place, value, uuid in SAW.findall(fleet.ledger.read_text()):
        saw[uuid, int(place)].add(value)
    assert saw == {
        (uuid, place): {value}
        for uuid, values in found.items()
        for place, value in enumerate(values, start=1)
    }
    assert {len(values) for values in found.values()} == {STEPS + 2}
    assert {values[STEPS // 2 + 1] for values in found.values()} == {"yes"}
    assert not server.inspect.dead()


def _signal(server: Server, sent: Sequence[AsyncResult[Any]]) -> None:
    """Give each flow that waits its signal."""
    for one in sent:
        if server.inspect.task(one.uuid).waits_for:
            server.signal(one.uuid, "go", "yes", key="once")
