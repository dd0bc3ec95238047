"""A thousand task processes renewed under load, in `make chaos`: nothing is left behind."""

from __future__ import annotations

import os
import pathlib

import pytest

from machinery_py.connections import proc
from machinery_py.testing.waiting import wait_until
from tests.support.servers import RedisServer
from tests.support.supervised import children
from tests.system.contained import Contained

FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))
TASKS = int(os.environ.get("CHAOS_RENEWALS", "1000"))
WARM = TASKS // 10  # tasks until the worker has all its threads and buffers
LIMIT = 1800.0  # seconds; a guard
MORE = 5 * 2**20  # bytes that the worker may have grown by


def used(pid: int) -> dict[str, int]:
    """Return what a worker process holds."""
    folder = pathlib.Path(f"/proc/{pid}")
    pages = int((folder / "statm").read_text().split()[1])
    return {
        "descriptors": len(os.listdir(folder / "fd")),
        "threads": len(os.listdir(folder / "task")),
        "processes": len(children(pid)),
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
    }


@pytest.mark.chaos
@pytest.mark.skipif(not FULL, reason="minutes long, in `make chaos`")
@pytest.mark.timeout(LIMIT)
def test_a_thousand_renewed_processes_leave_nothing_behind(
    empty_redis: RedisServer, tmp_path: pathlib.Path
) -> None:
    url = empty_redis.url
    place = Contained(tmp_path, url, url, "-c", "2", "--max-tasks-per-child", "1")
    try:
        results = place.send(*["return"] * TASKS)
        wait_until(lambda: place.count() > WARM, LIMIT, "the first tasks")
        worker = place.held(results[0])[1]
        early = used(worker)
        wait_until(lambda: place.count() == TASKS, LIMIT, "the last tasks")
        for number, result in enumerate(results):
            assert result.get(LIMIT) == number
        wait_until(lambda: used(worker)["processes"] <= 2, LIMIT, "the end of the worn processes")
        late = used(worker)
        print(f"early {early}, late {late}")
    finally:
        place.close()

    pids = [pid for result in results for pid, _ in place.runs(result)]
    assert len(pids) == TASKS
    assert len(set(pids)) > TASKS // 2  # numbers of processes come again
    assert late["threads"] <= early["threads"]
    assert late["descriptors"] <= early["descriptors"] + 6  # three pipes each
    assert late["memory"] <= early["memory"] + MORE
    assert proc.stat(worker) == []
