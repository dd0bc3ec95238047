"""Invalid messages among good tasks: the good ones run, none is lost, memory and log stay small.

Here 330 messages a store; `make chaos` sends 10,000.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pika
import pytest
import redis

from machinery_py import AsyncResult, Server
from machinery_py.testing.waiting import HANG, wait_until
from tests.chaos import fuzz, fuzz_app
from tests.cli.app import children
from tests.support.servers import RabbitMQServer, RedisServer, require

FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))
COUNT = int(os.environ.get("FUZZ_MESSAGES", "10000" if FULL else "330"))
EACH = 500 if FULL else 50  # messages for each canary
SEED = int(
    os.environ.get("CHAOS_SEED") or (random.SystemRandom().randrange(1, 1_000_000) if FULL else 7)
)
QUIET = 120.0  # seconds; a guard
GROWTH = (
    1.5,
    64 * 1024,
)  # how many times the memory may grow after a third of the messages, and KiB besides
LINE = 2_048  # bytes
ROOT = pathlib.Path(__file__).parents[2]
KINDS = fuzz.KINDS

Put = Callable[[Sequence[bytes]], None]


@pytest.fixture(params=["redis", "amqp+redis"])
def stores(request: pytest.FixtureRequest) -> Iterator[tuple[str, Put]]:
    """The URLs, and what puts bytes on the queue as any program could."""
    require(RedisServer)
    with RedisServer() as results:
        if request.param == "redis":
            with redis.Redis.from_url(results.url) as client:
                yield (
                    results.url,
                    lambda bodies: collections.deque(
                        (client.rpush("machinery_tasks", one) for one in bodies), 0
                    ),
                )
            return
        require(RabbitMQServer)
        with (
            RabbitMQServer() as broker,
            pika.BlockingConnection(pika.URLParameters(broker.url)) as connection,
        ):
            channel = connection.channel()
            channel.confirm_delivery()

            def put(bodies: Sequence[bytes]) -> None:
                for body in bodies:
                    channel.basic_publish("", "machinery_tasks", body, mandatory=True)

            yield f"{broker.url} {results.url}", put


class Fuzzed:
    """A worker process, and what it was sent."""

    def __init__(self, url: str, put: Put, folder: pathlib.Path) -> None:
        self.server = Server(fuzz_app.config_of(url))
        self.server.register_task("canary", fuzz_app.canary.function)
        self.server.broker.declare(["machinery_tasks"])
        self.sent: collections.Counter[bytes] = collections.Counter()
        self._put = put
        self._canaries: list[AsyncResult[Any]] = []
        self._ledger, self._log = folder / "ledger", folder / "log"
        self._ledger.touch()
        environment = {
            **os.environ,
            "FUZZ_URL": url,
            "FUZZ_LEDGER": str(self._ledger),
            "PYTHONPATH": str(ROOT),
        }
        command = [
            sys.executable,
            "-m",
            "machinery_py",
            "worker",
            "tests.chaos.fuzz_app:server",
            "-c",
            "4",
            "--no-banner",
        ]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def send(self, first: int, last: int) -> None:
        """The messages of these numbers, and a canary behind them that has to get through."""
        bodies = [fuzz.fuzzed(SEED, number, KINDS)[1] for number in range(first, last)]
        self.sent.update(bodies)
        self._put(bodies)
        canary = self.server.get_registered_task("canary").send(first)
        self._canaries.append(canary)
        wait_until(
            lambda: canary.is_finished() or self.process.poll() is not None,
            QUIET,
            f"canary {first}\n{self.tail()}",
        )
        assert self.process.poll() is None, self.tail()
        assert canary.get(timeout=HANG) == first

    def memory(self) -> int:
        """KiB that are resident."""
        (pid,) = children(self.process.pid)
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0])

    def tail(self) -> str:
        return self._log.read_bytes()[-3_000:].decode(errors="replace")

    def lines(self) -> list[bytes]:
        return self._log.read_bytes().split(b"\n")

    def ended(self) -> list[str]:
        rows = [line.split("\t") for line in self._ledger.read_text().splitlines()]
        return [ast.literal_eval(uuid) for word, uuid in rows if word != "RETRY"]

    def is_quiet(self) -> bool:
        # What follows a fuzzed message may go to any queue, which nobody serves.
        return not any(
            one.waiting or one.running
            for one in self.server.broker.stats()
            if one.queue == "machinery_tasks"
        )

    def check(self) -> str:
        """Each message is a dead letter, has ended, or waits."""
        wait_until(
            lambda: self.is_quiet() or self.process.poll() is not None, QUIET, "the end of all"
        )
        page = ""

        def all_found() -> bool:
            nonlocal page
            ended = collections.Counter(self.ended())
            waiting = sum(one.delayed for one in self.server.broker.stats())
            letters = self.server.inspect.dead(limit=10 * COUNT)
            # A callback that was damaged may be a dead letter of its own.
            dead = [
                letter
                for letter in letters
                if letter.uuid not in ended and letter.body in self.sent
            ]
            page = (
                f"{len(ended)} ended, {len(dead)} dead, {waiting} waiting of {COUNT}; "
                f"seed {SEED}\n{self.tail()}"
            )
            assert max(ended.values()) == 1, page
            assert collections.Counter(letter.body for letter in dead) <= self.sent, page
            return len(ended) + len(dead) + waiting == COUNT

        with contextlib.suppress(
            AssertionError
        ):  # a dead letter is on its way for a moment in RabbitMQ
            wait_until(all_found, HANG)
        assert all_found(), page
        return page

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(HANG)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.server.close()


@pytest.mark.chaos
@pytest.mark.timeout(QUIET * (12 if FULL else 2))
def test_fuzzed_messages_do_not_disturb_other_tasks(
    stores: tuple[str, Put], tmp_path: pathlib.Path
) -> None:
    fuzzed = Fuzzed(*stores, tmp_path)
    try:
        warm = 0
        for first in range(0, COUNT, EACH):
            fuzzed.send(first, min(first + EACH, COUNT))
            if not warm and first >= COUNT // 3:
                warm = fuzzed.memory()
        page, full = fuzzed.check(), fuzzed.memory()
        print(f"{page}\n{warm:,} KiB after a third, {full:,} KiB at the end")

        assert full <= GROWTH[0] * warm + GROWTH[1]
        assert fuzzed.stop() == 0, fuzzed.tail()
        longest = max(fuzzed.lines(), key=len)
        assert len(longest) <= LINE, longest[:3_000]
    finally:
        fuzzed.close()
