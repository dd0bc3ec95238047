"""The settings: `Config` and its sections, plain data that is checked once, when it is made.

Each option is declared once, with its limits; checks and names come from that, and the test of
docs/reference/config.md. What Go has is as in Go. `resolve` makes a Server's Config of four layers:

    1  the call         `broker=`, `result_backend=`, `lock=`, then `url`, then chosen in `config`
    2  MACHINERY_*      MACHINERY_BROKER before MACHINERY_URL, and so on
    3  the file         that MACHINERY_CONFIG names: .yml, .yaml or .toml
    4  the defaults

Each option is decided by itself: a Server with a broker of its own has its results where
MACHINERY_URL says, if that is set. Importing this module reads nothing.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self, cast

from machinery_py.bounds import LONGEST_PUBLISH
from machinery_py.config import files as config_files
from machinery_py.config import urls
from machinery_py.config.files import FilePath, kind_of
from machinery_py.config.options import (
    MOMENT,
    SHORTEST_STALL,
    Length,
    Section,
    WholeLength,
    length_option,
    one_of,
    option,
    options_of,
    raise_all,
)
from machinery_py.config.sections import NOT_PORTED, AMQPConfig, MongoDBConfig, RedisConfig
from machinery_py.config.store_options import masked, stores_problem
from machinery_py.config.urls import ROLES
from machinery_py.errors import ConfigError, nearest
from machinery_py.names import queue_problem
from machinery_py.queues import Queues, fair_problem, limits_problem, parse_queues, problem_of
from machinery_py.tasks.backoff import SCHEDULES
from machinery_py.texts import get_logger

logger = get_logger(__name__)

POOLS = ("thread", "process")


def _publish_problem(seconds: float) -> str:
    """Return why a task cannot be sent for so long; "" if it can."""
    if seconds <= LONGEST_PUBLISH:
        return ""
    return (
        f"found {seconds:g} (expected at most {LONGEST_PUBLISH} s: stores forget a submission some "
        "minutes after it, and would take a later repeat for a new one)"
    )


def _keep_problem(size: float) -> str:
    most = 65_536  # each state has it
    return "" if size <= most else f"found {size:,} (expected {most:,} at most)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Section):
    """Every setting of a Server, checked; one `ConfigError` tells all that is wrong.

    Meaning and unit of an option stand beside it and in docs/reference/config.md. Mappings must not
    be changed once they are in here. No text made of a Config, `repr` included, shows a password.

    Attributes:
        sources: the origin of each value, by its key (sections with a dot): "argument", the name of
            an environment variable, the path of a file, or "default". It does not count for `==`.
        source: origin of the Config as a whole, also if it gives no value; ignored by `==`, too.
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
        "round-robin", "strategy that chooses the next broker URL after a failure", low=1
    )
    broker_connection_retry: bool = option(
        True, "a worker waits for an unreachable broker instead of ending"
    )
    broker_connection_max_retries: int = option(
        0, "attempts to connect until a worker ends; 0 = no limit"
    )
    broker_connection_backoff: str = option(
        "jitter",
        "pauses between these attempts: `jitter`, `linear` or `fibonacci`",
        low=1,
        check=one_of(*sorted(SCHEDULES)),
    )
    default_queue: str = option(
        "machinery_tasks", "queue of tasks that name none", low=1, check=queue_problem
    )
    application: str = option(
        "",
        "owner of the keys of unique and exclusive tasks in shared stores; empty = `default_queue`",
    )
    queues: str = option(
        "",
        "queues of a worker: `A,B` in this order, `A:6,B:1` by weights; empty = `default_queue`",
        check=problem_of,
    )
    queue_limits: Mapping[str, int] = option(
        {}, "most tasks that may wait in a queue: `mail:10000`", check=limits_problem
    )
    fair_queues: Mapping[str, str] = option(
        {}, "queues in which the values of an argument (or header) take turns", check=fair_problem
    )
    results_expire_in: WholeLength = length_option(
        3600, "life of states and results; 0 = 3600", "s", empty_is_default=True
    )
    no_unix_signals: bool = option(False, "workers leave SIGINT and SIGTERM to the program")

    publish_timeout: Length = length_option(
        5.0, "longest wait until a task is stored", "s", low=MOMENT, check=_publish_problem
    )
    shutdown_timeout: Length = length_option(
        30.0, "how long a stopping worker lets tasks run on", "s"
    )
    lease: Length = length_option(
        10.0, "other workers run the tasks of one that was silent for this long", "s", low=MOMENT
    )
    stall_timeout: Length = length_option(
        600.0,
        "a worker process that gives no sign of life for this long is killed, "
        "or loses its lease where nobody may kill it",
        "s",
        low=SHORTEST_STALL,
    )
    max_strikes: int = option(
        3, "a task whose worker was lost this many times while it ran is dead-lettered", low=1
    )
    unregistered_timeout: Length = length_option(
        3600.0, "a task that no worker knows is dead-lettered after this", "s"
    )
    max_message_size: int = option(
        8 * 1024 * 1024, "larger messages are refused when sent", "bytes", low=1
    )
    max_result_size: int = option(1024 * 1024, "a task with a larger result fails", "bytes", low=1)
    prefetch: int = option(1024, "most tasks that a thread worker holds beyond the running ones")
    concurrency: int = option(0, "tasks that a worker runs at once; 0 = two for each processor")
    pool: str = option(
        "thread",
        "where tasks run that do not say: `thread` or `process`",
        check=one_of(*POOLS),
    )
    events: bool = option(
        False, "send the events of this process to all that open a stream of them"
    )
    keep_calls: int = option(
        -1,
        "states of running and ended tasks keep a message up to this size, so that their arguments "
        "are shown; -1 = 2,048 while the process sends events, else 0",
        "bytes",
        low=-1,
        check=_keep_problem,
    )
    control: bool = option(True, "workers receive the orders of `server.control`")
    go_program: str = option(
        "", "a Go program with the same schedules: ticks are sent under its lock only; empty = none"
    )
    inherited_headers: str = option(
        "",
        "prefixes of headers that tasks hand on to what they send: `tenant,x-`; "
        "trace context always goes on",
    )
    log_level: str = option(
        "",
        "`debug`, `info`, `warning` or `error`: what `machinery worker` logs; empty = `info`",
        check=one_of("", "debug", "info", "warning", "error"),
    )
    log_tasks: bool = option(True, "a worker logs each task, and not final failures alone")
    require_server: bool = option(
        False, "refuse the stores that need no server (sqlite, memory, eager)"
    )
    strict_durability: bool = option(
        False, "refuse a server whose settings may lose stored data, instead of warning"
    )

    stores: Mapping[str, object] = option(
        {}, "options of store plug-ins, by scheme: `file.fsync:false`", check=stores_problem
    )

    redis: RedisConfig = field(default_factory=RedisConfig)
    amqp: AMQPConfig = field(default_factory=AMQPConfig)
    mongodb: MongoDBConfig = field(default_factory=MongoDBConfig)

    sources: Mapping[str, str] = field(init=False, compare=False, repr=False)
    source: str = field(default="", init=False, compare=False, repr=False)

    def __new__(cls, *given: object, **chosen: object) -> Self:
        # Only here can a passed value be told from an equal default; it wins over the environment.
        self = Section.__new__(cls, *given, **chosen)  # with slots there is no super()
        sources = dict.fromkeys(OPTIONS, "default")
        sources |= {key: "argument" for key in OPTIONS if key.partition(".")[0] in chosen}
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
        """Return the Config of nested mappings with the keys of a file; None counts as not given.

        Raises:
            ConfigError: unknown keys, with the nearest known ones, and wrong values, all together.
        """
        problems: list[str] = []
        return _merged([_of_mapping(values, source, problems)], problems, source)

    @classmethod
    def from_yaml(cls, path: FilePath) -> Config:
        """Return the Config of a YAML file with the keys of Go Machinery's.

        Raises:
            ConfigError: PyYAML is missing, the file cannot be read, or as in `from_mapping`.
        """
        return cls.from_mapping(config_files.read_yaml(path), os.fspath(path))

    @classmethod
    def from_toml(cls, path: FilePath) -> Config:
        """Return the Config of a TOML file with the same keys; needs no package.

        Raises:
            ConfigError: the file cannot be read, or as in `from_mapping`.
        """
        return cls.from_mapping(config_files.read_toml(path), os.fspath(path))

    @classmethod
    def from_env(
        cls, prefix: str = "MACHINERY_", *, environ: Mapping[str, str] = os.environ
    ) -> Config:
        """Return the Config of environment variables: the prefix and Go's name, as REDIS_MAX_IDLE.

        An empty variable counts as not set. With a prefix, our own options and `<prefix>URL`
        (broker, backend and lock at once) are read as well, and a warning tells of an unknown
        variable; without a prefix, only the names that Go reads are.

        Raises:
            ConfigError: wrong values, all together, each with its variable.
        """
        return _merged([_of_environment(prefix, environ)])

    def replace(self, **changes: Any) -> Config:
        """Return a copy with other values in the named fields, whose source is then "argument"."""
        changed = dataclasses.replace(self, **changes)
        sources = {
            key: "argument" if key.partition(".")[0] in changes else was
            for key, was in self.sources.items()
        }
        object.__setattr__(changed, "sources", sources)
        object.__setattr__(changed, "source", self.source)
        return changed

    @property
    def broker_urls(self) -> tuple[str, ...]:
        """The broker's URLs in the order of the attempts; one if there is no separator."""
        return urls.split_urls(self.broker, self.multiple_broker_separator)

    @property
    def backend_url(self) -> str:
        """The URL of states and results; joined like `broker` if that holds several."""
        return self.result_backend or self.broker

    @property
    def lock_url(self) -> str:
        """The URL of locks: `lock`, else broker, else backend; "" if these cannot lock."""
        here = [url for url in (self.broker, self.backend_url) if urls.serves(url, "lock")]
        return self.lock or next(iter(here), "")

    @property
    def worker_queues(self) -> Queues:
        """The queues of a worker that names none."""
        return parse_queues(self.queues) if self.queues else (self.default_queue,)

    def values(self) -> Iterator[tuple[str, object]]:
        """Yield every option, sections with a dot, and its value."""
        for key in OPTIONS:
            section, dot, name = key.rpartition(".")
            yield key, getattr(getattr(self, section) if dot else self, name)

    def redacted(self) -> dict[str, object]:
        """Return `values` as a dict that may be shown: URLs are without their secrets."""
        shown = {
            key: urls.redact_word(value) if isinstance(value, str) else value
            for key, value in self.values()
        }
        for key in ROLES:
            parts = urls.split_urls(getattr(self, key), self.multiple_broker_separator)
            shown[key] = self.multiple_broker_separator.join(map(urls.redact, parts))
        return {**shown, "stores": masked(self.stores)}


SECTIONS: Mapping[str, type[Section]] = {
    "redis": RedisConfig,
    "amqp": AMQPConfig,
    "mongodb": MongoDBConfig,
}

_KINDS: tuple[type[Section], ...] = (Config, *SECTIONS.values())

OPTIONS = {opt.key: opt for kind in _KINDS for opt in options_of(kind).values()}
"""Every option under its key, sections with a dot, in the order of the reference page."""

_GO_KEYS = frozenset({
    "broker", "default_queue", "lock", "multiple_broker_separator", "no_unix_signals",
    "result_backend", "results_expire_in",
})  # fmt: skip

_MISSPELT = "MULTIPLE_BROKEN_SEPARATOR"  # Go's name in the environment, read as the right one is

_OTHER_VARIABLES = frozenset({"APP", "CONFIG", "DASHBOARD_AUTH", "URL", _MISSPELT})  # also cli's


def resolve(
    url: str | None = None,
    *,
    config: Config | None = None,
    broker: str | None = None,
    result_backend: str | None = None,
    lock: str | None = None,
    source: str = "argument",
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Return the Config that holds for this call here and now.

    Args:
        url: broker, result backend and lock at once, as far as its store can. `source`: its origin.
        config: its chosen values count as passed; its defaults give way to environment and file.
        broker: None is not passed. An empty `result_backend` or `lock` is: "where the broker is".

    Raises:
        ConfigError: all that is wrong, each with its argument, variable or file; or the file that
            MACHINERY_CONFIG names cannot be read.
    """
    given = {"broker": broker, "result_backend": result_backend, "lock": lock}
    path = environ.get("MACHINERY_CONFIG", "").strip()
    problems: list[str] = []
    layers = [
        _of_mapping(given, source, problems),
        _of_url(url, source) if url is not None else {},
        _of_config(config) if config is not None else {},
        _of_environment("MACHINERY_", environ),
        _of_mapping(config_files.read_file(path), path, problems) if path else {},
    ]
    return _merged(layers, problems, config.source if config is not None else "")


# Layers: settings as they were found, before they are checked


class Found(NamedTuple):
    """A value and its origin."""

    value: object
    source: str


Layer = Mapping[str, Found]


def _of_mapping(values: Mapping[Any, object], source: str, problems: list[str]) -> Layer:
    """Read nested mappings; None counts as not given. Adds what is wrong to `problems`."""
    found: dict[str, Found] = {}

    def refuse(key: str, text: str) -> None:
        problems.append(f"{_origin(source)}{urls.redact_word(key)}: {text}")

    for outer, content in values.items():
        pairs: list[tuple[str, object]] = []
        if "." in str(outer):
            refuse(str(outer), "unknown key (expected a section that is a mapping, not a dot)")
        elif outer not in SECTIONS:
            pairs = [(str(outer), content)]
        elif isinstance(content, Mapping):
            inner = cast(Mapping[object, object], content)
            pairs = [(f"{outer}.{name}", value) for name, value in inner.items()]
        elif content is not None:
            refuse(outer, f"found {kind_of(content)} (expected a mapping of options)")
        for key, value in pairs:
            if key in OPTIONS:
                if value is not None:
                    found[key] = Found(value, source)
            elif key in NOT_PORTED:
                store = NOT_PORTED[key]
                refuse(key, f"machinery_py has no store for {store} (remove this section)")
            else:
                refuse(key, f"unknown key{nearest(key, [*OPTIONS, *SECTIONS])}")
    return found


def _of_environment(prefix: str, environ: Mapping[str, str]) -> Layer:
    """Read the variables with this prefix; see `Config.from_env`."""
    given = {
        name.removeprefix(prefix): text.strip()
        for name, text in environ.items()
        if name.startswith(prefix) and text.strip()
    }
    found: dict[str, Found] = {}
    if prefix and "URL" in given:
        found.update(_of_url(given["URL"], f"{prefix}URL"))
    for key, opt in OPTIONS.items():
        names = [opt.variable] if key != "multiple_broker_separator" else [opt.variable, _MISSPELT]
        name = next((name for name in names if name in given), "")
        if name and (prefix or _is_go(key)):
            found[key] = Found(config_files.from_text(opt.kind, given[name]), prefix + name)
    if prefix == "MACHINERY_":
        _warn_of_unknown(given)
    return found


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


def _of_url(url: str, source: str) -> Layer:
    """Use one URL for all that its store can be; the rest stays open (RabbitMQ has no locks)."""
    return {
        key: Found(url, source)
        for key, role in ROLES.items()
        if key == "broker" or urls.serves(url, role)
    }


def _of_config(config: Config) -> Layer:
    """Return the settings that were given to this Config, without its defaults."""
    return {
        key: Found(value, config.sources[key])
        for key, value in config.values()
        if config.sources[key] != "default"
    }


def _merged(layers: Sequence[Layer], problems: Sequence[str] = (), source: str = "") -> Config:
    """Make the Config of several layers, the first of which wins.

    Raises:
        ConfigError: these problems, and all that is wrong in what came out.
    """
    found = {key: one for layer in reversed(layers) for key, one in layer.items()}
    values = {key: one.value for key, one in found.items()}
    sources = {key: found[key].source if key in found else "default" for key in OPTIONS}
    raise_all([*problems, *_problems(values, sources)])
    chosen: dict[str, Any] = {key: value for key, value in values.items() if "." not in key}
    for name, section in SECTIONS.items():
        start = section.PREFIX
        inner = {key.removeprefix(start): values[key] for key in values if key.startswith(start)}
        chosen[name] = section(**cast(Any, inner))
    config = Config(**chosen)
    object.__setattr__(config, "sources", sources)
    object.__setattr__(config, "source", source)
    return config


def _problems(values: Mapping[str, object], sources: Mapping[str, str]) -> list[str]:
    """Return a line for each of these values that is wrong, and for what does not go together."""
    problems = [
        _origin(sources.get(key, "")) + text
        for key, value in values.items()
        if (text := OPTIONS[key].problem(value))
    ]
    separator = values.get("multiple_broker_separator")
    master_name = str(values.get("redis.master_name", ""))
    refused: set[str] = set()
    embedded: dict[str, None] = {}
    for key, role in ROLES.items():
        given = values.get(key, OPTIONS[key].default)
        if not isinstance(given, str) or not (given or key == "broker"):
            continue
        for url in urls.split_urls(given, separator if isinstance(separator, str) else ""):
            try:
                urls.check_url(url, role, master_name=master_name)
            except ConfigError as error:
                if url not in refused:  # MACHINERY_URL is three settings, and one line is enough
                    problems.append(_origin(sources.get(key, "")) + str(error))
                refused.add(url)
            if urls.scheme_of(url) in urls.EMBEDDED:
                embedded[url] = None
    if values.get("require_server") is True:
        origin = _origin(sources.get("require_server", ""))
        problems += [
            f"{origin}a server is required, but {urls.redact(url)!r} is an embedded store "
            "(set MACHINERY_URL to the URL of a server)"
            for url in embedded
        ]
    return problems


def _origin(source: str) -> str:
    return "" if source in {"", "argument", "default"} else f"{source}: "
