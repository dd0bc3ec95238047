"""`python -m benchmarks.peers`: makes the environments, measures in rounds, prints a table."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.__main__ import Steps
from benchmarks.children import REDIS_CONFIG
from benchmarks.peers import environments, report
from benchmarks.peers.hosts import Host, PostgreSQLHost, RedisHost
from benchmarks.peers.processes import RoundFailed
from benchmarks.peers.rounds import LATENCY_CALLS, Bench, Figures
from benchmarks.peers.systems import BY_NAME, ON, System
from tests.support.private_postgres import AS_SHIPPED, PostgreSQLServer
from tests.support.servers import RabbitMQServer, RedisServer

LEAST = 50  # tasks, whatever the share of a system


def prepare(chosen: Sequence[System], *, install: bool) -> tuple[list[System], list[str]]:
    """Those that can be measured, and why others cannot."""
    ready: list[System] = []
    skipped: list[str] = []
    for system in chosen:
        try:
            if install:
                environments.make(system, lambda text: print(text, file=sys.stderr, flush=True))
            if system.make is not None:
                system.make()
        except Exception as failure:  # whatever a maker raises: the others can be measured
            skipped.append(f"{system.name}: {failure}")
            continue
        if environments.is_there(system):
            ready.append(system)
        else:
            skipped.append(f"{system.name}: no environment at {environments.folder(system)}")
    return ready, skipped


def measure(
    systems: Sequence[System],
    *,
    tasks: int,
    rounds: int,
    calls: int,
    folder: Path,
    broker: str = "redis",
    size: int = 0,
) -> tuple[dict[str, dict[int, Figures]], list[str], dict[str, object]]:
    """All rounds of all systems on the same servers: figures, failures, and facts about the run."""
    results: dict[str, dict[int, Figures]] = {}
    failures: list[str] = []
    steps = Steps(rounds * len(systems), sys.stderr)
    loads: list[float] = []
    with contextlib.ExitStack() as stack:
        host = _host(broker, stack, size)
        stack.callback(host.close)
        bench, version = Bench(host, folder), host.version()
        for number in range(rounds):
            # Nobody is always the first, or always behind the same other one.
            turn = number % len(systems)
            for system in [*systems[turn:], *systems[:turn]][:: -1 if number % 2 else 1]:
                steps.begin(f"round {number + 1}: {system.name}")
                loads.append(os.getloadavg()[0])
                try:
                    found = bench.round(
                        system, max(LEAST, round(tasks * system.share)), calls=calls
                    )
                except RoundFailed as failure:
                    failures.append(f"round {number + 1}: {failure}")
                    continue
                results.setdefault(system.name, {})[number + 1] = found
    steps.end()
    facts: dict[str, object] = {
        "machine": report.machine(),
        "servers": version,
        "tasks": tasks,
        "rounds": rounds,
        "bytes": size,
        "load": f"{min(loads):.1f} to {max(loads):.1f}",
    }
    return results, failures, facts


def _host(broker: str, stack: contextlib.ExitStack, size: int) -> Host:
    """Start the servers of a choice of --broker; they are ended with the stack."""
    if broker == "postgresql":
        return PostgreSQLHost(stack.enter_context(PostgreSQLServer(settings=AS_SHIPPED)), size)
    redis = stack.enter_context(RedisServer(appendonly=True, config=REDIS_CONFIG))
    rabbit = stack.enter_context(RabbitMQServer()) if broker == "amqp" else None
    return RedisHost(redis, rabbit)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="Measures machinery_py beside others, on the same servers.",
    )
    parser.add_argument(
        "--broker",
        default="redis",
        choices=list(ON),
        help="amqp: messages in RabbitMQ and results in Redis, of the systems that can; "
        "processes: Redis, each task in a child process; "
        "postgresql: those that need nothing else",
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        default=list(BY_NAME),
        choices=list(BY_NAME),
        metavar="NAME",
        help=", ".join(BY_NAME),
    )
    parser.add_argument(
        "--tasks",
        type=int,
        default=20_000,
        metavar="N",
        help="in each drain; slow systems get a part of them",
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="R")
    parser.add_argument(
        "--calls", type=int, default=LATENCY_CALLS, metavar="N", help="whose latency is measured"
    )
    parser.add_argument(
        "--bytes",
        type=int,
        default=0,
        metavar="N",
        help="of a text that each task gets, with --broker postgresql",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument(
        "--no-install", action="store_true", help="leave out what has no environment yet"
    )
    parser.add_argument(
        "--prepare", action="store_true", help="make the environments, and measure nothing"
    )
    options = parser.parse_args()
    if min(options.tasks, options.rounds, options.calls) < 1:
        parser.error("--tasks, --rounds and --calls take numbers from 1 on")
    if options.bytes and options.broker != "postgresql":
        parser.error("--bytes needs --broker postgresql")

    chosen = [system for system in ON[options.broker] if system.name in options.peers]
    systems, skipped = prepare(chosen, install=not options.no_install)
    if options.prepare or not systems:
        print("\n".join(skipped), file=sys.stderr)
        return 1 if skipped else 0
    with tempfile.TemporaryDirectory(prefix="machinery-peers-") as name:
        results, failures, facts = measure(
            systems,
            tasks=options.tasks,
            rounds=options.rounds,
            calls=options.calls,
            folder=Path(name),
            broker=options.broker,
            size=options.bytes,
        )
    if options.json:
        print(
            json.dumps(
                report.as_json(results, facts=facts, failures=failures, skipped=skipped), indent=2
            )
        )
    else:
        print(
            f"{facts['machine']}, {facts['servers']}; "
            f"{options.tasks:,} tasks{f' of {options.bytes:,} bytes' if options.bytes else ''}, "
            f"{options.rounds} rounds, "
            f"load {facts['load']}\n"
        )
        print("\n".join(report.table(results)))
        for text in [*failures, *skipped]:
            print(f"\nNOT MEASURED {text}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
