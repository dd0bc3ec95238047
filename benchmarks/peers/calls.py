"""What each script and command of a system takes of Redis, as its slow log has it."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from redis import Redis

from benchmarks.peers.hosts import RedisHost
from benchmarks.peers.processes import ask, workers
from benchmarks.peers.rounds import Bench
from benchmarks.peers.systems import System

STEPS = ("one", "bulk", "drain")
ENTRIES = 1_000_000  # that the slow log keeps
INSIDE = b"?:0"  # the client's address of a command that a script calls
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Calls of one script or command in one step.

    Attributes:
        inside: the command, if these are the calls of a command by the script `name`.
        number: for each task.
        each: µs that one takes, by the clock: more than its CPU where Redis had to wait for a
            processor. A script's µs contain those of its commands, and the noting of each.
    """

    step: str
    name: str
    inside: str = ""
    number: float
    each: float

    @property
    def of_a_task(self) -> float:
        return self.number * self.each


def calls_of(bench: Bench, system: System, count: int) -> list[Calls]:
    """Send one by one and in bulk, and run these tasks by one process; return what was called."""
    found: list[Calls] = []
    host = bench.host
    assert isinstance(host, RedisHost)
    with Redis.from_url(host.redis.url) as redis:
        host.probe.machinery()  # opens its connections
        lookers = {one["addr"].encode() for one in redis.client_list()}
        for step in STEPS:
            if step == "bulk" and not system.bulk:
                continue
            if step != "drain":
                bench.clear(system)
            with _noted(redis, lookers) as taken:
                if step == "drain":
                    with workers(system, host.servers, 1) as running:
                        bench.wait_done(running, count)
                else:
                    ask(system, host.servers, step, count, bench.file)
            calls = [
                Calls(
                    step=step,
                    name=name,
                    inside=inside,
                    number=len(times) / count,
                    each=sum(times) / len(times),
                )
                for (name, inside), times in taken.items()
            ]
            whole = {one.name: one.of_a_task for one in calls if not one.inside}
            calls.sort(key=lambda one: (-whole[one.name], bool(one.inside), -one.of_a_task))
            found += calls
    return found


@contextlib.contextmanager
def _noted(redis: Redis, lookers: set[bytes]) -> Iterator[dict[tuple[str, str], list[int]]]:
    """Return a dict that has, at the end, the µs of each call, by script and command inside it."""
    taken: dict[tuple[str, str], list[int]] = defaultdict(list)
    redis.config_set("slowlog-max-len", ENTRIES)
    redis.slowlog_reset()
    redis.config_set("slowlog-log-slower-than", 0)
    yield taken
    redis.config_set("slowlog-log-slower-than", -1)
    names, inside = _script_names(), []
    for entry in reversed(redis.slowlog_get(ENTRIES)):
        word, *rest = entry["command"].decode(errors="replace").split(" ", 2)
        name = word.upper()
        if entry["client_address"] == INSIDE:  # its script is noted when that ends
            inside.append((name, entry["duration"]))
            continue
        if name in ("EVALSHA", "FCALL"):
            name = names.get(rest[0], f"{name} {rest[0][:12]}")
        if entry["client_address"] not in lookers:
            taken[name, ""].append(entry["duration"])
            for command, duration in inside:
                taken[name, command].append(duration)
        inside.clear()


def _script_names() -> dict[str, str]:
    """Return the files of scripts by the SHA-1 under which Redis keeps them."""
    import machinery_py.stores.redis  # noqa: F401  # and with it all scripts
    from machinery_py.connections.redis.scripts import Script

    ours = {
        value.sha.decode(): value.path
        for name, module in list(sys.modules.items())
        if name.startswith("machinery_py.")
        for value in vars(module).values()
        if isinstance(value, Script)
    }
    theirs = {
        hashlib.sha1(path.read_bytes()).hexdigest(): str(path.relative_to(HERE))
        for path in HERE.glob("*/*.lua")
    }
    return ours | theirs


def table(calls: dict[str, list[Calls]], least: float) -> list[str]:
    """Lines of Markdown: the calls of each system that take at least so many µs a task."""
    lines = [
        "| step | system | script or command | calls for 1,000 tasks | µs each | µs a task |",
        "|---|---|---|---:|---:|---:|",
    ]
    for step in STEPS:
        for name, found in calls.items():
            for one in found:
                if one.step == step and one.of_a_task >= least:
                    what = f"… {one.inside}" if one.inside else one.name
                    lines.append(
                        f"| {step} | {name} | {what} | {1000 * one.number:,.1f} | "
                        f"{one.each:,.1f} | {one.of_a_task:,.2f} |"
                    )
    return lines
