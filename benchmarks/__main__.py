"""`python -m benchmarks`: measure, show progress, and print a table.

`ceiling`, `growth` and `bloat`, as in `python -m benchmarks growth`, are commands of their own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from benchmarks import against
from benchmarks.children import (
    PRIVATE_AMQP,
    PRIVATE_MONGODB,
    PRIVATE_POSTGRESQL,
    PRIVATE_REDIS,
    MeasurementFailed,
    environment,
    measure,
)
from benchmarks.figures import BASELINES, BY_NAME, MEASUREMENTS, Figure, Measurement

DEFAULT_URLS = ("memory://", "sqlite:///bench.db")
NO_STORE = ""
Values = dict[tuple[str, str], float]  # by URL and figure


class Steps:
    """Progress on stderr: the current measurement, on one line of a terminal."""

    def __init__(self, total: int, out: TextIO) -> None:
        self._total = total
        self._out = out
        self._done = 0
        self._started = time.monotonic()

    def begin(self, what: str) -> None:
        self._done += 1
        passed = time.monotonic() - self._started
        text = f"[{self._done}/{self._total}] {what}   {passed:.0f} s"
        if self._out.isatty():
            self._out.write(f"\r\x1b[K{text}")
            self._out.flush()
        else:
            print(text, file=self._out, flush=True)

    def end(self) -> None:
        if self._out.isatty():
            self._out.write("\r\x1b[K")
            self._out.flush()


def plan(urls: Sequence[str], only: Sequence[str]) -> Iterator[tuple[Measurement, str]]:
    """Return the measurements of each URL; those without a store once, with an empty URL."""
    for measurement in MEASUREMENTS:
        if only and measurement.name not in only:
            continue
        if not measurement.schemes:
            yield measurement, NO_STORE
    for url in urls:
        for measurement in MEASUREMENTS:
            if (
                measurement.schemes
                and scheme_of(url) in measurement.schemes
                and (not only or measurement.name in only)
            ):
                yield measurement, url


def scheme_of(url: str) -> str:
    scheme = url.partition(":")[0]
    return {
        "rediss": "redis",
        "postgres": "postgresql",
        "amqps": "amqp",
        "redis+socket": "redis",
        "mongodb+srv": "mongodb",
    }.get(scheme, scheme)


def run_all(
    urls: Sequence[str], only: Sequence[str], *, quick: bool, folder: Path, steps: Steps
) -> tuple[Values, list[str]]:
    """Measure; return the figures and the errors."""
    values: Values = {}
    failures: list[str] = []
    with environment() as environ:
        for measurement, url in plan(urls, only):
            steps.begin(f"{measurement.name} {url}")
            count = measurement.sizes[quick]
            try:
                found = measure(measurement.name, url or "memory://", count, environ, folder=folder)
            except MeasurementFailed as failure:
                failures.append(str(failure))
                continue
            values |= {(url, name): value for name, value in found.items()}
    steps.end()
    return values, failures


def print_table(values: Values, urls: Sequence[str], *, quick: bool) -> None:
    print(
        f"Python {sys.version.split()[0]}, {os.cpu_count()} processors, "
        f"load {os.getloadavg()[0]:.1f}"
        f"{'; a quick run: the figures are not to be quoted' if quick else ''}"
    )
    for url in (NO_STORE, *urls):
        rows = [
            (measurement, figure)
            for measurement in MEASUREMENTS
            for figure in measurement.figures
            if (url, figure.name) in values
        ]
        if rows:
            print(f"\n{url or 'no store':60} {'measured':>12}   {'target':>10}   times better")
        for measurement, figure in rows:
            target = None if quick else figure.target(scheme_of(url))
            print(line(figure, values[url, figure.name], target, measurement.sizes[quick]))
        for name, baseline in BASELINES:
            if (url, name) in values and (url, baseline) in values:
                print(
                    f"  {name + ' / ' + baseline:58} "
                    f"{values[url, name] / values[url, baseline]:12.2f}"
                )


def line(figure: Figure, value: float, target: float | None, count: int) -> str:
    text = f"  {figure.what.format(n=count):58} {amount(value):>12}{figure.unit:3}"
    if target is None:
        return text
    ratio = figure.ratio(value, target)
    return (
        f"{text}{amount(target):>10}{figure.unit:3}{ratio:8.2f}{'' if ratio >= 1 else '  MISSED'}"
    )


def amount(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 1 else f"{value:.2f}"


def main() -> int:
    if sys.argv[1:2] in (["ceiling"], ["growth"], ["bloat"]):
        command = importlib.import_module(f"benchmarks.{sys.argv[1]}")
        return int(command.main(sys.argv[2:]))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures machinery_py. `ceiling`, `growth` and `bloat` are commands of their "
        "own, with a --help of their own.",
    )
    parser.add_argument(
        "--url",
        nargs="+",
        default=list(DEFAULT_URLS),
        metavar="URL",
        help="stores; a SQLite file is made anew for each measurement, whatever its name; "
        f"{PRIVATE_REDIS}, {PRIVATE_POSTGRESQL} and {PRIVATE_MONGODB} are servers of our own, "
        f"{PRIVATE_AMQP} two of them, others are used as they are",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        choices=sorted(BY_NAME),
        metavar="NAME",
        help=", ".join(BY_NAME),
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few seconds: shows that everything works, not how fast",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="where files are made; a real disk, or fsync costs nothing",
    )
    parser.add_argument("--against", metavar="REV", help="compare with this git revision, in turns")
    parser.add_argument("--rounds", type=int, default=5, help="of --against")
    options = parser.parse_args()

    chosen = list(plan(options.url, options.only))
    if options.against:
        steps = Steps(2 * options.rounds * len(chosen), sys.stderr)
        return against.run(
            options.against,
            chosen,
            rounds=options.rounds,
            quick=options.quick,
            folder=options.folder,
            as_json=options.json,
            begin=steps.begin,
            end=steps.end,
        )
    steps = Steps(len(chosen), sys.stderr)
    values, failures = run_all(
        options.url, options.only, quick=options.quick, folder=options.folder, steps=steps
    )
    if options.json:
        named: dict[str, dict[str, float]] = {}
        for (url, name), value in values.items():
            named.setdefault(url, {})[name] = value
        print(json.dumps({"figures": named, "failures": failures}, indent=2))
    else:
        print_table(values, options.url, quick=options.quick)
        for text in failures:
            print(f"\nFAILED {text}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
