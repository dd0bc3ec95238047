"""Comparison of this tree with another revision, in turns, so that load affects both alike."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.children import ROOT, MeasurementFailed, environment, measure
from benchmarks.figures import Figure, Measurement

Pairs = dict[
    tuple[str, str], list[tuple[float, float]]
]  # by URL and figure: (here, there) of each round


@contextlib.contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """Check the revision out into a temporary folder; remove the worktree afterwards."""
    with tempfile.TemporaryDirectory(prefix="machinery-against-") as name:
        tree = Path(name) / "tree"
        _git("worktree", "add", "--detach", str(tree), revision)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> None:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")


def run(
    revision: str,
    chosen: Sequence[tuple[Measurement, str]],
    *,
    rounds: int,
    quick: bool,
    folder: Path,
    as_json: bool,
    begin: Callable[[str], None],
    end: Callable[[], None],
) -> int:
    """Measure in turns, print how many times better this tree is, and return the exit code."""
    pairs: Pairs = {}
    failures: list[str] = []
    with (
        worktree(revision) as there,
        environment() as here_environ,
        environment(there) as there_environ,
    ):
        for number in range(rounds):
            for measurement, url in chosen:
                sides = [("here", here_environ), (revision, there_environ)]
                found: dict[str, dict[str, float]] = {}
                # The first of a pair has the colder caches: they change places from round to round.
                for side, environ in sides if number % 2 == 0 else reversed(sides):
                    begin(f"round {number + 1}: {measurement.name} {url} {side}")
                    try:
                        found[side] = measure(
                            measurement.name,
                            url or "memory://",
                            measurement.sizes[quick],
                            environ,
                            folder=folder,
                        )
                    except MeasurementFailed as failure:
                        failures.append(f"{side}: {failure}")
                if len(found) == len(sides):
                    for name in found["here"].keys() & found[revision].keys():
                        pairs.setdefault((url, name), []).append(
                            (found["here"][name], found[revision][name])
                        )
    end()
    figures = [(figure, url) for measurement, url in chosen for figure in measurement.figures]
    if as_json:
        print(
            json.dumps(
                {
                    "figures": [
                        {"url": url, "name": figure.name, "pairs": pairs[url, figure.name]}
                        for figure, url in figures
                        if (url, figure.name) in pairs
                    ],
                    "failures": failures,
                },
                indent=2,
            )
        )
    else:
        _print(revision, figures, pairs)
        for text in failures:
            print(f"\nFAILED {text}")
    return 1 if failures else 0


def _print(revision: str, figures: Sequence[tuple[Figure, str]], pairs: Pairs) -> None:
    print(f"{'':40} {'here':>12} {revision[:12]:>12}   times better (from … to, over the rounds)")
    for figure, url in figures:
        measured = pairs.get((url, figure.name))
        if not measured:
            continue
        ratios = sorted(figure.ratio(here, there) for here, there in measured)
        here, there = (statistics.median(side) for side in zip(*measured, strict=True))
        print(
            f"{figure.name + ' ' + url:40} {here:12,.2f} {there:12,.2f}   "
            f"{statistics.median(ratios):.2f}  ({ratios[0]:.2f} … {ratios[-1]:.2f})"
        )
