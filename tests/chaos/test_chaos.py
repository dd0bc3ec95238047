"""A short chaos run: a few thousand tasks, a kill each 0.7 s, a freeze.

For long ones: `python -m tests.chaos.run`.
"""

from __future__ import annotations

import os
import pathlib
import random

import pytest

from tests.chaos.checker import Verdict
from tests.chaos.run import Options, run
from tests.support.servers import PostgreSQLServer, RedisServer, require

FIXED = 7
FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))
RANDOM = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(1, 1_000_000))
SEEDS = [
    pytest.param(FIXED, id="fixed"),
    *[pytest.param(RANDOM, id="random")] * FULL,
]  # `make chaos`: both
HANG = 120.0  # seconds; a guard, the run takes a tenth of it


def chaos(url: str, seed: int, folder: pathlib.Path, *, tasks: int = 3000) -> Verdict:
    """One short run; its page is printed, and pytest shows it when the test fails."""
    print(
        f"again: python -m tests.chaos.run --url {url} --tasks {tasks} "
        f"--kill-every 0.7 --rate 400 --seed {seed}"
    )
    folder.mkdir(exist_ok=True)
    verdict = run(
        Options(
            url=url, tasks=tasks, kill_every=0.7, rate=400.0, seed=seed, limit=HANG, quiet=True
        ),
        folder,
    )
    print((folder / "page.txt").read_text())
    return verdict


@pytest.mark.chaos
@pytest.mark.timeout(2 * HANG)
@pytest.mark.parametrize("seed", SEEDS)
def test_sqlite_loses_and_doubles_nothing_under_kills(seed: int, tmp_path: pathlib.Path) -> None:
    verdict = chaos("sqlite", seed, tmp_path / "run")

    assert verdict.word == "PASSED", verdict.page(f"seed {seed}")
    assert "kill" in str(verdict.figures["faults"])


@pytest.mark.chaos
@pytest.mark.timeout(2 * HANG)
@pytest.mark.parametrize("seed", SEEDS)
def test_postgresql_loses_and_doubles_nothing_under_kills(
    seed: int, tmp_path: pathlib.Path
) -> None:
    require(PostgreSQLServer)

    verdict = chaos("postgresql", seed, tmp_path / "run")

    assert verdict.word == "PASSED", verdict.page(f"seed {seed}")
    assert "kill" in str(verdict.figures["faults"])


@pytest.mark.chaos
@pytest.mark.timeout(2 * HANG)
@pytest.mark.parametrize("seed", SEEDS)
def test_redis_loses_and_doubles_nothing_under_kills(seed: int, tmp_path: pathlib.Path) -> None:
    require(RedisServer)

    verdict = chaos("redis", seed, tmp_path / "run")

    assert verdict.word == "PASSED", verdict.page(f"seed {seed}")
    assert "kill" in str(verdict.figures["faults"])
