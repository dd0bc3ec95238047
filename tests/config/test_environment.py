from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from machinery_py.config.config import Config, resolve
from machinery_py.config.sections import RedisConfig
from machinery_py.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(
        'broker = "memory://file"\nresult_backend = "memory://file-results"\nlock = "memory://file-locks"\n'
        'default_queue = "file"\nconcurrency = 3\n\n[redis]\nmax_idle = 7\nwait = true\n',
        "utf-8",
    )
    return path


def stores(config: Config) -> tuple[str, str, str]:
    return config.broker, config.result_backend, config.lock


def chosen(config: Config) -> dict[str, str]:
    return {key: source for key, source in config.sources.items() if source != "default"}


# The order


def test_nothing_said_is_the_defaults() -> None:
    config = resolve(environ={})

    assert config == Config()
    assert set(config.sources.values()) == {"default"}


def test_the_environment_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MACHINERY_DEFAULT_QUEUE", "mail")

    assert resolve().default_queue == "mail"


def test_option_comes_from_the_first_source_that_has_it(file: Path) -> None:
    environ = {
        "MACHINERY_CONFIG": str(file),
        "MACHINERY_DEFAULT_QUEUE": "env",
        "MACHINERY_REDIS_MAX_IDLE": "8",
    }

    config = resolve(broker="memory://call", environ=environ)

    assert stores(config) == ("memory://call", "memory://file-results", "memory://file-locks")
    assert (config.default_queue, config.concurrency, config.lease) == ("env", 3, 10.0)
    assert config.redis == RedisConfig(max_idle=8, wait=True)
    assert chosen(config) == {
        "broker": "argument",
        "result_backend": str(file),
        "lock": str(file),
        "default_queue": "MACHINERY_DEFAULT_QUEUE",
        "concurrency": str(file),
        "redis.max_idle": "MACHINERY_REDIS_MAX_IDLE",
        "redis.wait": str(file),
    }


@pytest.mark.parametrize("name", ["c.yml", "c.yaml", "c.YML", "c.toml"])
def test_the_file_is_read_by_its_ending(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("lease = 5" if name.endswith("toml") else "lease: 5", "utf-8")

    assert resolve(environ={"MACHINERY_CONFIG": str(path)}).lease == 5.0


def test_a_file_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"config file 'a.ini': unknown ending '.ini' \(known: .toml, .yaml, .yml\)",
    ):
        resolve(environ={"MACHINERY_CONFIG": "a.ini"})
    with pytest.raises(ConfigError, match="no such file"):
        resolve(environ={"MACHINERY_CONFIG": str(tmp_path / "none.yml")})


def test_an_empty_variable_for_the_file_is_none() -> None:
    assert resolve(environ={"MACHINERY_CONFIG": " "}) == Config()


# URLs


def test_url_in_the_call_is_for_all_and_beats_the_environment() -> None:
    environ = {"MACHINERY_URL": "memory://env", "MACHINERY_RESULT_BACKEND": "memory://env-results"}

    config = resolve("memory://call", environ=environ)

    assert stores(config) == ("memory://call",) * 3
    assert chosen(config) == dict.fromkeys(("broker", "result_backend", "lock"), "argument")


def test_a_url_for_one_thing_beats_the_url_for_all() -> None:
    config = resolve("memory://all", broker="memory://b", result_backend="null", environ={})

    assert stores(config) == ("memory://b", "null", "memory://all")


def test_an_empty_url_in_the_call_means_where_the_broker_is() -> None:
    config = resolve(
        broker="memory://b", result_backend="", environ={"MACHINERY_RESULT_BACKEND": "memory://env"}
    )

    assert config.result_backend == ""
    assert config.backend_url == "memory://b"
    assert config.sources["result_backend"] == "argument"


def test_one_url_in_the_environment_beats_the_file_for_all_three(file: Path) -> None:
    environ = {"MACHINERY_CONFIG": str(file), "MACHINERY_URL": "memory://env"}

    config = resolve(environ=environ)

    assert stores(config) == ("memory://env",) * 3
    assert chosen(config)["lock"] == "MACHINERY_URL"
    assert config.default_queue == "file"


def test_the_variable_for_one_thing_beats_the_variable_for_all(file: Path) -> None:
    environ = {
        "MACHINERY_CONFIG": str(file),
        "MACHINERY_URL": "memory://env",
        "MACHINERY_BROKER": "memory://b",
    }

    assert stores(resolve(environ=environ)) == ("memory://b", "memory://env", "memory://env")


def test_url_is_used_for_the_roles_of_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("machinery_py.config.urls.StoreUrl.parse", lambda url, role: None)

    config = resolve("amqp://h", environ={"MACHINERY_LOCK": "memory://locks"})

    assert stores(config) == ("amqp://h", "amqp://h", "memory://locks")
    assert resolve(environ={"MACHINERY_URL": "amqps://h"}).lock == ""


@pytest.mark.parametrize(
    "url", ["", "reddis://host", "kafka://u:secret@host", "null", "sqlite://:memory:"]
)
def test_a_url_that_cannot_be_used_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^(broker|result backend) URL ") as caught:
        resolve(url, environ={})

    assert "secret" not in str(caught.value)


# A Config in the call


def test_explicit_config_beats_environment_and_file(file: Path) -> None:
    environ = {
        "MACHINERY_CONFIG": str(file),
        "MACHINERY_BROKER": "memory://env",
        "MACHINERY_LEASE": "5",
        "MACHINERY_REDIS_WAIT": "true",
    }
    config = Config(
        broker="sqlite:///machinery.db", default_queue="mail", redis=RedisConfig(max_idle=1)
    )

    resolved = resolve(config=config, environ=environ)

    assert resolved.broker == "sqlite:///machinery.db"
    assert resolved.default_queue == "mail"
    assert resolved.redis == RedisConfig(max_idle=1)


def test_unset_config_comes_from_environment_and_file(file: Path) -> None:
    environ = {"MACHINERY_CONFIG": str(file), "MACHINERY_LEASE": "5"}

    resolved = resolve(config=Config(broker="memory://a"), environ=environ)

    assert (resolved.lease, resolved.concurrency) == (5.0, 3)
    assert resolved.sources["lease"] == "MACHINERY_LEASE"


def test_config_without_other_sources_is_unchanged(file: Path) -> None:
    config = Config.from_toml(file)

    resolved = resolve(config=config, environ={})

    assert resolved == config
    assert resolved.sources == config.sources


def test_the_arguments_of_the_call_beat_its_config() -> None:
    config = Config(broker="memory://a", lock="memory://a")

    assert stores(resolve("memory://b", config=config, lock="memory://c", environ={})) == (
        "memory://b",
        "memory://b",
        "memory://c",
    )


# Errors


def test_errors_of_all_places_are_told_together(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('brokr = "x"\nlease = "soon"\nconcurrency = -1\n', "utf-8")
    environ = {"MACHINERY_CONFIG": str(path), "MACHINERY_LEASE": "later"}

    with pytest.raises(ConfigError) as caught:
        resolve("reddis://host", environ=environ)

    assert sorted(caught.value.args[0].splitlines()) == sorted(
        [
            "4 settings cannot be used:",
            f"  {path}: brokr: unknown key; did you mean 'broker'?",
            f"  {path}: concurrency: found -1 (expected a whole number, 0 or more)",
            "  MACHINERY_LEASE: lease: found 'later' (expected a number, 0.001 to 3153600000 s)",
            "  broker URL 'reddis://host': unknown scheme 'reddis' "
            "(known: amqp, amqps, eager, memory, mongodb, "
            "mongodb+srv, postgres, postgresql, redis, redis+socket, rediss, sqlite; "
            "did you mean 'redis'?)",
        ]
    )


@pytest.mark.parametrize("url", ["sqlite:///a.db", "memory://", "eager"])
def test_a_required_server_refuses_an_embedded_store(url: str) -> None:
    required = {"MACHINERY_REQUIRE_SERVER": "1"}

    for given, config, environ in (
        (None, None, required | {"MACHINERY_URL": url}),
        (url, None, required),
        (None, Config(broker=url), required),
    ):
        with pytest.raises(
            ConfigError, match="MACHINERY_REQUIRE_SERVER: a server is required, .*set MACHINERY_URL"
        ):
            resolve(given, config=config, environ=environ)


def test_a_required_server_refuses_the_default() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(environ={"MACHINERY_REQUIRE_SERVER": "1"})

    assert str(caught.value) == (
        "MACHINERY_REQUIRE_SERVER: a server is required, "
        "but 'sqlite:///machinery.db' is an embedded store "
        "(set MACHINERY_URL to the URL of a server)"
    )


def test_a_required_server_accepts_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("machinery_py.config.urls.StoreUrl.parse", lambda url, role: None)
    required = {"MACHINERY_REQUIRE_SERVER": "1"}

    assert resolve("redis://h", environ=required).require_server
    assert resolve("redis://h", result_backend="null", environ=required).require_server
    with pytest.raises(ConfigError, match="'memory://' is an embedded store"):
        resolve("redis://h", result_backend="memory://", environ=required)


def test_a_required_server_can_be_switched_off() -> None:
    assert resolve(environ={"MACHINERY_REQUIRE_SERVER": "0"}) == Config()
    assert (
        resolve(config=Config(require_server=False), environ={"MACHINERY_REQUIRE_SERVER": "1"})
        == Config()
    )


def test_importing_the_package_reads_no_settings() -> None:
    program = "import machinery_py, sys; import machinery_py.config.config"
    environ = {
        "MACHINERY_CONFIG": "/none.yml",
        "MACHINERY_URL": "reddis://",
        "MACHINERY_REQUIRE_SERVER": "1",
    }

    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
