"""The comparison with other task queues works, on few tasks.

Speed is not tested here, and nothing is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import driving, environments, report
from benchmarks.peers.systems import AMQP_SYSTEMS, BY_NAME, ON, OURS, POSTGRESQL_SYSTEMS, SYSTEMS
from tests.support.private_postgres import PostgreSQLServer
from tests.support.servers import RabbitMQServer, RedisServer, require

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "benchmarks" / "peers"
HANG = 120.0  # seconds
OTHERS = [
    (broker, system.name)
    for broker in ("redis", "postgresql")
    for system in ON[broker]
    if not system.is_ours
]


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", "--no-install", *arguments],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )


def measured(*names: str, rounds: int = 1, broker: str = "redis") -> dict[str, Any]:
    require(PostgreSQLServer if broker == "postgresql" else RedisServer)
    done = run(
        "--broker",
        broker,
        "--peers",
        *names,
        "--tasks",
        "300",
        "--rounds",
        str(rounds),
        "--calls",
        "10",
        "--json",
    )
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["failures"] == []
    assert found["skipped"] == []
    return found


long = pytest.mark.skipif(
    not os.environ.get("MACHINERY_TEST_FULL"), reason="a minute of two processors: `make chaos`"
)


def check_figures(
    rounds: Sequence[Mapping[str, float]],
    *,
    bulk: bool,
    broker: str = "redis",
    workflows: bool = False,
) -> None:
    redis = {"commands", "reads", "redis cpu", "scripts"}
    redis |= {"send redis cpu", "send scripts", "bulk redis cpu"}
    postgresql = {"postgresql cpu", "send postgresql cpu", "bulk postgresql cpu"}
    missing = redis if broker == "postgresql" else postgresql
    missing |= {"bytes"} if broker == "amqp" else {"rabbitmq cpu"}
    missing |= set() if bulk else {"bulk", "bulk redis cpu", "bulk postgresql cpu"}
    missing |= set() if workflows else {"chain", "chord"}
    expected = {figure.name for figure in report.FIGURES} - missing
    for figures in rounds:
        assert figures.keys() == expected | {"round"}
        assert all(
            figures[name] > 0 for name in ("send", "drain", "drain by two", "latency", "p99")
        )


def test_machinery_is_measured_beside_bare_redis_in_every_round() -> None:
    found = measured("raw", OURS, rounds=2)

    assert found["rounds"].keys() == {"raw", OURS}
    for name, rounds in found["rounds"].items():
        assert [figures["round"] for figures in rounds] == [1, 2]
        check_figures(rounds, bulk=True, workflows=name == OURS)
    assert len(found["ratios"]["raw"]["drain"]) == 2


@long
def test_machinery_on_rabbitmq_is_measured_beside_bare_pika() -> None:
    require(RabbitMQServer)

    found = measured("raw", OURS, broker="amqp")

    assert found["rounds"].keys() == {"raw", OURS}
    for rounds in found["rounds"].values():
        check_figures(rounds, bulk=True, broker="amqp")
    assert "RabbitMQ" in found["facts"]["servers"]


@long
def test_task_processes_are_measured() -> None:
    found = measured(OURS, broker="processes")

    check_figures(found["rounds"][OURS], bulk=True)


@long
def test_machinery_on_postgresql_is_measured() -> None:
    found = measured(OURS, broker="postgresql")

    check_figures(found["rounds"][OURS], bulk=True, broker="postgresql", workflows=True)
    assert "PostgreSQL" in found["facts"]["servers"]


@pytest.mark.parametrize(("broker", "name"), OTHERS)
def test_other_queue_is_measured_when_its_environment_exists(broker: str, name: str) -> None:
    if not environments.is_there(BY_NAME[name]):
        pytest.skip(f"no environment for {name}: python -m benchmarks.peers --prepare")

    found = measured(name, broker=broker)

    check_figures(found["rounds"][name], bulk=BY_NAME[name].bulk, broker=broker)


@pytest.mark.parametrize("broker", ["redis", "postgresql"])
def test_queue_without_an_environment_is_left_out(broker: str, tmp_path: Path) -> None:
    others = [name for where, name in OTHERS if where == broker]

    done = run("--broker", broker, "--peers", *others, XDG_CACHE_HOME=str(tmp_path))

    assert done.returncode == 1
    assert all(f"{name}: no environment at {tmp_path}" in done.stderr for name in others)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "path", sorted(PEERS.rglob("*.py")), ids=lambda path: str(path.relative_to(PEERS))
)
def test_every_script_compiles(path: Path) -> None:
    compile(path.read_bytes(), str(path), "exec")


@pytest.mark.parametrize(
    "system",
    [*SYSTEMS, *AMQP_SYSTEMS, *POSTGRESQL_SYSTEMS],
    ids=lambda system: system.environment or system.folder,
)
def test_every_system_has_its_scripts_and_pins_its_versions(system: Any) -> None:
    folder = PEERS / system.folder

    assert (folder / "send.py").exists() and (folder / "drain.py").exists()
    if not system.is_ours:
        pins = (folder / system.requirements).read_text().splitlines()
        assert f"{system.name}=={system.version}" in pins
        assert all("==" in pin for pin in pins)


def test_a_wrong_result_and_a_missing_one_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ids").write_text(json.dumps(["a", "b", "c", "d"]))
    monkeypatch.setattr(sys, "argv", ["send.py", "check", "4", str(tmp_path / "ids")])

    driving.run(
        one=lambda _numbers: [],
        bulk=None,
        results=lambda _ids: [0, 5, 2],
        latency=lambda _numbers: [],
    )

    assert json.loads(capsys.readouterr().out) == {"wrong": 2, "checked": 4}


def test_ratios_say_how_many_times_better_ours_was_in_each_round() -> None:
    results = {
        OURS: {1: {"drain": 300.0, "cpu": 10.0}, 2: {"drain": 100.0}},
        "rq": {1: {"drain": 100.0, "cpu": 50.0}, 3: {"drain": 1.0}},
    }
    by_name = {figure.name: figure for figure in report.FIGURES}

    assert report.ratios(results, "rq", by_name["drain"]) == [3.0]
    assert report.ratios(results, "rq", by_name["cpu"]) == [5.0]
    assert "**3.00** (3.00 to 3.00)" in "\n".join(report.table(results))
