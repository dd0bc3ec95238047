"""The settings: `Config` and its sections, plain data that is checked once, when it is made.

Each option is one line: name, default, meaning, unit and limits. From these lines come the checks, the names in files
and in the environment, and the test of docs/reference/config.md. Names, units and defaults of what Go has are Go's.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, cast

from machinery_py.config import files as config_files
from machinery_py.config import urls
from machinery_py.config.files import FilePath, kind_of
from machinery_py.config.options import MOMENT, Section, option, options_of, raise_all
from machinery_py.config.sections import AMQPConfig, MongoDBConfig, RedisConfig
from machinery_py.config.urls import Role
from machinery_py.errors import ConfigError, nearest
from machinery_py.names import queue_problem
from machinery_py.queues import problem_of
from machinery_py.tasks.backoff import SCHEDULES
from machinery_py.texts import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Section):
    """Every setting of a Server, checked: all that is wrong is told in one `ConfigError`.

    What an option means and its unit stand beside it and in docs/reference/config.md. Mappings must not be
    changed once they are in here. No text made of a Config, `repr` included, shows a password.

    Attributes:
        sources: where each value is from: its key, sections with a dot, → "argument", the name of an environment
            variable, the path of a file, or "default". Two Configs with other sources and the same values are equal.
    """

    PREFIX: ClassVar[str] = ""

    broker: str = option("sqlite:///machinery.db", "URL of the store that holds the messages")
    result_backend: str = option(
        "", "URL of the store that holds states and results; empty = where the broker is"
    )
    lock: str = option("", "URL of the store that holds locks; empty = where the broker is")
    multiple_broker_separator: str = option(
        "", "text between several broker URLs; empty = there is one URL"
    )
    broker_failover_strategy: str = option(
        "round-robin", "which broker URL comes after one that failed", low=1
    )
    broker_connection_retry: bool = option(
        True, "a worker waits for a broker that is away, instead of ending"
    )
    broker_connection_max_retries: int = option(
        0, "attempts to connect until a worker ends; 0 = any number"
    )
    broker_connection_backoff: str = option(
        "jitter", "pauses between them: `jitter`, `linear` or `fibonacci`", low=1
    )
    default_queue: str = option("machinery_tasks", "queue of tasks that name none", low=1)
    application: str = option(
        "",
        "whose keys of unique and exclusive tasks they are in shared stores; empty = `default_queue`",
    )
    queues: str = option(
        "", "queues of a worker: `A,B` in this order, `A:6,B:1` by weights; empty = `default_queue`"
    )
    results_expire_in: int = option(
        3600, "how long states and results are kept; 0 = 3600", "s", empty_is_default=True
    )
    no_unix_signals: bool = option(False, "workers leave SIGINT and SIGTERM to the program")

    publish_timeout: float = option(5.0, "longest wait until a task is stored", "s", low=MOMENT)
    shutdown_timeout: float = option(30.0, "how long a stopping worker lets tasks run on", "s")
    lease: float = option(
        10.0, "tasks of a worker that was silent for this long are run by another", "s", low=MOMENT
    )
    max_strikes: int = option(
        3, "a task that was running in so many dying workers is dead-lettered", low=1
    )
    unregistered_timeout: float = option(
        3600.0, "a task that no worker knows is dead-lettered after this", "s"
    )
    max_message_size: int = option(
        8 * 1024 * 1024, "larger messages are refused when sent", "bytes", low=1
    )
    max_result_size: int = option(
        1024 * 1024, "larger results are a failure of the task", "bytes", low=1
    )
    prefetch: int = option(512, "tasks a thread worker may hold beyond the running ones, at most")
    concurrency: int = option(0, "tasks that a worker runs at once; 0 = two for each processor")
    go_program: str = option(
        "", "a Go program with the same schedules: ticks are sent under its lock only; empty = none"
    )
    inherited_headers: str = option(
        "",
        "beginnings of headers that go on to what a task sends: `tenant,x-`; trace context always does",
    )
    require_server: bool = option(
        False, "refuse the stores that need no server (sqlite, memory, eager)"
    )
    strict_durability: bool = option(
        False, "refuse a server that may forget what it has stored, instead of warning"
    )

    redis: RedisConfig = field(default_factory=RedisConfig)
    amqp: AMQPConfig = field(default_factory=AMQPConfig)
    mongodb: MongoDBConfig = field(default_factory=MongoDBConfig)

    sources: Mapping[str, str] = field(init=False, compare=False, repr=False)

    def __new__(cls, **chosen: object) -> Self:
        # Only here can a value that was passed be told from an equal default, and it must win over the environment.
        self = object.__new__(cls)
        sources = {
            key: "argument" if key.partition(".")[0] in chosen else "default" for key in OPTIONS
        }
        object.__setattr__(self, "sources", sources)
        return self

    def __post_init__(self) -> None:
        problems = [
            f"{name}: found {kind_of(getattr(self, name))} (expected {section.__name__}(…))"
            for name, section in SECTIONS.items()
            if not isinstance(getattr(self, name), section)
        ]
        values = {option.key: getattr(self, name) for name, option in options_of(Config).items()}
        values["redis.master_name"] = getattr(self.redis, "master_name", "")
        raise_all(problems + _problems(values, {}))
        self.settle()

    def __repr__(self) -> str:
        shown = self.redacted()
        chosen = (
            f"{key}={shown[key]!r}" for key, value in self.values() if value != OPTIONS[key].default
        )
        return f"Config({', '.join(chosen)})"

    @classmethod
    def from_mapping(cls, values: Mapping[Any, object], source: str = "argument") -> Config:
        """The Config of nested mappings with the keys of a file; a value of None counts as not given.

        Raises:
            ConfigError: unknown keys, with the nearest known ones, and wrong values, all together.
        """
        return merge(mapping_layer(values, source))

    @classmethod
    def from_yaml(cls, path: FilePath) -> Config:
        """The Config of a file with the keys of Go Machinery's; relative to the working directory.

        Raises:
            ConfigError: PyYAML is missing, the file cannot be read, or as in `from_mapping`.
        """
        return cls.from_mapping(config_files.read_yaml(path), os.fspath(path))

    @classmethod
    def from_toml(cls, path: FilePath) -> Config:
        """The same from TOML, without any package. Raises what `from_yaml` does."""
        return cls.from_mapping(config_files.read_toml(path), os.fspath(path))

    @classmethod
    def from_env(
        cls, prefix: str = "MACHINERY_", *, environ: Mapping[str, str] = os.environ
    ) -> Config:
        """The Config of environment variables: the prefix and Go's name, as REDIS_MAX_IDLE.

        An empty variable counts as not set. With a prefix, our own options and `<prefix>URL` (broker, backend and lock
        at once) are read as well, and an unknown variable is warned of; without, only the names that Go reads.

        Raises:
            ConfigError: wrong values, all together, each with its variable.
        """
        return merge(environment_layer(prefix, environ))

    def replace(self, **changes: Any) -> Config:
        """The same with other values in the named fields, whose source is then "argument"."""
        changed = dataclasses.replace(self, **changes)
        sources = {
            key: "argument" if key.partition(".")[0] in changes else was
            for key, was in self.sources.items()
        }
        object.__setattr__(changed, "sources", sources)
        return changed

    @property
    def broker_urls(self) -> tuple[str, ...]:
        """The broker's URLs, in the order in which they are tried; without a separator it is one."""
        return urls.split_urls(self.broker, self.multiple_broker_separator)

    @property
    def backend_url(self) -> str:
        """Where states and results are; joined like `broker` if that holds several URLs."""
        return self.result_backend or self.broker

    @property
    def lock_url(self) -> str:
        """Where locks are: `lock`, else the broker, else the backend; "" if neither of the two can lock."""
        here = [url for url in (self.broker, self.backend_url) if urls.serves(url, "lock")]
        return self.lock or next(iter(here), "")

    def values(self) -> Iterator[tuple[str, object]]:
        """Every option, sections with a dot, and its value."""
        for key in OPTIONS:
            section, dot, name = key.rpartition(".")
            yield key, getattr(getattr(self, section) if dot else self, name)

    def redacted(self) -> dict[str, object]:
        """The same as `values`, as a dict that may be shown: URLs are without their secrets."""
        shown = {
            key: urls.redact_word(value) if isinstance(value, str) else value
            for key, value in self.values()
        }
        for key in ROLES:
            parts = urls.split_urls(getattr(self, key), self.multiple_broker_separator)
            shown[key] = self.multiple_broker_separator.join(map(urls.redact, parts))
        return shown


ROLES: Mapping[str, Role] = {"broker": "broker", "result_backend": "result backend", "lock": "lock"}

SECTIONS: Mapping[str, type[Section]] = {
    "redis": RedisConfig,
    "amqp": AMQPConfig,
    "mongodb": MongoDBConfig,
}

_KINDS: tuple[type[Section], ...] = (Config, *SECTIONS.values())

OPTIONS = {opt.key: opt for kind in _KINDS for opt in options_of(kind).values()}
"""Every option under its key, sections with a dot, in the order of the reference page."""

_NOT_PORTED = {
    "sqs": "Amazon SQS",
    "dynamodb": "Amazon DynamoDB",
    "gcppubsub": "Google Pub/Sub",
    "gcp_pub_sub": "Google Pub/Sub",
    "pubsub": "Google Pub/Sub",
}

_GO_KEYS = frozenset({
    "broker", "default_queue", "lock", "multiple_broker_separator", "no_unix_signals", "result_backend",
    "results_expire_in",
})  # fmt: skip

_MISSPELT = (
    "MULTIPLE_BROKEN_SEPARATOR"  # Go's name in the environment, and read as well as the right one
)

_OTHER_VARIABLES = frozenset(
    {"APP", "CONFIG", "URL", _MISSPELT}
)  # the first two are the command line's and settings'


# Layers: settings as they were found, before they are checked


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Layer:
    """Some settings that were found in one place: key → value, key → where, and what was wrong already."""

    values: Mapping[str, object] = field(default_factory=dict[str, object])
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    problems: tuple[str, ...] = ()


def mapping_layer(values: Mapping[Any, object], source: str) -> Layer:
    """The settings of nested mappings; None counts as not given."""
    found: dict[str, object] = {}
    problems: list[str] = []
    for key, value in _flat(values, problems):
        if key in OPTIONS:
            if value is not None:
                found[key] = value
        elif key in _NOT_PORTED:
            problems.append(
                f"{key}: machinery_py has no store for {_NOT_PORTED[key]} (remove this section)"
            )
        else:
            problems.append(
                f"{urls.redact_word(key)}: unknown key{nearest(key, [*OPTIONS, *SECTIONS])}"
            )
    origin = _origin(source)
    return Layer(
        values=found,
        sources=dict.fromkeys(found, source),
        problems=tuple(origin + problem for problem in problems),
    )


def _flat(values: Mapping[Any, object], problems: list[str]) -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if "." in str(key):
            problems.append(
                f"{urls.redact_word(str(key))}: unknown key (expected a section that is a mapping, not a dot)"
            )
        elif key not in SECTIONS:
            yield str(key), value
        elif isinstance(value, Mapping):
            for name, inner in cast(Mapping[object, object], value).items():
                yield f"{key}.{name}", inner
        elif value is not None:
            problems.append(f"{key}: found {kind_of(value)} (expected a mapping of options)")


def environment_layer(prefix: str, environ: Mapping[str, str]) -> Layer:
    """The settings of the variables with this prefix; see `Config.from_env`."""
    given = {
        name.removeprefix(prefix): text.strip()
        for name, text in environ.items()
        if name.startswith(prefix) and text.strip()
    }
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    if prefix and "URL" in given:
        shared = url_layer(given["URL"], f"{prefix}URL")
        values, sources = dict(shared.values), dict(shared.sources)
    for key, opt in OPTIONS.items():
        names = [opt.variable] if key != "multiple_broker_separator" else [opt.variable, _MISSPELT]
        name = next((name for name in names if name in given), "")
        if name and (prefix or _is_go(key)):
            values[key] = config_files.from_text(opt.kind, given[name])
            sources[key] = prefix + name
    if prefix == "MACHINERY_":
        _warn_of_unknown(given)
    return Layer(values=values, sources=sources)


def _is_go(key: str) -> bool:
    return key in _GO_KEYS or key.startswith(("redis.", "amqp."))


def _warn_of_unknown(given: Mapping[str, str]) -> None:
    known = {opt.variable for opt in OPTIONS.values()} | _OTHER_VARIABLES
    for name in given:
        if name not in known and not name.startswith("TEST_"):
            hint = nearest(f"MACHINERY_{name}", [f"MACHINERY_{other}" for other in sorted(known)])
            logger.warning(
                "environment variable 'MACHINERY_%s' is unknown and ignored%s", name, hint
            )


def url_layer(url: str, source: str) -> Layer:
    """One URL for everything that its store can be; what it cannot be stays open (RabbitMQ has no locks)."""
    keys = [key for key, role in ROLES.items() if key == "broker" or urls.serves(url, role)]
    return Layer(values=dict.fromkeys(keys, url), sources=dict.fromkeys(keys, source))


def config_layer(config: Config) -> Layer:
    """Return the settings that were given to this Config, without its defaults."""
    chosen = {key: value for key, value in config.values() if config.sources[key] != "default"}
    return Layer(values=chosen, sources={key: config.sources[key] for key in chosen})


def merge(*layers: Layer) -> Config:
    """The Config of several layers, the first of which wins.

    Raises:
        ConfigError: all that is wrong in the layers and in what came out.
    """
    values: dict[str, object] = {}
    sources = dict.fromkeys(OPTIONS, "default")
    for layer in reversed(layers):
        values.update(layer.values)
        sources.update(layer.sources)
    raise_all(
        [*(problem for layer in layers for problem in layer.problems), *_problems(values, sources)]
    )
    chosen: dict[str, Any] = {key: value for key, value in values.items() if "." not in key}
    for name, section in SECTIONS.items():
        start = section.PREFIX
        chosen[name] = section(
            **{key[len(start) :]: values[key] for key in values if key.startswith(start)}
        )
    config = Config(**chosen)
    object.__setattr__(config, "sources", sources)
    return config


def _problems(values: Mapping[str, object], sources: Mapping[str, str]) -> list[str]:
    """A line for each of these values that is wrong, and for what does not go together."""
    problems = [
        _origin(sources.get(key, "")) + text
        for key, value in values.items()
        if (text := OPTIONS[key].problem(value))
    ]
    if text := problem_of(values.get("queues")):
        problems.append(f"{_origin(sources.get('queues', ''))}queues: {text}")
    default = values.get("default_queue")
    if isinstance(default, str) and default and (text := queue_problem(default)):
        problems.append(f"{_origin(sources.get('default_queue', ''))}default_queue: {text}")
    backoff = values.get("broker_connection_backoff")
    if isinstance(backoff, str) and backoff and backoff not in SCHEDULES:
        known = ", ".join(sorted(SCHEDULES))
        problems.append(
            f"{_origin(sources.get('broker_connection_backoff', ''))}broker_connection_backoff: found {backoff!r} "
            f"(known: {known}{nearest(backoff, SCHEDULES)})"
        )
    separator = values.get("multiple_broker_separator")
    stores = {key: values.get(key, OPTIONS[key].default) for key in ROLES}
    found = {
        key: urls.split_urls(text, separator if isinstance(separator, str) else "")
        for key, text in stores.items()
        if isinstance(text, str) and (text or key == "broker")
    }
    refused: set[str] = set()
    for key, parts in found.items():
        for url in parts:
            try:
                urls.check_url(
                    url, ROLES[key], master_name=str(values.get("redis.master_name", ""))
                )
            except ConfigError as error:
                if url not in refused:  # MACHINERY_URL is three settings, and one line is enough
                    problems.append(_origin(sources.get(key, "")) + str(error))
                refused.add(url)
    if values.get("require_server") is True:
        problems += _embedded(
            dict.fromkeys(url for parts in found.values() for url in parts), sources
        )
    return problems


def _embedded(used: Iterable[str], sources: Mapping[str, str]) -> list[str]:
    return [
        f"{_origin(sources.get('require_server', ''))}a server is required, but {urls.redact(url)!r} is an embedded "
        "store (set MACHINERY_URL to the URL of a server)"
        for url in used
        if urls.scheme_of(url) in urls.EMBEDDED
    ]


def _origin(source: str) -> str:
    return "" if source in {"", "argument", "default"} else f"{source}: "
