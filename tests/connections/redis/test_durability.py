"""Settings checked at the first connection, on a Redis that would lose what it is given."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from machinery_py import Config, Server
from machinery_py.connections.durability import Concern
from machinery_py.connections.redis.client import RedisDriver
from machinery_py.connections.redis.durability import concerns, read_info, version_of
from machinery_py.errors import StoreUnusable
from machinery_py.tasks.signature import Signature
from machinery_py.testing.waiting import together
from tests.support.servers import RedisServer, require

LIMITED = "on >sesame ~* &* +@all -config"
MUTE = "on >sesame ~* &* +@all -config -info"


@pytest.fixture(scope="module")
def durable() -> Iterator[RedisServer]:
    """A server that keeps what it is given; a test that changes that puts it back."""
    require(RedisServer)
    with RedisServer(appendonly=True) as server:
        server.cli("ACL", "SETUSER", "limited", *LIMITED.split())
        server.cli("ACL", "SETUSER", "mute", *MUTE.split())
        yield server


@pytest.fixture
def configured(durable: RedisServer) -> Iterator[RedisServer]:
    yield durable
    good = {
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory": "0",
        "maxmemory-policy": "noeviction",
    }
    for name, value in good.items():
        durable.cli("CONFIG", "SET", name, value)
    durable.cli("REPLICAOF", "NO", "ONE")


def told(url: str, caplog: pytest.LogCaptureFixture, *, level: int = logging.WARNING) -> list[str]:
    """What is logged when a Server sends its first task."""
    caplog.clear()
    caplog.set_level(logging.INFO, "machinery_py.connections.redis.client")
    server = Server(url)
    try:
        server.send_task(Signature(name="nobody_runs_this"))
    except Exception:  # a replica stores nothing
        pass
    server.close()
    return [
        record.message
        for record in caplog.records
        if record.levelno >= level and record.name.endswith("connections.redis.client")
    ]


def as_user(server: RedisServer, name: str) -> str:
    return server.url.replace("//", f"//{name}:sesame@")


SETTINGS: Mapping[str, tuple[Mapping[str, str], str]] = {
    "nothing": (
        {"appendonly": "no"},
        "it makes no snapshots either, and a restart loses everything (set appendonly yes)",
    ),
    "snapshots": (
        {"appendonly": "no", "save": "3600 1"},
        "a restart loses what came since its last snapshot (save 3600 1) (set appendonly yes)",
    ),
    "no fsync": (
        {"appendfsync": "no"},
        "appendfsync is no: a power cut loses what came in the last half minute",
    ),
    "evicting": (
        {"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"},
        "maxmemory-policy is allkeys-lru: "
        "tasks, states and locks are thrown away when its 100.00M of memory are",
    ),
    "evicting later": (
        {"maxmemory-policy": "volatile-ttl"},
        "maxmemory-policy is volatile-ttl: "
        "states, results and locks are thrown away when maxmemory is ever set",
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_server_that_would_lose_tasks_is_warned_of_or_refused(
    name: str, configured: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    settings, text = SETTINGS[name]
    for key, value in settings.items():
        configured.cli("CONFIG", "SET", key, value)

    [warning] = told(configured.url, caplog)
    assert f"Redis at 127.0.0.1:{configured.port}: " in warning
    assert text in warning

    strict = Server(Config(broker=configured.url, strict_durability=True))
    for _ in range(2):
        with pytest.raises(StoreUnusable, match="refused by strict_durability") as caught:
            strict.send_task(Signature(name="nobody_runs_this"))
        assert text in str(caught.value)
    [concern] = Server(configured.url).broker.concerns()
    assert warning.endswith(f"{configured.port}: {concern.text}")
    strict.close()


def test_a_server_that_keeps_everything_is_not_talked_about(
    durable: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    assert told(durable.url, caplog, level=logging.INFO) == []
    strict = Server(Config(broker=durable.url, strict_durability=True))

    strict.send_task(Signature(name="nobody_runs_this"))

    assert strict.broker.concerns() == strict.backend.concerns() == []
    strict.close()


def test_settings_are_asked_and_warned_of_once_for_all_threads(
    configured: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    configured.cli("CONFIG", "SET", "appendonly", "no")
    driver = RedisDriver(configured.url)

    together(4, lambda _: [driver.ask(b"PING", doing="asking") for _ in range(20)])

    assert len([record for record in caplog.records if "append-only" in record.message]) == 1
    configured.cli("CONFIG", "RESETSTAT")
    assert driver.ask(b"PING", doing="asking") == b"PONG"
    driver.open().close()
    assert "cmdstat_info" not in str(configured.cli("INFO", "commandstats"))
    driver.close()


def test_a_replica_is_named_with_its_master(
    configured: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    configured.cli("REPLICAOF", "127.0.0.1", "1")

    driver = RedisDriver(configured.url)
    assert driver.ask(b"PING", doing="asking") == b"PONG"
    [warning] = [
        record.message
        for record in caplog.records
        if record.name.endswith("connections.redis.client")
    ]
    assert (
        "it is a read-only replica of 127.0.0.1:1: "
        "no task can be stored or taken here (name the master" in warning
    )
    with pytest.raises(StoreUnusable, match="read-only replica of 127.0.0.1:1"):
        RedisDriver(configured.url, strict=True).ask(b"PING", doing="asking")
    driver.close()


def test_user_without_config_get_is_told_the_facts_of_info(
    configured: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    assert told(as_user(configured, "limited"), caplog, level=logging.INFO) == []
    configured.cli("CONFIG", "SET", "appendonly", "no")
    configured.cli("CONFIG", "SET", "maxmemory-policy", "allkeys-random")

    eviction, persistence = told(as_user(configured, "limited"), caplog)

    assert "maxmemory-policy is allkeys-random" in eviction
    assert "or everything (whether it makes any, it does not tell)" in persistence


def test_user_without_info_works_and_durability_is_unknown(
    durable: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = as_user(durable, "mute")

    assert told(url, caplog) == []
    [note] = told(url, caplog, level=logging.INFO)
    assert "does not tell whether it keeps what it stores (give this user the right +info)" in note
    server = Server(url)
    answer = server.register_task("answer", lambda: 42)
    with server.new_worker(concurrency=1):
        assert answer.send().get(timeout=30.0) == 42
    assert [concern.is_certain for concern in server.broker.concerns()] == [False]
    server.close()
    with pytest.raises(StoreUnusable, match="does not tell"):
        Server(Config(broker=url, strict_durability=True)).send_task(Signature(name="a"))


def test_reply_of_info_is_parsed_for_every_kind_of_server() -> None:
    assert version_of({"redis_version": "6.0.16"}) == (6, 0)
    assert version_of({"redis_version": "255.255.255"}) == (255, 255)
    assert version_of({"redis_version": "?"}) is version_of({}) is None
    assert read_info("# Server\r\nredis_version:7.0.1\r\n\r\nnonsense\r\n") == {
        "redis_version": "7.0.1"
    }
    good = {"role": "master", "maxmemory_policy": "noeviction", "aof_enabled": "1"}
    assert concerns(good, None) == []
    assert [one.is_certain for one in concerns({"role": "master"}, {})] == [False, False]
    [one] = concerns(
        {**good, "role": "slave", "slave_read_only": "0", "master_host": "m", "master_port": "7"},
        {},
    )
    assert one == Concern(
        "it is a replica of m:7 that takes writes, and forgets them when it is synchronised again "
        "(name the master in the URL, or its sentinels and master_name)"
    )


def test_a_server_that_is_too_old_is_refused(
    durable: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("machinery_py.connections.redis.client.OLDEST", (99, 0))

    with pytest.raises(StoreUnusable, match=r"is version .* \(needed: 99.0 or newer\)"):
        Server(durable.url).send_task(Signature(name="a"))


def test_doctor_warns_of_settings_that_lose_tasks(configured: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "letters.py").write_text(
        "import os\nfrom machinery_py import Server\nserver = Server(os.environ['WHERE'])\n"
    )

    def doctor(url: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "machinery_py", "doctor", "letters"],
            cwd=tmp_path,
            text=True,
            check=False,
            capture_output=True,
            env={**os.environ, "WHERE": url},
            timeout=60.0,
        )
        return done.returncode, done.stdout

    configured.cli("FLUSHALL")  # tasks that nobody runs are WRONG, too
    assert "WRONG" not in doctor(configured.url)[1]
    assert (
        "note   broker    it does not tell whether it keeps what it stores"
        in doctor(as_user(configured, "mute"))[1]
    )
    configured.cli("CONFIG", "SET", "appendonly", "no")
    code, text = doctor(configured.url)
    assert code == 1, text
    assert "WRONG  broker    it has no append-only file: it makes no snapshots either" in text
