from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from machinery_py import Server
from machinery_py.bounds import LONGEST_PUBLISH, TOKEN_LIFE
from machinery_py.config.config import OPTIONS, Config
from machinery_py.config.sections import AMQPConfig, MongoDBConfig, RedisConfig
from machinery_py.errors import ConfigError


def refusal(values: dict[Any, object], source: str = "argument") -> str:
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping(values, source)
    return str(caught.value)


# Values


def test_the_defaults_need_no_server() -> None:
    config = Config()

    assert (config.broker, config.result_backend, config.lock) == ("sqlite:///machinery.db", "", "")
    assert (config.default_queue, config.results_expire_in, config.no_unix_signals) == (
        "machinery_tasks",
        3600,
        False,
    )
    assert (config.publish_timeout, config.shutdown_timeout, config.lease) == (5.0, 30.0, 10.0)
    assert (config.max_strikes, config.unregistered_timeout) == (3, 3600.0)
    assert (config.max_message_size, config.max_result_size) == (8 * 1024**2, 1024**2)
    assert (config.prefetch, config.concurrency) == (1024, 0)
    assert not config.require_server
    assert not config.strict_durability


def test_the_sections_have_the_defaults_of_go() -> None:
    redis, amqp = Config().redis, Config().amqp

    assert (redis.max_active, redis.max_idle_timeout, redis.wait) == (0, 240, False)
    assert (
        redis.max_idle == 64
    )  # Go's 3 would open and close connections all the time where many threads send
    assert (redis.read_timeout, redis.write_timeout, redis.connect_timeout) == (15, 15, 15)
    assert (redis.normal_tasks_poll_period, redis.delayed_tasks_poll_period) == (1000, 500)
    assert (redis.delayed_tasks_key, redis.client_name, redis.master_name) == (
        "delayed_tasks",
        "",
        "",
    )
    assert not redis.cluster_mode
    assert (amqp.exchange, amqp.exchange_type) == ("machinery_exchange", "direct")
    assert (amqp.queue_declare_args, amqp.queue_binding_args) == ({}, {})
    assert (amqp.binding_key, amqp.prefetch_count) == ("machinery_task", 3)
    assert (amqp.auto_delete, amqp.delayed_queue) == (False, "")
    assert Config().mongodb == MongoDBConfig(database="")


def test_zero_and_nothing_mean_the_default_where_they_do_in_go() -> None:
    redis = RedisConfig(
        normal_tasks_poll_period=0, delayed_tasks_poll_period=0, delayed_tasks_key=""
    )

    assert Config(results_expire_in=0).results_expire_in == 3600
    assert redis == RedisConfig()


def test_a_whole_number_is_a_length_of_time() -> None:
    lease = Config(lease=5).lease

    assert isinstance(lease, float)
    assert lease == 5.0


def test_a_config_does_not_change() -> None:
    arguments: dict[str, object] = {"x-max-priority": 10}
    config = Config(amqp=AMQPConfig(queue_declare_args=arguments))

    arguments.clear()

    assert config.amqp.queue_declare_args == {"x-max-priority": 10}
    with pytest.raises(FrozenInstanceError):
        config.lease = 5.0  # type: ignore[misc]  # what is tested


def test_replace_gives_another_config_that_is_checked_as_well() -> None:
    config = Config(default_queue="mail")

    changed = config.replace(lease=5, redis=RedisConfig(max_idle=7))

    assert changed == Config(default_queue="mail", lease=5.0, redis=RedisConfig(max_idle=7))
    assert config.lease == 10.0
    assert [changed.sources[key] for key in ("default_queue", "lease", "redis.wait")] == [
        "argument"
    ] * 3
    assert changed.sources["concurrency"] == "default"
    with pytest.raises(ConfigError, match="lease: found 0"):
        config.replace(lease=0)


def test_config_can_be_copied_hashed_and_pickled() -> None:
    config = Config(broker="memory://a", amqp=AMQPConfig(queue_declare_args={"a": 1}))

    for other in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other == config
        assert other.sources == config.sources
        assert hash(other) == hash(config)


# Where things are


def test_results_and_locks_are_where_the_broker_is() -> None:
    config = Config(broker="memory://a")

    assert config.backend_url == config.lock_url == "memory://a"


def test_results_and_locks_can_be_elsewhere() -> None:
    config = Config(broker="memory://a", result_backend="null", lock="sqlite:///locks.db")

    assert (config.backend_url, config.lock_url) == ("null", "sqlite:///locks.db")


def test_locks_are_where_the_results_are_if_the_broker_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("machinery_py.config.urls.StoreUrl.parse", lambda url, role: None)

    assert Config(broker="amqp://h", result_backend="redis://h").lock_url == "redis://h"
    assert Config(broker="amqp://h").lock_url == ""


def test_several_brokers_are_split_by_the_separator() -> None:
    config = Config(broker="sqlite:///a.db;memory://b", multiple_broker_separator=";")

    assert config.broker_urls == ("sqlite:///a.db", "memory://b")
    assert Config(broker="memory://b").broker_urls == ("memory://b",)
    with pytest.raises(ConfigError, match="broker URL 'reddis://b'"):
        config.replace(broker="sqlite:///a.db;reddis://b")


def test_no_text_of_a_config_shows_a_password() -> None:
    config = Config(broker="sqlite:///a.db?", default_queue="mail")
    object.__setattr__(config, "broker", "redis://:secret@h1|redis://:secret@h2")
    object.__setattr__(config, "multiple_broker_separator", "|")

    assert config.redacted()["broker"] == "redis://***@h1|redis://***@h2"
    assert config.redacted()["default_queue"] == "mail"
    assert config.redacted().keys() == OPTIONS.keys() == config.sources.keys()
    assert "secret" not in repr(config)


def test_repr_shows_only_options_that_differ_from_defaults() -> None:
    config = Config(default_queue="mail", redis=RedisConfig(wait=True), lease=10.0)

    assert repr(config) == "Config(default_queue='mail', redis.wait=True)"


# Sources


def test_a_chosen_value_is_told_from_an_equal_default() -> None:
    chosen = Config(broker="sqlite:///machinery.db")

    assert chosen.sources["broker"] == "argument"
    assert Config().sources["broker"] == "default"
    assert chosen == Config()


def test_the_source_of_a_mapping_is_on_each_of_its_values() -> None:
    config = Config.from_mapping(
        {"broker": "memory://", "redis": {"wait": True}, "lock": None}, "config.yml"
    )

    found = {key: source for key, source in config.sources.items() if source != "default"}
    assert found == {"broker": "config.yml", "redis.wait": "config.yml"}
    assert config == Config(broker="memory://", redis=RedisConfig(wait=True))


# Errors


def test_all_wrong_values_are_told_at_once() -> None:
    values: dict[str, Any] = {
        "concurrency": "4", "lease": 0, "max_strikes": True, "default_queue": "", "broker": "reddis://h",
    }  # fmt: skip

    with pytest.raises(ConfigError) as caught:
        Config(**values, redis=3)  # type: ignore[arg-type]  # what is tested

    assert str(caught.value).splitlines() == [
        "6 settings cannot be used:",
        "  redis: found a number (expected RedisConfig(…))",
        "  default_queue: found '' (expected a text, not empty)",
        "  lease: found 0 (expected a number, 0.001 to 3153600000 s)",
        "  max_strikes: found True (expected a whole number, 1 or more)",
        "  concurrency: found '4' (expected a whole number, 0 or more)",
        "  broker URL 'reddis://h': unknown scheme 'reddis'"
        " (known: amqp, amqps, eager, memory, mongodb, mongodb+srv, "
        "postgres, postgresql, redis, redis+socket, rediss, sqlite; did you mean 'redis'?)",
    ]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"concurrency": -1}, "concurrency: found -1 (expected a whole number, 0 or more)"),
        ({"concurrency": 1.0}, "concurrency: found 1.0 (expected a whole number, 0 or more)"),
        ({"concurrency": 10**100},
         "concurrency: found a huge number (expected a whole number, 0 or more)"),
        ({"lease": float("nan")}, "lease: found nan (expected a number, 0.001 to 3153600000 s)"),
        ({"lease": float("inf")}, "lease: found inf (expected a number, 0.001 to 3153600000 s)"),
        ({"lease": "10"}, "lease: found '10' (expected a number, 0.001 to 3153600000 s)"),
        ({"lease": True}, "lease: found True (expected a number, 0.001 to 3153600000 s)"),
        ({"results_expire_in": -1},
         "results_expire_in: found -1 (expected a whole number, 0 to 3153600000 s)"),
        ({"no_unix_signals": 1}, "no_unix_signals: found 1 (expected true or false)"),
        ({"default_queue": 7}, "default_queue: found 7 (expected a text, not empty)"),
        ({"broker": ["redis://:secret@h"]}, "broker: found a list (expected one text: "
         "multiple_broker_separator=';' and 'redis://a;redis://b')"),
        ({"broker": ""}, "broker URL is empty (expected for instance 'sqlite:///machinery.db' or 'memory://')"),
        ({"concurrency": "redis://:secret@h"},
         "concurrency: found 'redis://***@h' (expected a whole number, 0 or more)"),
        ({"redis": 5}, "redis: found a number (expected a mapping of options)"),
        ({"redis": {"wait": 1}}, "redis.wait: found 1 (expected true or false)"),
        ({"queue_limits": {"mail": "many"}},
         "queue_limits: queue 'mail': found 'many' (expected a whole number, 1 or more)"),
        ({"fair_queues": {"mail": 7}},
         "fair_queues: queue 'mail': found 7 (expected the name of an argument or header)"),
        ({"queue_limits": {"mail": 0}},
         "queue_limits: queue 'mail': found 0 (expected a whole number, 1 or more)"),
        ({"amqp": {"queue_declare_args": "x"}},
         "amqp.queue_declare_args: found 'x' (expected a mapping of names to values)"),
        (
            {"amqp": {"queue_binding_args": {1: 2}}},
            "amqp.queue_binding_args: found a mapping (expected a mapping of names to values)",
        ),
        ({"lock": "null"}, "lock URL 'null': 'null' works as result backend only (as lock: eager, "
                           "memory, mongodb, mongodb+srv, postgres, postgresql, redis, "
                           "redis+socket, rediss, sqlite)"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_what_is_expected(
    values: dict[Any, object], text: str
) -> None:
    assert refusal(values) == text


def test_section_refuses_wrong_options() -> None:
    with pytest.raises(ConfigError, match="redis.max_idle: found -1"):
        RedisConfig(max_idle=-1)
    with pytest.raises(ConfigError, match="amqp.exchange: found ''"):
        AMQPConfig(exchange="")


def test_unknown_keys_are_reported_with_the_nearest_and_the_file() -> None:
    values: dict[Any, object] = {
        "brokr": "redis://:secret@h", "redis": {"max_idl": 3}, "zzz": 1, "redis.wait": True, 7: 1,
    }  # fmt: skip

    assert refusal(values, "config.yml").splitlines() == [
        "5 settings cannot be used:",
        "  config.yml: brokr: unknown key; did you mean 'broker'?",
        "  config.yml: redis.max_idl: unknown key; did you mean 'redis.max_idle'?",
        "  config.yml: zzz: unknown key",
        "  config.yml: redis.wait: unknown key (expected a section that is a mapping, not a dot)",
        "  config.yml: 7: unknown key",
    ]


@pytest.mark.parametrize(
    ("section", "service"),
    [("sqs", "Amazon SQS"), ("dynamodb", "DynamoDB"), ("gcppubsub", "Pub/Sub")],
)
def test_sections_of_stores_that_do_not_exist_here_are_refused(section: str, service: str) -> None:
    text = refusal({section: {"receive_wait_time_seconds": 20}}, "config.yml")

    assert text.startswith(f"config.yml: {section}: machinery_py has no store for ")
    assert service in text


def test_unknown_keys_and_wrong_values_are_reported_together() -> None:
    text = refusal({"brokr": 1, "lease": "x"}, "config.yml")

    assert "config.yml: brokr: unknown key" in text
    assert "config.yml: lease: found 'x'" in text


def test_a_required_server_refuses_every_embedded_store() -> None:
    with pytest.raises(
        ConfigError,
        match="a server is required, but 'memory://' is an embedded store .set MACHINERY_URL",
    ):
        Config(broker="memory://", require_server=True)
    with pytest.raises(ConfigError, match="3 settings"):
        Config(
            broker="memory://", result_backend="eager", lock="sqlite:///a.db", require_server=True
        )


# The module and its page


def test_importing_the_configuration_loads_no_parser() -> None:
    program = (
        "import sys, machinery_py.config.config; "
        "print([m for m in ('yaml', 'tomllib') if m in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "[]"


def test_the_reference_page_has_every_option() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "config.md"

    rows = [
        line
        for line in page.read_text("utf-8").splitlines()
        if line.startswith("| `") and "`MACHINERY_" in line
    ]

    assert rows == [
        f"| `{opt.key}` | `MACHINERY_{opt.variable}` | `{json.dumps(opt.default)}` | "
        f"{opt.unit} | {opt.meaning} |"
        for opt in OPTIONS.values()
    ]


def test_unknown_option_of_a_config_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="prefech: unknown option; did you mean 'prefetch'"):
        Config(prefech=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="redis.max_activ: unknown option; did you mean"):
        RedisConfig(max_activ=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="prefech: unknown option"):  # it is one of these, too
        Config().replace(prefech=3)


def test_value_without_a_name_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"Config\(…\): found .* without a name"):
        Config("redis://host")  # type: ignore[call-arg, misc]


def test_list_of_brokers_is_refused_with_the_way_to_write_them() -> None:
    with pytest.raises(ConfigError, match="found a list .expected one text: multiple_broker"):
        Config(broker=["redis://a", "redis://b"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="found a list .expected one text"):
        Server(broker=["redis://a", "redis://b"])  # type: ignore[arg-type]


def test_a_send_is_not_repeated_for_longer_than_stores_know_it() -> None:
    assert Config(publish_timeout=LONGEST_PUBLISH).publish_timeout == LONGEST_PUBLISH < TOKEN_LIFE
    with pytest.raises(ConfigError, match="publish_timeout: found 301 .*at most 300 s"):
        Config(publish_timeout=LONGEST_PUBLISH + 1)
