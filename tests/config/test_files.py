"""Where a Config is read from: YAML, TOML and the environment."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from machinery_py.config.config import OPTIONS, Config
from machinery_py.config.sections import AMQPConfig, RedisConfig
from machinery_py.errors import ConfigError

YAML = """
# as Go's example
broker: 'memory://go'
lock: 'memory://go'
default_queue: machinery_tasks
result_backend: 'memory://go'
results_expire_in: 3600000
no_unix_signals: yes
amqp:
  binding_key: machinery_task
  exchange: machinery_exchange
  exchange_type: direct
  prefetch_count: 7
  queue_declare_args:
    x-max-priority: 10
redis:
  max_idle: 3
  max_idle_timeout: 240
mongodb:
  database: shop
"""

TOML = """
broker = "memory://go"
lock = "memory://go"
default_queue = "machinery_tasks"
result_backend = "memory://go"
results_expire_in = 3600000
no_unix_signals = true

[amqp]
binding_key = "machinery_task"
exchange = "machinery_exchange"
exchange_type = "direct"
prefetch_count = 7
queue_declare_args = { x-max-priority = 10 }

[redis]
max_idle = 3
max_idle_timeout = 240

[mongodb]
database = "shop"
"""


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, "utf-8")
    return path


def test_yaml_and_toml_have_the_keys_of_go(tmp_path: Path) -> None:
    yaml, toml = written(tmp_path, "config.yml", YAML), written(tmp_path, "config.toml", TOML)

    config = Config.from_yaml(yaml)

    assert config == Config.from_toml(toml)
    assert (config.broker, config.results_expire_in, config.no_unix_signals) == (
        "memory://go",
        3600000,
        True,
    )
    assert (config.amqp.prefetch_count, config.amqp.queue_declare_args) == (
        7,
        {"x-max-priority": 10},
    )
    assert config.mongodb.database == "shop"
    assert config.sources["broker"] == config.sources["redis.max_idle"] == str(yaml)
    assert config.sources["redis.wait"] == "default"


def test_a_file_is_found_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, "config.yml", "lease: 5")
    written(tmp_path, "config.toml", "lease = 6")
    monkeypatch.chdir(tmp_path)

    assert Config.from_yaml("config.yml").sources["lease"] == "config.yml"
    assert Config.from_toml("config.toml").lease == 6.0


def test_the_whole_file_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, "config.yml", "# a long comment\n" * 1000 + "default_queue: mail\n")

    assert Config.from_yaml(path).default_queue == "mail"


@pytest.mark.parametrize("text", ["", "# nothing\n", "redis:\namqp:\nlock:\n", "\ufefflease: 10"])
def test_a_file_without_values_is_the_defaults(tmp_path: Path, text: str) -> None:
    assert Config.from_yaml(written(tmp_path, "config.yml", text)) == Config()


def test_an_error_in_a_file_names_the_file_and_every_key(tmp_path: Path) -> None:
    path = written(
        tmp_path, "config.toml", 'brokr = "memory://"\nlease = "soon"\n[redis]\nmax_idl = 3\n'
    )

    with pytest.raises(ConfigError) as caught:
        Config.from_toml(path)

    assert str(caught.value).splitlines() == [
        "3 settings cannot be used:",
        f"  {path}: brokr: unknown key; did you mean 'broker'?",
        f"  {path}: redis.max_idl: unknown key; did you mean 'redis.max_idle'?",
        f"  {path}: lease: found 'soon' (expected a number, 0.001 to 3153600000 s)",
    ]


def test_yaml_without_pyyaml_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "config.yml", YAML)
    monkeypatch.setitem(sys.modules, "yaml", None)

    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(path)

    assert str(caught.value) == "Config.from_yaml needs PyYAML: pip install 'machinery_py[yaml]'"


def test_missing_yaml_file_is_reported_without_pyyaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)

    with pytest.raises(ConfigError, match=r"config file '.*none\.yml': no such file or directory"):
        Config.from_yaml(tmp_path / "none.yml")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "broker: redis://:secret@h\n  lock: x",
            "not valid YAML at line 2, column 7 (mapping values are not allowed here)",
        ),
        ("broker: *secret", "not valid YAML at line 1, column 9 (found undefined alias)"),
        ("broker: \x07secret", "not valid YAML"),
        ("lease: 2020-99-99", "not valid YAML"),
        ("- broker", "found a list (expected 'key: value' lines)"),
        ("broker", "found a text (expected 'key: value' lines)"),
    ],
)
def test_a_file_that_is_no_yaml_is_refused_and_not_quoted(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = written(tmp_path, "config.yml", text)

    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(path)

    assert str(caught.value) == f"config file {str(path)!r}: {problem}"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.toml': no such file or directory"):
        Config.from_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is a directory"):
        Config.from_yaml(tmp_path)
    with pytest.raises(ConfigError, match="not valid TOML .*at line 1"):
        Config.from_toml(written(tmp_path, "bad.toml", "broker: x"))
    (tmp_path / "latin.yml").write_bytes(b"broker: \xe9")
    with pytest.raises(ConfigError, match="latin.yml': not UTF-8 at byte 8"):
        Config.from_yaml(tmp_path / "latin.yml")


# Environment


def test_the_environment_has_the_names_of_go_after_the_prefix() -> None:
    environ = {
        "BROKER": "memory://", "DEFAULT_QUEUE": "mail", "RESULTS_EXPIRE_IN": "60",
        "NO_UNIX_SIGNALS": "true", "REDIS_MAX_IDLE": "7", "REDIS_IDLE_TIMEOUT": "100",
        "AMQP_EXCHANGE": "shop", "AMQP_AUTO_DELETE": "0",
        "AMQP_QUEUE_DECLARE_ARGS": "x-max-priority:10,x-queue-type:quorum,durable:true",
    }  # fmt: skip
    expected = Config(
        broker="memory://",
        default_queue="mail",
        results_expire_in=60,
        no_unix_signals=True,
        redis=RedisConfig(max_idle=7, max_idle_timeout=100),
        amqp=AMQPConfig(
            exchange="shop",
            queue_declare_args={"x-max-priority": 10, "x-queue-type": "quorum", "durable": True},
        ),
    )

    assert Config.from_env(prefix="", environ=environ) == expected
    assert (
        Config.from_env(environ={f"MACHINERY_{name}": value for name, value in environ.items()})
        == expected
    )
    assert (
        Config.from_env("SHOP_", environ={f"SHOP_{name}": value for name, value in environ.items()})
        == expected
    )


def test_the_environment_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MACHINERY_DEFAULT_QUEUE", "mail")
    monkeypatch.setenv("DEFAULT_QUEUE", "post")

    assert Config.from_env().default_queue == "mail"
    assert Config.from_env().sources["default_queue"] == "MACHINERY_DEFAULT_QUEUE"
    assert Config.from_env(prefix="").default_queue == "post"


def test_a_misspelt_name_of_go_is_read_and_the_right_one_wins() -> None:
    go = {"MULTIPLE_BROKEN_SEPARATOR": ";"}

    config = Config.from_env("", environ=go)

    assert config.multiple_broker_separator == ";"
    assert config.sources["multiple_broker_separator"] == "MULTIPLE_BROKEN_SEPARATOR"
    assert (
        Config.from_env(
            "", environ=go | {"MULTIPLE_BROKER_SEPARATOR": "|"}
        ).multiple_broker_separator
        == "|"
    )


def test_without_a_prefix_only_the_names_of_go_are_read() -> None:
    environ = {"CONCURRENCY": "3", "LEASE": "1", "URL": "memory://", "MONGODB_DATABASE": "x"}

    assert Config.from_env("", environ=environ) == Config()


ALONE = [one for one in OPTIONS.values() if one.key != "stores"]  # it needs a plug-in


@pytest.mark.parametrize("opt", ALONE, ids=[one.key for one in ALONE])
def test_every_option_can_be_set_in_the_environment(opt: Any) -> None:
    text, value = {
        "str": ("memory://x", "memory://x"),
        "int": ("7", 7), "float": ("7", 7.0), "bool": ("on", True),
    }.get(opt.kind, ("a:b", {"a": "b"}))  # fmt: skip
    if opt.key == "require_server":
        text, value = "no", False
    if opt.key == "queues":
        text = value = "high:6,low:1"
    if opt.key == "broker_connection_backoff":
        text, value = "linear", "linear"
    if opt.key == "queue_limits":
        text, value = "mail:10,bulk:5", {"mail": 10, "bulk": 5}
    if opt.key == "pool":
        text, value = "process", "process"
    if opt.key == "log_level":
        text, value = "error", "error"

    config = Config.from_env(environ={f"MACHINERY_{opt.variable}": text})

    assert dict(config.values())[opt.key] == value
    assert config.sources[opt.key] == f"MACHINERY_{opt.variable}"


def test_one_url_is_broker_backend_and_lock() -> None:
    config = Config.from_env(
        environ={"MACHINERY_URL": " memory://a\n", "MACHINERY_BROKER": "memory://b"}
    )

    assert (config.broker, config.result_backend, config.lock) == (
        "memory://b",
        "memory://a",
        "memory://a",
    )
    assert (config.sources["broker"], config.sources["lock"]) == (
        "MACHINERY_BROKER",
        "MACHINERY_URL",
    )


def test_an_empty_variable_counts_as_not_set() -> None:
    assert (
        Config.from_env(environ={"MACHINERY_URL": "", "MACHINERY_LEASE": " "}).sources
        == Config().sources
    )


def test_a_wrong_variable_is_named_with_what_is_expected() -> None:
    environ = {
        "MACHINERY_LEASE": "soon",
        "MACHINERY_REDIS_WAIT": "maybe",
        "MACHINERY_AMQP_QUEUE_BINDING_ARGS": "x",
        "MACHINERY_URL": "null",
    }

    with pytest.raises(ConfigError) as caught:
        Config.from_env(environ=environ)

    assert str(caught.value).splitlines() == [
        "4 settings cannot be used:",
        "  MACHINERY_LEASE: lease: found 'soon' (expected a number, 0.001 to 3153600000 s)",
        "  MACHINERY_REDIS_WAIT: redis.wait: found 'maybe' (expected true or false)",
        "  MACHINERY_AMQP_QUEUE_BINDING_ARGS: amqp.queue_binding_args: found 'x' "
        "(expected a mapping of names to values)",
        "  MACHINERY_URL: broker URL 'null': 'null' works as result backend only "
        "(as broker: amqp, amqps, eager, memory, mongodb, mongodb+srv, "
        "postgres, postgresql, redis, redis+socket, rediss, sqlite)",
    ]


def test_a_url_that_is_wrong_for_all_three_is_told_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_env(environ={"MACHINERY_URL": "kafka://u:secret@h"})

    assert str(caught.value).count("unknown scheme") == 1
    assert "secret" not in str(caught.value)


def test_an_unknown_variable_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="machinery_py.config.config"):
        config = Config.from_env(environ={"MACHINERY_BROKR": "redis://:secret@h"})

    assert config == Config()
    assert caplog.record_tuples == [
        (
            "machinery_py.config.config",
            logging.WARNING,
            "environment variable 'MACHINERY_BROKR' is unknown and ignored; "
            "did you mean 'MACHINERY_BROKER'?",
        )
    ]


def test_the_variables_of_the_other_parts_are_known(caplog: pytest.LogCaptureFixture) -> None:
    others = (
        "APP",
        "CONFIG",
        "URL",
        "REQUIRE_SERVER",
        "TEST_MONGODB_URL",
        "MULTIPLE_BROKEN_SEPARATOR",
    )

    Config.from_env(
        environ={f"MACHINERY_{name}": "" for name in others}
        | {"MACHINERY_TEST_X": "1", "MACHINERY_APP": "a"}
    )
    Config.from_env("", environ={"BROKR": "x"})
    Config.from_env("SHOP_", environ={"SHOP_PRICES": "x"})

    assert not caplog.records
