"""The benchmarks run, check what they measured, and give figures; speed is not tested here.

Those with a server of their own run with MACHINERY_TEST_FULL=1 (`make chaos`): they take a minute
of two processors, and a benchmark that fails is seen by who asks for its figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bloat, ceiling, growth
from tests.support import private_mongo
from tests.support.servers import PostgreSQLServer, RabbitMQServer, RedisServer, require

ROOT = Path(__file__).resolve().parents[2]
HANG = 150.0  # seconds

with_servers = pytest.mark.skipif(
    not os.environ.get("MACHINERY_TEST_FULL"), reason="MACHINERY_TEST_FULL runs it"
)


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )


def test_a_quick_run_measures_every_figure_on_memory_and_sqlite(tmp_path: Path) -> None:
    done = run("benchmarks", "--quick", "--json", "--folder", str(tmp_path))

    report: dict[str, Any] = json.loads(done.stdout)
    assert report["failures"] == [], done.stderr
    memory, sqlite = report["figures"]["memory://"], report["figures"]["sqlite:///bench.db"]
    assert {
        "send",
        "send in bulk",
        "drain",
        "cpu per task",
        "latency",
        "chain",
        "chord",
        "delayed",
    } <= memory.keys()
    costs = {"cost of the log", "cost of metrics"}  # of so few tasks they may be below 0
    of_processes = {"drain by two", "ready", "drain logged", "drain with metrics", *costs}
    assert memory.keys() | of_processes | {"raw send", "raw drain"} == sqlite.keys()
    assert report["figures"][""].keys() == {"python", "import", "import Server", "import msgspec"}
    assert report["figures"][""]["python"] > 0
    assert all(
        value > 0
        for name, value in (*memory.items(), *sqlite.items())
        if name not in {"idle cpu", *costs}
    )
    assert list(tmp_path.iterdir()) == []


@with_servers
def test_mongodb_is_measured_beside_a_bare_loop(tmp_path: Path) -> None:
    require(private_mongo.KINDS[private_mongo.best_kind()])
    done = run(
        "benchmarks",
        "--quick",
        "--json",
        "--url",
        "mongodb://private",
        "--only",
        "send_one",
        "drain",
        "--folder",
        str(tmp_path),
    )

    report: dict[str, Any] = json.loads(done.stdout)
    assert report["failures"] == [], done.stderr
    figures = report["figures"]["mongodb://private"]
    assert figures.keys() == {
        "send",
        "pymongo send",
        "drain",
        "pymongo drain",
        "cpu per task",
        "commits",
    }
    assert all(value > 0 for value in figures.values())


def test_the_table_names_each_figure(tmp_path: Path) -> None:
    done = run(
        "benchmarks",
        "--quick",
        "--url",
        "memory://",
        "--only",
        "drain",
        "latency",
        "--folder",
        str(tmp_path),
    )

    assert done.returncode == 0, done.stderr
    assert "run 500 no-op tasks, one process" in done.stdout
    assert "send to result, idle worker, median" in done.stdout


@with_servers
def test_messages_in_rabbitmq_are_measured_beside_bare_pika(tmp_path: Path) -> None:
    require(RabbitMQServer)
    require(RedisServer)
    url = "amqp://private+redis://private"

    done = run(
        "benchmarks",
        "--quick",
        "--json",
        "--url",
        url,
        "--only",
        "publish",
        "drain",
        "--folder",
        str(tmp_path),
    )

    report: dict[str, Any] = json.loads(done.stdout)
    assert report["failures"] == [], done.stderr
    figures = report["figures"][url]
    assert figures.keys() == {"publish", "raw publish", "drain", "cpu per task", "commits"}
    assert all(value > 0 for value in figures.values())


@with_servers
def test_the_prototype_is_measured_in_the_same_rounds_with_its_scripts() -> None:
    require(RedisServer)

    done = run("benchmarks", "ceiling", "--quick", "--json")

    report: dict[str, Any] = json.loads(done.stdout)
    assert report["failures"] == [], done.stderr
    assert report["rounds"]["rounds"].keys() == {"machinery", "ceiling"}
    for rounds in report["rounds"]["rounds"].values():
        # So few tasks may take less CPU than the kernel counts.
        assert all(rounds[0][figure] > 0 for figure in ceiling.WANTED if figure != "cpu")
    for system in ("machinery", "ceiling"):
        names = {name for step, name, *_ in report["calls"][system] if step == "one"}
        assert any(name.endswith(".lua") for name in names)
    assert report["large"].keys() == {
        *("huge chord", "longest script"),
        *("burst", "fresh", "fresh most"),
    }


def test_the_ratio_to_the_prototype_is_of_the_same_round() -> None:
    results = {
        "machinery": {1: {"drain": 300.0, "cpu": 20.0}, 2: {"drain": 200.0}},
        "ceiling": {1: {"drain": 600.0, "cpu": 10.0}, 2: {"drain": 200.0}, 3: {"drain": 1.0}},
    }

    lines = "\n".join(ceiling.wanted_table(results))

    assert ceiling.ratios(results, "drain") == [0.5, 1.0]
    assert "| 250 | 200 | 0.75 (0.50 to 1.00) | ≥ 0.6 |" in lines
    assert "| 20.0 | 10.0 | 2.00 (2.00 to 2.00) | ≤ 1.6 **missed** |" in lines


@with_servers
def test_growth_is_measured_at_each_point() -> None:
    require(RedisServer)
    names = ("queues", "workers")  # of five; the others go the same way

    done = run("benchmarks", "growth", "--only", *names, "--quick", "--rounds", "1", "--json")

    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report.keys() == set(names)
    for name in names:
        axis = growth.AXES[name]
        assert [int(point) for point in report[name]] == list(axis.quick)
        for [figures] in report[name].values():
            assert figures.keys() == set(axis.figures)
            assert all(value > 0 for value in figures.values())


@with_servers
def test_bloat_is_measured_at_each_point() -> None:
    require(PostgreSQLServer)

    done = run("benchmarks", "bloat", "--quick", "--json")

    assert done.returncode == 0, done.stderr
    report: list[dict[str, float]] = json.loads(done.stdout)
    assert len(report) == bloat.POINTS
    assert report[-1]["tasks"] == bloat.QUICK
    assert all(one["items bytes"] > 0 for one in report)


def test_growth_is_that_from_the_first_point_in_the_same_round() -> None:
    axis = growth.Axis(growth.threads, (1, 10), (1, 2), ("send",))
    found = {1: [{"send": 10.0}, {"send": 20.0}], 10: [{"send": 20.0}, {"send": 22.0}]}

    [_head, _line, row] = growth.rows(axis, found)

    assert row == "| send, sender | 15.0 | 21.0 | 1.55 (1.10 to 2.00) **not flat** |"


def test_the_profile_charges_each_role_of_a_worker() -> None:
    done = run("benchmarks.profile", "--url", "memory://", "--tasks", "1000")

    assert done.returncode == 0, done.stderr
    assert "executors:" in done.stdout and "settler:" in done.stdout


def test_two_revisions_are_compared_and_the_worktree_is_removed(
    tmp_path: Path,
) -> None:
    # A repository of its own, so that the one this runs in is not touched.
    repository = tmp_path / "repository"
    repository.mkdir()
    for name in ("machinery_py", "benchmarks", "tests"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(repository / name)], check=True)
    git = ["git", "-C", str(repository), "-c", "user.name=t", "-c", "user.email=t@example.com"]
    try:
        subprocess.run([*git, "init", "-q"], check=True)
    except OSError:
        pytest.skip("no git here")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "Stand still"], check=True)

    done = run(
        "benchmarks",
        "--quick",
        "--url",
        "memory://",
        "--only",
        "send_one",
        "--against",
        "HEAD",
        "--rounds",
        "2",
        "--json",
        "--folder",
        str(tmp_path),
        cwd=repository,
    )

    assert done.returncode == 0, done.stderr
    [figure] = json.loads(done.stdout)["figures"]
    assert len(figure["pairs"]) == 2
    assert all(here > 0 and there > 0 for here, there in figure["pairs"])
    worktrees = subprocess.run(
        [*git, "worktree", "list"], capture_output=True, text=True, check=True
    ).stdout
    assert len(worktrees.splitlines()) == 1
