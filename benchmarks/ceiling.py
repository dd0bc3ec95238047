"""`python -m benchmarks ceiling`: machinery_py beside the prototype, in the same rounds.

The prototype (`peers/ceiling`) keeps the main guarantees and does nothing else. What is wanted is a
ratio to its figures, because an absolute figure depends mostly on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.__main__ import Steps, Values, run_all
from benchmarks.children import PRIVATE_REDIS, REDIS_CONFIG
from benchmarks.figures import BY_NAME as MEASUREMENTS
from benchmarks.peers import calls, report
from benchmarks.peers.__main__ import measure, prepare
from benchmarks.peers.hosts import RedisHost
from benchmarks.peers.report import FIGURES, Results
from benchmarks.peers.rounds import LATENCY_CALLS, Bench
from benchmarks.peers.systems import BY_NAME, OURS
from tests.support.servers import RedisServer

CEILING = "ceiling"
PARTS = ("rounds", "calls", "large")
LARGE = ("huge_chord", "burst")
SHOWN = 0.1  # µs a task from which on a script or command has a row

#: Ours / the prototype's, of the same round.
WANTED: Mapping[str, float] = {
    "drain": 0.6,
    "drain by two": 0.55,
    "cpu": 1.6,
    "redis cpu": 2.0,
    "send": 0.9,
    "send redis cpu": 1.4,
    "bulk": 0.75,
    "latency": 1.25,
    "chord": 2.5,
    "chain": 1.3,
    "bytes": 1.15,
}


def ratios(results: Results, figure: str) -> list[float]:
    """Ours / the prototype's, in each round that both ended."""
    ours, theirs = results.get(OURS, {}), results.get(CEILING, {})
    return [
        ours[number][figure] / theirs[number][figure]
        for number in sorted(ours.keys() & theirs.keys())
        if theirs[number].get(figure)
    ]


def wanted_table(results: Results) -> list[str]:
    """Lines of Markdown: medians, their ratio in the rounds, and what is wanted."""
    lines = [
        "| figure | ours | prototype | ratio (least to most) | wanted |",
        "|---|---:|---:|---:|---:|",
    ]
    for figure in FIGURES:
        found = sorted(ratios(results, figure.name))
        if not found:
            continue
        medians = [
            statistics.median(
                one[figure.name] for one in results[name].values() if figure.name in one
            )
            for name in (OURS, CEILING)
        ]
        unit = f", {figure.unit}" if figure.unit else ""
        median = statistics.median(found)
        lines.append(
            f"| {figure.what}{unit} | {' | '.join(map(report.amount, medians))} | "
            f"{median:.2f} ({found[0]:.2f} to {found[-1]:.2f}) | "
            f"{_verdict(median, WANTED.get(figure.name), more=figure.more_is_better)} |"
        )
    return lines


def _verdict(found: float, wanted: float | None, *, more: bool) -> str:
    if wanted is None:
        return "–"
    is_reached = found >= wanted if more else found <= wanted
    return f"{'≥' if more else '≤'} {wanted}{'' if is_reached else ' **missed**'}"


def large_table(values: Values, *, quick: bool) -> list[str]:
    """Lines of Markdown: what comes in hundreds of thousands, without the prototype."""
    lines = ["| figure | ours | wanted |", "|---|---:|---:|"]
    for measurement in (MEASUREMENTS[name] for name in LARGE):
        for figure in measurement.figures:
            found = values.get((PRIVATE_REDIS, figure.name))
            if found is None:
                continue
            what = figure.what.format(n=measurement.sizes[quick])
            wanted = _verdict(found, figure.target("redis"), more=False)
            lines.append(f"| {what}, {figure.unit} | {report.amount(found)} | {wanted} |")
    return lines


def measure_calls(tasks: int, folder: Path, steps: Steps) -> dict[str, list[calls.Calls]]:
    found: dict[str, list[calls.Calls]] = {}
    with RedisServer(appendonly=True, config=REDIS_CONFIG) as redis:
        host = RedisHost(redis)
        bench = Bench(host, folder)
        for name in (OURS, CEILING):
            steps.begin(f"calls of {name}")
            found[name] = calls.calls_of(bench, BY_NAME[name], tasks)
        host.close()
    return found


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks ceiling",
        description="Measures machinery_py beside a prototype, on one Redis.",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=list(PARTS),
        choices=PARTS,
        metavar="PART",
        help="rounds: all figures beside the prototype; calls: what each script costs Redis; "
        "large: a chord of 100,000, and 100,000 tasks due in one second",
    )
    parser.add_argument("--tasks", type=int, default=30_000, help="in each step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--beside",
        nargs="+",
        default=[],
        choices=[name for name in BY_NAME if name not in (OURS, CEILING)],
        metavar="NAME",
        help="others that take part in the rounds: huey, dramatiq, …",
    )
    parser.add_argument(
        "--quick", action="store_true", help="shows that everything works, not how fast"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    options = parser.parse_args(arguments)
    if options.quick:
        options.tasks, options.rounds = min(options.tasks, 300), min(options.rounds, 1)
    return options


def main(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    systems, failures = prepare(
        [BY_NAME[name] for name in (OURS, CEILING, *options.beside)], install=True
    )
    found: dict[str, Any] = {}
    lines = [f"{report.machine()}, load {os.getloadavg()[0]:.1f}, {options.tasks:,} tasks"]
    with tempfile.TemporaryDirectory(prefix="machinery-ceiling-") as name:
        folder = Path(name)
        if "rounds" in options.only:
            calls_timed = 10 if options.quick else LATENCY_CALLS
            results, failed, facts = measure(
                systems,
                tasks=options.tasks,
                rounds=options.rounds,
                calls=calls_timed,
                folder=folder,
            )
            found["rounds"] = report.as_json(
                results, facts=facts, failures=failed, skipped=failures
            )
            failures += failed
            lines += ["", f"{options.rounds} rounds, load {facts['load']}:", ""]
            lines += wanted_table(results)
            lines += ["", *report.table(results)] if options.beside else []
        steps = Steps(
            2 * ("calls" in options.only) + len(LARGE) * ("large" in options.only), sys.stderr
        )
        if "calls" in options.only:
            by_system = measure_calls(options.tasks, folder, steps)
            found["calls"] = {
                name: [[one.step, one.name, one.inside, one.number, one.each] for one in each]
                for name, each in by_system.items()
            }
            lines += ["", *calls.table(by_system, SHOWN)]
        if "large" in options.only:
            values, failed = run_all(
                [PRIVATE_REDIS], LARGE, quick=options.quick, folder=folder, steps=steps
            )
            found["large"] = {name: value for (_url, name), value in values.items()}
            failures += failed
            lines += ["", *large_table(values, quick=options.quick)]
        steps.end()
    print(
        json.dumps({**found, "failures": failures}, indent=2) if options.json else "\n".join(lines)
    )
    for text in failures:
        print(f"\nNOT MEASURED {text}", file=sys.stderr)
    return 1 if failures else 0
