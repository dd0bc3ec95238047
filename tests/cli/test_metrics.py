"""GET /metrics of workers and of `machinery exporter`, read as Prometheus reads it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from machinery_py.cli import metrics
from machinery_py.errors import ConfigError
from machinery_py.testing.waiting import wait_until
from tests.cli.app import HANG, TASKS, App, Running, app_in_a_folder, children, is_alive
from tests.support.private import free_port

app = app_in_a_folder

OWN = (
    TASKS
    + """
from prometheus_client import Counter

mine = Counter("shop_orders", "orders")

@server.task(pool="process")
def order(number: int) -> None:
    mine.inc(number)
    note.send(str(number))
"""
)

PROGRAM = """
import sys
import tempfile
from prometheus_client import Counter, Gauge, Histogram

number = float(sys.argv[1])
Counter("shop_orders", "orders").inc(number)
Histogram("shop_seconds", "seconds", buckets=(2,)).observe(number)
for mode in ("min", "max", "sum", "mostrecent", "all", "livesum", "liveall"):
    Gauge(f"shop_{mode}", mode, multiprocess_mode=mode).set(number)
"""

Found = Mapping[str, float]


def read(port: int, accept: str = "") -> Found:
    url = f"http://127.0.0.1:{port}/metrics"
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=HANG) as answer:
        return parsed(answer.read().decode())


def ended(name: str, outcome: str = "succeeded") -> str:
    return f"machinery_tasks_ended_total{{name={name},outcome={outcome},queue=machinery_tasks}}"


def parsed(text: str) -> Found:
    """Return sample → value; a sample is written as in PromQL, its labels in their order."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in found, key
            found[key] = sample.value
    return found


def send_all(app: App, code: str) -> None:
    app.write("send.py", f"from tasks import *\n{code}\n")
    app.python("send.py")


def folder_of(worker: Running) -> Path:
    """Return the folder of its counts, as its process knows it."""
    variables = Path(f"/proc/{worker.worker}/environ").read_bytes().split(b"\0")
    prefix = f"{metrics.VARIABLE}=".encode()
    (value,) = (one for one in variables if one.startswith(prefix))
    return Path(os.fsdecode(value.removeprefix(prefix)))


def test_counts_of_all_processes_are_one_and_survive_their_ends(app: App) -> None:
    """Of two worker processes and their task processes, killed and started again."""
    app.write("tasks.py", OWN)
    port = free_port()
    worker = app.worker("--health-port", str(port), "-p", "2", "-c", "2")
    numbers = [3, 1, 2]

    def are_over(count: int) -> bool:
        """Both: a note may end before the order that sent it."""
        found = read(port)
        return found.get(ended("note")) == found.get(ended("order")) == count

    send_all(app, f"for number in {numbers}: order.send(number)")
    wait_until(lambda: are_over(len(numbers)), HANG)
    for pid in filter(is_alive, children(worker.pid)):
        os.kill(pid, signal.SIGKILL)
    send_all(app, "order.send(10), boom.send()")
    wait_until(lambda: are_over(len(numbers) + 1), HANG)
    wait_until(lambda: read(port).get(ended("boom", "failed")) == 1, HANG)
    wait_until(lambda: read(port).get("machinery_worker_slots") == 4, HANG)

    found = read(port, "application/openmetrics-text; version=1.0.0")
    assert found["shop_orders_total"] == sum(numbers) + 10
    sent = "machinery_tasks_sent_total{name=note,queue=machinery_tasks}"
    assert found[sent] == len(numbers) + 1  # by the task processes
    runs = "machinery_task_run_seconds_count{name=order,queue=machinery_tasks}"
    assert found[runs] == len(numbers) + 1
    assert worker.stop() == 0


def test_files_of_ended_processes_are_added_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Gauges by their modes; a file that its process could not complete is no harm."""
    monkeypatch.setattr(metrics, "IN_MEMORY", str(tmp_path))
    monkeypatch.setattr(metrics, "TIDY_EVERY", 0.0)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with metrics.ProcessCounts() as counts:
        for number in (5, 1, 3):
            subprocess.run([sys.executable, program, str(number)], timeout=HANG, check=True)
        (folder,) = tmp_path.glob(f"{metrics.NAME}*")
        (folder / "counter_999999999.db").touch()
        counts.tidy()
        assert all(one.stem.endswith(metrics.ENDED) for one in folder.iterdir())

        # Of a process that lives, and has just made it.
        (folder / f"counter_{os.getpid()}.db").touch()
        first, second = (parsed(counts.page("")[2].decode()) for _ in range(2))

        assert first == second
        assert first == {
            "shop_orders_total": 9,
            "shop_seconds_bucket{le=2.0}": 1,
            "shop_seconds_bucket{le=+Inf}": 3,
            "shop_seconds_count": 3,
            "shop_seconds_sum": 9,
            "shop_min": 1,
            "shop_max": 5,
            "shop_sum": 9,
            "shop_mostrecent": 3,
        }

        shutil.rmtree(folder)
        counts.tidy()  # in the loop of the supervisor, which must go on
        assert "cannot be added up" in caplog.text
    assert list(tmp_path.iterdir()) == [program]


def test_folder_of_a_killed_supervisor_is_removed_by_the_next(app: App) -> None:
    """And by none while it lives."""
    first = app.worker("--health-port", "0")
    folder = folder_of(first)
    second = app.worker("--health-port", "0")
    assert folder.stat().st_mode & 0o777 == 0o700
    first.close()

    third = app.worker("--health-port", "0")

    assert not folder.exists()
    assert folder_of(second).exists()
    kept = [folder_of(second), folder_of(third)]
    assert [second.stop(), third.stop()] == [0, 0]
    assert not any(one.exists() for one in kept)


def test_folder_is_on_disk_where_memory_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "ROOM", sys.maxsize)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    with metrics.ProcessCounts():
        assert [str(one) for one in tmp_path.iterdir()] == [os.environ[metrics.VARIABLE]]

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="no folder for metrics can be made in /dev/shm or"):
        metrics.ProcessCounts()


def test_folder_of_the_user_is_used_and_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another container may count there, whose processes are not seen from here."""
    folder = tmp_path / "counts"
    monkeypatch.setenv(metrics.VARIABLE, str(folder))
    with pytest.raises(ConfigError, match="no folder .*counts' .make it"):
        metrics.ProcessCounts()
    folder.mkdir()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    subprocess.run([sys.executable, program, "7"], timeout=HANG, check=True)
    files = {one.name for one in folder.iterdir()}

    with metrics.ProcessCounts() as counts:
        found = parsed(counts.page("")[2].decode())

    assert found["shop_orders_total"] == 7
    assert {one.name for one in folder.iterdir()} == files


def test_without_the_extra_a_worker_runs_and_metrics_are_not_found(app: App) -> None:
    app.write("prometheus_client.py", "raise ImportError('not installed')")
    port = free_port()
    worker = app.worker("--health-port", str(port))

    with pytest.raises(urllib.error.HTTPError) as refused:
        read(port)

    assert refused.value.code == 404
    assert b"pip install 'machinery_py[metrics]'" in refused.value.read()
    assert worker.stop() == 0
    command = "exporter", "tasks"
    assert "pip install 'machinery_py[metrics]'" in app.run(*command, code=2, warm=False).stderr


def test_exporter_tells_what_the_store_and_the_stream_know(app: App) -> None:
    app.send("add", "1", "2", "--queue", "other")
    exporter = app.start("exporter", "tasks", "--port", "0", "--events")
    exporter.wait_for("Ctrl+C stops.")
    port = int(exporter.out.partition("127.0.0.1:")[2].partition("/metrics")[0])
    worker = app.worker("-E", "-n", "web-1")

    app.send("add", "1", "2")
    app.send("boom")

    wait_until(lambda: read(port).get(ended("boom", "failed")) == 1, HANG)
    wait_until(lambda: read(port).get("machinery_workers{state=alive}") == 1, HANG)
    wait_until(lambda: read(port).get("machinery_worker_held{worker=web-1}") == 0, HANG)
    found = read(port)
    assert found[ended("add")] == 1
    assert found["machinery_store_up"] == 1
    assert found["machinery_queue_waiting{queue=other}"] == 1
    assert [exporter.stop(), worker.stop()] == [0, 0]
