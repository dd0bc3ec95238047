"""The systems that are measured, each with how its queue is looked at from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from machinery_py import Server
from tests.support.servers import RabbitMQServer


class Probe:
    """Connections to the server, for looking at the queues of a system while it works.

    Attributes:
        vhost: of RabbitMQ, in which the system has its queues.
    """

    def __init__(self, url: str, rabbit: RabbitMQServer | None = None) -> None:
        self._rabbit = rabbit
        self.vhost = "/"
        self._queue = Redis.from_url(f"{url}/0", decode_responses=True)
        self._results = Redis.from_url(f"{url}/1", decode_responses=True)
        self._server = Server(f"{url}/0")

    def ask(self, *words: str | int) -> Any:
        return self._queue.execute_command(*words)  # type: ignore[no-untyped-call]  # redis-py has no types for it

    def stored(self) -> int:
        """How many results there are, of a system that keeps them in a database of their own."""
        return int(self._results.dbsize())

    def groups(self, stream: str) -> int:
        """How many entries of a stream its group has not acknowledged or not read."""
        left = 0
        for reply in self.ask("XINFO", "GROUPS", stream):
            facts = (
                reply
                if isinstance(reply, dict)
                else dict(zip(reply[::2], reply[1::2], strict=True))
            )
            left += int(facts["pending"]) + int(facts["lag"] or 0)
        return left

    def queued(self, *queues: str) -> int:
        """Return how many messages of these RabbitMQ queues are not acknowledged. Takes a second.

        Messages that a worker holds count, too.
        """
        assert self._rabbit is not None
        lines = self._rabbit.ctl(
            "list_queues", "-p", self.vhost, "--no-table-headers", "name", "messages"
        ).splitlines()
        return sum(
            int(count)
            for name, _, count in (line.rpartition("\t") for line in lines)
            if name in queues
        )

    def machinery(self) -> int:
        return sum(
            stats.waiting + stats.running + stats.delayed + stats.dead
            for stats in self._server.broker.stats()
        )

    def ceiling(self) -> int:
        workers = self.ask("SMEMBERS", "ceiling:workers")
        held = sum(int(self.ask("HLEN", f"ceiling:held:{worker}")) for worker in workers)
        arrived = sum(int(self.ask("LLEN", f"ceiling:arrivals:{worker}")) for worker in workers)
        return int(self.ask("LLEN", "ceiling")) + held + arrived

    def close(self) -> None:
        self._queue.close()
        self._results.close()
        self._server.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One of them.

    Attributes:
        left: how many messages are not yet acknowledged.
        stored: how many results there are; None: as many as messages are gone.
        copies: two processes are two workers, not one worker with two.
        bulk: it can send many at once.
        workflows: its script knows chains and chords, and they are measured.
        make: what has to be built before; raises when it cannot be.
        share: of the tasks that are asked for; a slow one shows its speed with fewer.
        scripts: the folder of its scripts, if that is not its name.
        requirements: the file there that pins its versions.
        environment: the name of its environment, if not its own.
        note: what differs from the others.
    """

    name: str
    version: str = ""
    left: Callable[[Probe], int]
    stored: Callable[[Probe], int] | None = None
    copies: bool = True
    bulk: bool = False
    workflows: bool = False
    share: float = 1.0
    make: Callable[[], object] | None = None
    scripts: str = ""
    requirements: str = "requirements.txt"
    environment: str = ""
    note: str

    @property
    def folder(self) -> str:
        return self.scripts or self.name

    @property
    def is_ours(self) -> bool:
        """It runs in the environment that we run in."""
        return not self.version

    def done(self, probe: Probe, count: int) -> int:
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

ON: Mapping[str, Sequence[System]] = {
    "redis": SYSTEMS,
    "amqp": AMQP_SYSTEMS,
    "processes": PROCESS_SYSTEMS,
}
BY_NAME: Mapping[str, System] = {system.name: system for system in SYSTEMS}
OURS = "machinery"
