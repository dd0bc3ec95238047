"""What was measured, as a table or as JSON."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure
from benchmarks.peers.rounds import CHAIN, CHORD, Figures
from benchmarks.peers.systems import BY_NAME, OURS

FIGURES: Sequence[Figure] = (
    Figure(name="send", what="send, one by one", unit="/s", more_is_better=True),
    Figure(name="bulk", what="send in bulk", unit="/s", more_is_better=True),
    Figure(name="drain", what="drain, one process", unit="/s", more_is_better=True),
    Figure(name="drain by two", what="drain, two processes", unit="/s", more_is_better=True),
    Figure(name="cpu", what="worker CPU a task", unit="µs"),
    Figure(name="latency", what="send to result, median", unit="ms"),
    Figure(name="p99", what="send to result, p99", unit="ms"),
    Figure(name="chain", what=f"chain of {CHAIN:,}", unit="s"),
    Figure(name="chord", what=f"chord of {CHORD:,}", unit="s"),
    Figure(name="commands", what="Redis commands a task", unit=""),
    Figure(name="reads", what="Redis socket reads a task", unit=""),
    Figure(name="redis cpu", what="Redis CPU a task while draining", unit="µs"),
    Figure(name="scripts", what="… of it in scripts", unit="µs"),
    Figure(name="send redis cpu", what="Redis CPU for one send", unit="µs"),
    Figure(name="send scripts", what="… of it in scripts", unit="µs"),
    Figure(name="bulk redis cpu", what="Redis CPU a task sent in bulk", unit="µs"),
    Figure(name="bytes", what="bytes a queued task", unit=""),
    Figure(name="rabbitmq cpu", what="RabbitMQ CPU a task", unit="µs"),
    Figure(name="postgresql cpu", what="PostgreSQL CPU a task while draining", unit="µs"),
    Figure(name="send postgresql cpu", what="PostgreSQL CPU for one send", unit="µs"),
    Figure(name="bulk postgresql cpu", what="PostgreSQL CPU a task sent in bulk", unit="µs"),
)

Results = Mapping[str, Mapping[int, Figures]]  # by system and round


def ratios(results: Results, peer: str, figure: Figure) -> list[float]:
    """How many times better ours was, in each round that both ended."""
    ours, theirs = results.get(OURS, {}), results.get(peer, {})
    return [
        figure.ratio(ours[number][figure.name], theirs[number][figure.name])
        for number in sorted(ours.keys() & theirs.keys())
        if figure.name in ours[number] and figure.name in theirs[number]
    ]


def machine() -> str:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in _lines("/proc/cpuinfo")
            if line.startswith("model name")
        ),
        "unknown",
    )
    return (
        f"{os.cpu_count()} processors ({model}), Python {platform.python_version()}, "
        f"{platform.system()} {platform.release()}"
    )


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def as_json(
    results: Results,
    *,
    facts: Mapping[str, object],
    failures: Sequence[str],
    skipped: Sequence[str],
) -> dict[str, Any]:
    return {
        "facts": dict(facts),
        "rounds": {
            name: [{"round": number, **figures} for number, figures in found.items()]
            for name, found in results.items()
        },
        "ratios": {
            name: {
                figure.name: found for figure in FIGURES if (found := ratios(results, name, figure))
            }
            for name in results
            if name != OURS
        },
        "failures": list(failures),
        "skipped": list(skipped),
    }


def table(results: Results) -> list[str]:
    """Lines of Markdown: medians, and then ours / theirs by rounds."""
    names = [name for name in BY_NAME if results.get(name)]
    head = [f"{name} {BY_NAME[name].version}".strip() for name in names]
    lines = ["| median of the rounds | " + " | ".join(head) + " |", "|---|" + "---:|" * len(names)]
    shown = [
        figure
        for figure in FIGURES
        if any(figure.name in one for found in results.values() for one in found.values())
    ]
    for figure in shown:
        cells = []
        for name in names:
            values = [
                figures[figure.name] for figures in results[name].values() if figure.name in figures
            ]
            cells.append(f"{amount(statistics.median(values))}" if values else "–")
        lines.append(
            f"| {figure.what}{f', {figure.unit}' if figure.unit else ''} | "
            + " | ".join(cells)
            + " |"
        )
    peers = [name for name in names if name != OURS]
    if OURS not in names or not peers:
        return lines
    lines += [
        "",
        "| times better than … (least to most) | " + " | ".join(peers) + " |",
        "|---|" + "---:|" * len(peers),
    ]
    for figure in shown:
        cells = []
        for name in peers:
            found = sorted(ratios(results, name, figure))
            cells.append(
                f"**{statistics.median(found):.2f}** ({found[0]:.2f} to {found[-1]:.2f})"
                if found
                else "–"
            )
        lines.append(f"| {figure.what} | " + " | ".join(cells) + " |")
    return lines


def amount(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"
