"""Figures: unit, direction, and target for each store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Figure of the table.

    Attributes:
        targets: by scheme; "" is for figures without a store, and for stores without a target of
            their own.
        unit: "/s", or what the value is in.
    """

    name: str
    what: str
    unit: str
    more_is_better: bool = False
    targets: Mapping[str, float] = field(default_factory=dict)

    def target(self, scheme: str) -> float | None:
        return self.targets.get(scheme, self.targets.get(""))

    def ratio(self, value: float, other: float) -> float:
        """Return how many times better `value` is than `other`."""
        if not value or not other:
            return 0.0
        return value / other if self.more_is_better else other / value


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Measurement of one child process: a function of measure.py, and its figures.

    Attributes:
        sizes: (tasks in a full run, tasks in a quick one).
        schemes: the stores it makes sense on; empty: on none, it is about the library alone.
        variants: further arguments; for each a child.
    """

    name: str
    figures: Sequence[Figure]
    sizes: tuple[int, int] = (1, 1)
    schemes: Sequence[str] = ("memory", "sqlite", "redis", "amqp", "mongodb", "postgresql")


PER_SECOND = "/s"

MEASUREMENTS: Sequence[Measurement] = (
    Measurement(
        name="importing",
        schemes=(),
        sizes=(20, 3),
        figures=[
            Figure(name="import", what="import machinery_py, CPU", unit="ms", targets={"": 60.0}),
            Figure(name="import Server", what="from machinery_py import Server", unit="ms"),
            Figure(name="import msgspec", what="import msgspec", unit="ms"),
            Figure(name="python", what="python alone, start to end", unit="ms"),
        ],
    ),
    Measurement(
        name="send_one",
        sizes=(3000, 100),
        figures=[
            Figure(
                name="send",
                what="send, one by one",
                unit=PER_SECOND,
                more_is_better=True,
                targets={"redis": 7000.0},
            ),
            Figure(
                name="raw send",
                what="… bare SQLite: the same rows and commits",
                unit=PER_SECOND,
                more_is_better=True,
            ),
            Figure(
                name="pymongo send",
                what="… bare pymongo: the same operations",
                unit=PER_SECOND,
                more_is_better=True,
            ),
        ],
    ),
    Measurement(
        name="send_bulk",
        sizes=(20_000, 500),
        figures=[
            Figure(
                name="send in bulk",
                what="send, a group of {n:,}",
                unit=PER_SECOND,
                more_is_better=True,
                targets={"": 40_000.0, "amqp": 10_000.0},
            ),
        ],
    ),
    Measurement(
        name="publish",
        schemes=("amqp",),
        sizes=(20_000, 500),
        figures=[
            Figure(
                name="publish",
                what="publish with confirms, {n:,} messages",
                unit=PER_SECOND,
                more_is_better=True,
                targets={"amqp": 10_000.0},
            ),
            Figure(
                name="raw publish",
                what="… bare pika: the same messages and confirms",
                unit=PER_SECOND,
                more_is_better=True,
            ),
        ],
    ),
    Measurement(
        name="drain",
        sizes=(20_000, 500),
        figures=[
            Figure(
                name="drain",
                what="run {n:,} no-op tasks, one process",
                unit=PER_SECOND,
                more_is_better=True,
                targets={
                    "memory": 30_000.0,
                    "sqlite": 3000.0,
                    "redis": 20_000.0,
                    "mongodb": 1500.0,
                },
            ),
            Figure(
                name="cpu per task",
                what="… worker CPU for each of them",
                unit="µs",
                targets={"": 40.0},
            ),
            Figure(name="commits", what="… claims and settlements for 1,000 of them", unit=""),
            Figure(
                name="raw drain",
                what="… bare SQLite: the same rows and commits",
                unit=PER_SECOND,
                more_is_better=True,
            ),
            Figure(
                name="pymongo drain",
                what="… bare pymongo: the same operations",
                unit=PER_SECOND,
                more_is_better=True,
            ),
        ],
    ),
    Measurement(
        name="drain_events",
        sizes=(5_000, 100),
        figures=[
            Figure(
                name="drain without events",
                what="run {n:,} no-op tasks, events off",
                unit=PER_SECOND,
                more_is_better=True,
            ),
            Figure(
                name="drain with events",
                what="… events on",
                unit=PER_SECOND,
                more_is_better=True,
            ),
            Figure(name="cpu without events", what="… worker CPU for each, events off", unit="µs"),
            Figure(name="cpu with events", what="… events on", unit="µs"),
        ],
    ),
    Measurement(
        name="drain_two",
        schemes=("sqlite", "redis", "amqp", "mongodb", "postgresql"),
        sizes=(20_000, 500),
        figures=[
            Figure(
                name="drain by two",
                what="run {n:,} no-op tasks, two processes",
                unit=PER_SECOND,
                more_is_better=True,
            ),
        ],
    ),
    Measurement(
        name="drain_logged",
        schemes=("sqlite", "redis", "amqp", "mongodb", "postgresql"),
        sizes=(20_000, 500),
        figures=[
            Figure(
                name="drain logged",
                what="run {n:,} no-op tasks, one process, two log lines each",
                unit=PER_SECOND,
                more_is_better=True,
            ),
            Figure(
                name="cost of the log",
                what="… more worker CPU than without lines",
                unit="%",
                targets={"": 10.0},
            ),
        ],
    ),
    Measurement(
        name="drain_metrics",
        schemes=("sqlite", "redis"),
        sizes=(20_000, 500),
        figures=[
            Figure(
                name="drain with metrics",
                what="run {n:,} no-op tasks, one process, metrics installed",
                unit=PER_SECOND,
                more_is_better=True,
            ),
            Figure(name="cost of metrics", what="… more worker CPU than without", unit="%"),
        ],
    ),
    Measurement(
        name="latency",
        sizes=(500, 30),
        figures=[
            Figure(
                name="latency",
                what="send to result, idle worker, median",
                unit="ms",
                targets={"sqlite": 5.0, "redis": 1.0, "memory": 1.0},
            ),
            Figure(
                name="latency p99",
                what="… of 100 the slowest but one",
                unit="ms",
                targets={"redis": 2.0},
            ),
        ],
    ),
    Measurement(
        name="chain",
        sizes=(100, 10),
        figures=[
            Figure(name="chain", what="chain of {n:,}", unit="s", targets={"redis": 0.15}),
        ],
    ),
    Measurement(
        name="long_chain",
        sizes=(1000, 20),
        figures=[
            Figure(name="long chain", what="chain of {n:,}", unit="s"),
        ],
    ),
    Measurement(
        name="chord",
        sizes=(1000, 50),
        figures=[
            Figure(
                name="chord", what="chord of {n:,}", unit="s", targets={"": 0.15, "sqlite": 0.4}
            ),
        ],
    ),
    Measurement(
        name="large_chord",
        sizes=(10_000, 100),
        figures=[
            Figure(
                name="large chord",
                what="chord of {n:,}",
                unit="s",
                targets={"": 1.5, "sqlite": 4.0},
            ),
        ],
    ),
    Measurement(
        name="delayed",
        sizes=(10_000, 200),
        figures=[
            Figure(name="delayed", what="{n:,} tasks due at once: until all have run", unit="s"),
        ],
    ),
    Measurement(
        name="huge_chord",
        schemes=("redis",),
        sizes=(100_000, 300),
        figures=[
            Figure(name="huge chord", what="chord of {n:,}", unit="s", targets={"": 12.0}),
            Figure(
                name="longest script", what="… the longest script", unit="ms", targets={"": 100.0}
            ),
        ],
    ),
    Measurement(
        name="limited",
        schemes=("redis",),
        sizes=(100_000, 500),
        figures=[
            Figure(
                name="limited",
                what="run {n:,} tasks of 1,000 keys at 10/s each, two processes",
                unit=PER_SECOND,
                more_is_better=True,
                targets={"": 2000.0},
            ),
            Figure(name="cpu of limited", what="… worker CPU for each", unit="µs"),
        ],
    ),
    Measurement(
        name="burst",
        schemes=("redis",),
        sizes=(100_000, 300),
        figures=[
            Figure(
                name="burst",
                what="{n:,} tasks due in one second: until all are claimed",
                unit="s",
                targets={"": 4.0},
            ),
            Figure(
                name="fresh", what="… send to result of a fresh task meanwhile, median", unit="s"
            ),
            Figure(name="fresh most", what="… the slowest of these", unit="s", targets={"": 0.3}),
        ],
    ),
    Measurement(
        name="steps",
        sizes=(5000, 60),
        schemes=("memory", "sqlite", "redis", "mongodb", "postgresql"),
        figures=[
            Figure(
                name="step",
                what="one step of a task, median of {n:,}",
                unit="ms",
                targets={"redis": 0.2, "sqlite": 0.6, "postgresql": 1.2},
            ),
            Figure(name="step p99", what="… 99th percentile", unit="ms"),
        ],
    ),
    Measurement(
        name="idle",
        sizes=(5, 1),
        figures=[
            Figure(name="memory", what="PSS of an idle worker", unit="MB", targets={"": 40.0}),
            Figure(name="idle cpu", what="CPU of an idle worker", unit="%", targets={"": 1.0}),
        ],
    ),
    Measurement(
        name="starting",
        schemes=("sqlite", "redis", "amqp", "mongodb", "postgresql"),
        sizes=(5, 1),
        figures=[
            Figure(
                name="ready", what="worker process, start to ready", unit="s", targets={"": 0.3}
            ),
        ],
    ),
)

#: (figure, baseline): the first is quoted as a part of the second.
BASELINES: Sequence[tuple[str, str]] = (
    ("send", "raw send"),
    ("publish", "raw publish"),
    ("drain", "raw drain"),
    ("send", "pymongo send"),
    ("drain", "pymongo drain"),
    ("drain with events", "drain without events"),
    ("import Server", "import msgspec"),
    ("cpu with events", "cpu without events"),
)

BY_NAME: Mapping[str, Measurement] = {measurement.name: measurement for measurement in MEASUREMENTS}
