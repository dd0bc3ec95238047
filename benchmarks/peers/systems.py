"""The systems that are measured, each with how its queue is looked at from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.probes import PostgreSQLProbe, Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One of them.

    Attributes:
        left: how many messages are not yet acknowledged, by the probe of the servers it runs on.
        stored: how many results there are; None: as many as messages are gone.
        copies: two processes are two workers, not one worker with two.
        bulk: it can send many at once.
        workflows: its script knows chains and chords, and they are measured.
        tables: its script makes them in an empty database.
        make: what has to be built before; raises when it cannot be.
        share: of the tasks that are asked for; a slow one shows its speed with fewer.
        scripts: the folder of its scripts, if that is not its name.
        requirements: the file there that pins its versions.
        environment: the name of its environment, if not its own.
        python: the lowest version that it runs on.
        note: what differs from the others.
    """

    name: str
    version: str = ""
    left: Callable[[Any], int]
    stored: Callable[[Any], int] | None = None
    copies: bool = True
    bulk: bool = False
    workflows: bool = False
    tables: bool = False
    share: float = 1.0
    make: Callable[[], object] | None = None
    scripts: str = ""
    requirements: str = "requirements.txt"
    environment: str = ""
    python: tuple[int, int] = (3, 11)
    note: str

    @property
    def folder(self) -> str:
        return self.scripts or self.name

    @property
    def is_ours(self) -> bool:
        """It runs in the environment that we run in."""
        return not self.version

    def done(self, probe: Any, count: int) -> int:
        return self.stored(probe) if self.stored is not None else count - self.left(probe)


def _build_go() -> None:
    from tests.interop.golang import build

    build("v1")


SYSTEMS: Sequence[System] = (
    System(
        name="machinery",
        left=Probe.machinery,
        copies=False,
        bulk=True,
        workflows=True,
        note="`machinery worker` as shipped (four threads in a process); "
        "acknowledged with the result, in one step",
    ),
    System(
        name="raw",
        left=lambda probe: probe.ask("LLEN", "raw") + probe.ask("HLEN", "raw:held"),
        bulk=True,
        stored=lambda probe: int(probe.ask("GET", "raw:ended") or 0),
        note="redis-py without a library: about the same commands for a task in the same batches, "
        "one thread, nothing that is safe: **a batch is lost** with a worker that dies "
        "between taking it and noting that",
    ),
    System(
        name="ceiling",
        left=Probe.ceiling,
        bulk=True,
        workflows=True,
        note="a prototype of one file: a task is run at least once and PENDING and SUCCESS are "
        "stored; no errors, retries, delays, priorities, pauses, repeats after a lost reply",
    ),
    System(
        name="gomachinery",
        share=0.5,
        left=lambda probe: int(probe.ask("LLEN", "machinery_tasks")),
        make=_build_go,
        note="Go Machinery 1.10.8, a worker with ten slots; **cannot acknowledge**: "
        "a task that was taken is lost with its worker; no bulk send; "
        "the waiter polls each 0.2 ms",
    ),
    System(
        name="celery",
        version="5.7.0",
        share=0.25,
        stored=Probe.stored,
        left=lambda probe: probe.ask("LLEN", "celery") + probe.ask("HLEN", "unacked"),
        note="solo pool; acks_late; no bulk send",
    ),
    System(
        name="dramatiq",
        version="2.2.1",
        share=0.5,
        stored=Probe.stored,
        copies=False,
        left=lambda probe: int(probe.ask("HLEN", "dramatiq:default.msgs")),
        note="four threads in a process, 200 messages in stock; "
        "middleware for retries and results only; no bulk send",
    ),
    System(
        name="huey",
        version="3.5.4",
        share=0.5,
        stored=lambda probe: int(probe.ask("HLEN", "huey.results.peers")),
        left=lambda probe: int(probe.ask("LLEN", "huey.redis.peers")),
        note="one thread in a process; **cannot acknowledge**: "
        "a task that was taken is lost with its worker; no bulk send",
    ),
    System(
        name="rq",
        version="2.12.0",
        share=0.1,
        bulk=True,
        stored=lambda probe: int(probe.ask("ZCARD", "rq:finished:default")),
        left=lambda probe: (
            probe.ask("LLEN", "rq:queue:default") + probe.ask("ZCARD", "rq:wip:default")
        ),
        note="SimpleWorker, which does not fork for each job",
    ),
    System(
        name="taskiq",
        version="0.13.0",
        share=0.5,
        bulk=True,
        copies=False,
        stored=Probe.stored,
        left=lambda probe: probe.groups("taskiq"),
        note="streams, acknowledged when the result is saved; uvloop, orjson; "
        "bulk: 100 sends side by side; the waiter polls each 0.5 ms",
    ),
    System(
        name="arq",
        version="0.28.0",
        share=0.25,
        bulk=True,
        left=lambda probe: int(probe.ask("ZCARD", "arq:queue")),
        note="uvloop; bulk: 100 sends side by side; worker and waiter poll (each 1 ms and 0.5 ms)",
    ),
)

#: The same on RabbitMQ, with results in Redis: those that can.
AMQP_SYSTEMS: Sequence[System] = (
    System(
        name="machinery",
        copies=False,
        bulk=True,
        left=lambda probe: probe.queued("machinery_tasks"),
        stored=lambda probe: int(probe.ask("ZCARD", "mpy:done")),
        note="`machinery worker` as shipped (four threads in a process), "
        "each message confirmed and acknowledged after its result is stored",
    ),
    System(
        name="raw",
        scripts="raw_amqp",
        bulk=True,
        left=lambda probe: probe.queued("raw"),
        stored=lambda probe: int(probe.ask("GET", "raw:ended") or 0),
        note="pika (SelectConnection) and redis-py without a library: "
        "a publish, a confirm, a delivery for each task, and for each batch one acknowledgement "
        "and the same commands as the baseline on Redis",
    ),
    System(
        name="celery",
        version="5.7.0",
        share=0.25,
        stored=Probe.stored,
        left=lambda probe: probe.queued("celery"),
        note="solo pool; acks_late, confirm_publish; no bulk send",
    ),
    System(
        name="dramatiq",
        version="2.2.1",
        share=0.5,
        stored=Probe.stored,
        copies=False,
        requirements="requirements-amqp.txt",
        environment="dramatiq-amqp",
        left=lambda probe: probe.queued("default", "default.DQ", "default.XQ"),
        note="four threads in a process, 200 messages in stock, confirm_delivery; "
        "middleware for retries and results only; no bulk send",
    ),
)

#: Each task in a child process, on Redis: one worker with as many children as there are processes.
PROCESS_SYSTEMS: Sequence[System] = (
    System(
        name="machinery",
        scripts="machinery_processes",
        copies=False,
        bulk=True,
        left=Probe.machinery,
        note="`machinery worker --pool process`; acknowledged with the result, in one step",
    ),
    System(
        name="celery",
        version="5.7.0",
        scripts="celery_prefork",
        requirements="../celery/requirements.txt",
        share=0.25,
        copies=False,
        stored=Probe.stored,
        left=lambda probe: probe.ask("LLEN", "celery") + probe.ask("HLEN", "unacked"),
        note="prefork pool; acks_late; no bulk send",
    ),
)

#: In one PostgreSQL, which flushes each commit.
POSTGRESQL_SYSTEMS: Sequence[System] = (
    System(
        name="machinery",
        copies=False,
        bulk=True,
        workflows=True,
        left=PostgreSQLProbe.machinery,
        note="`machinery worker` as shipped (four threads in a process); state and result stored, "
        "settled in one step",
    ),
    System(
        name="procrastinate",
        version="3.10.0",
        share=0.25,
        bulk=True,
        tables=True,
        left=lambda probe: probe.count(
            "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"
        ),
        note="a worker with 10 coroutines at a time; stores the end of a job and its log, "
        "no result; the waiter polls each 1 ms",
    ),
    System(
        name="pgqueuer",
        version="1.6.0",
        bulk=True,
        tables=True,
        left=lambda probe: probe.count("SELECT count(*) FROM pgqueuer"),
        note="asyncpg, uvloop, batches of 100, and of 1 while results are waited for; logs the "
        "end of a job, no result; the waiter is notified, and looks 1 ms later",
    ),
    System(
        name="oban",
        version="0.7.0",
        bulk=True,
        tables=True,
        python=(3, 12),
        left=lambda probe: probe.count(
            "SELECT count(*) FROM oban_jobs WHERE state IN ('available', 'executing')"
        ),
        note="uvloop, a queue with a limit of 100; stores the end of a job, no result; "
        "the waiter polls each 1 ms",
    ),
)

ON: Mapping[str, Sequence[System]] = {
    "redis": SYSTEMS,
    "amqp": AMQP_SYSTEMS,
    "processes": PROCESS_SYSTEMS,
    "postgresql": POSTGRESQL_SYSTEMS,
}
BY_NAME: Mapping[str, System] = {system.name: system for system in (*POSTGRESQL_SYSTEMS, *SYSTEMS)}
OURS = "machinery"
