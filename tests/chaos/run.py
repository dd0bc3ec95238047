"""One chaos run: workers, a load, a nemesis, an observer; then healing, draining, and the verdict.

    python -m tests.chaos.run --url sqlite --tasks 20000 --workers 4 --kill-every 2 --seed 7

`--url` is any store's, or a broker's and a backend's with a space between. "sqlite" is a file in
the run's folder, "redis" a private server with an append-only file, "postgresql" a private one, and
"amqp+redis" a private RabbitMQ with results in a private Redis; the first is harmed. The folder
keeps the plan, ledgers, journals, logs, faults, and the verdict.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from machinery_py import Server
from machinery_py.errors import MachineryError
from tests.chaos.app import config_of
from tests.chaos.checker import Verdict, check
from tests.chaos.history import Final, dump_faults, new_history, read_folder
from tests.chaos.nemesis import ROOT, Fleet, Nemesis, proxies_for
from tests.chaos.observer import Observer
from tests.chaos.plan import Plan
from tests.support.private import PrivateServer
from tests.support.servers import PostgreSQLServer, RabbitMQServer, RedisServer

QUIET = 0.05  # seconds between two looks whether all is done
LOOKS = 20  # in a row, that must find nothing
STORE = 1000  # states that are read at once
#: Faults that a server cannot have. AMQP has no replies that could be left out: a connection is
#: whole or broken.
SPARED = {RabbitMQServer: ("clients", "scripts", "drop"), PostgreSQLServer: ("scripts",)}
PASSED, FAILED, INVALID = 0, 1, 2  # exit codes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a run is to be like. `chaos`: of the tasks, how many have run when healing begins."""

    url: str = "sqlite"
    tasks: int = 20_000
    workers: int = 4
    concurrency: int = 4
    kill_every: float = 2.0
    lease: float = 2.0
    rate: float = 0.0
    seed: int = 0
    chaos: float = 0.95
    limit: float = 600.0  # seconds, for all
    apart: int = 0  # 1: each worker as if on a host of its own; needs root
    quiet: bool = False


def run(options: Options, folder: pathlib.Path) -> Verdict:
    """The whole run; ends every process that it started."""
    with contextlib.ExitStack() as stack:
        harmed, broker, backend = _stores(options.url, folder, stack)
        plan = Plan(
            seed=options.seed,
            tasks=options.tasks,
            workers=options.workers,
            kill_every=options.kill_every,
            lease=options.lease,
            with_server=harmed is not None,
            spared=SPARED.get(type(harmed), ()),
        )
        plan.store(folder / "plan.json")
        proxies = stack.enter_context(proxies_for(harmed, options.workers))
        urls = [
            f"{proxies[slot].through(broker) if slot in proxies else broker} {backend}".strip()
            for slot in range(options.workers)
        ]
        url = f"{broker} {backend}".strip()
        server = Server(config_of(url, options.lease))
        stack.callback(server.close)
        server.broker.declare([server.config.default_queue])
        fleet = Fleet(
            plan, folder, urls, concurrency=options.concurrency, apart=bool(options.apart)
        )
        stack.callback(fleet.close)
        forgets = isinstance(harmed, PostgreSQLServer)
        return _Controller(options, plan, folder, url, server, fleet, forgets=forgets).go(
            lambda: Nemesis(plan, fleet, server=harmed, proxies=proxies)
        )


def _stores(
    wanted: str, folder: pathlib.Path, stack: contextlib.ExitStack
) -> tuple[PrivateServer | None, str, str]:
    """The server to harm, if any, and the URLs of broker and backend ("" if they are one)."""
    if wanted == "redis":
        redis = stack.enter_context(RedisServer(appendonly=True))
        return redis, redis.url, ""
    if wanted == "postgresql":
        postgresql = stack.enter_context(PostgreSQLServer())
        return postgresql, postgresql.url, ""
    if wanted == "amqp+redis":
        rabbit = stack.enter_context(RabbitMQServer())
        return rabbit, rabbit.url, stack.enter_context(RedisServer(appendonly=True)).url
    broker, _, backend = wanted.partition(" ")
    return None, f"sqlite:///{folder}/chaos.db" if broker == "sqlite" else broker, backend


class _Controller:
    """Warm-up, chaos, healing, drain, dump."""

    def __init__(
        self,
        options: Options,
        plan: Plan,
        folder: pathlib.Path,
        url: str,
        server: Server,
        fleet: Fleet,
        *,
        forgets: bool,
    ) -> None:
        self._options = options
        self._plan = plan
        self._folder = folder
        self._url = url
        self._server = server
        self._fleet = fleet
        self._begin = time.monotonic()
        self._said = 0.0
        self._starts = Tally(folder)
        self._items = plan.items()
        self._history = new_history(self._items)
        self._history.forgets = forgets
        self._began_at = dt.datetime.now(dt.timezone.utc)

    def go(self, new_nemesis: Callable[[], Nemesis]) -> Verdict:
        observer = Observer(self._url, self._options.lease, list(self._history.calls))
        with _loader(self._plan, self._options, self._folder, self._url) as loader, observer:
            for slot in range(self._options.workers):
                self._fleet.start(slot)
            self._wait("workers", lambda: self._starts.count() > 0)
            goal = self._options.chaos * len(self._history.calls)
            with new_nemesis():
                self._wait(
                    "chaos",
                    lambda: (
                        self._starts.count() >= goal
                        or (loader.poll() is not None and self._stays_idle())
                    ),
                )
            chaos = time.monotonic() - self._begin
            self._wait("loading", lambda: loader.poll() is not None)
            if loader.returncode:
                raise RuntimeError(f"the loader has failed; see {self._folder}/loader.log")
            self._history.drained = self._wait("draining", self._is_drained)
            # Live workers also give up the dead that held nothing, after a lease and two looks.
            self._wait("burying", self._are_dead_forgotten, at_most=3 * self._options.lease)
        drained = time.monotonic() - self._begin
        self._history.samples = observer.samples
        self._dump()
        verdict = check(self._history)
        verdict.figures = {
            "seed": self._plan.seed,
            "calls planned": len(self._history.calls),
            "chaos, seconds": round(chaos, 1),
            "all, seconds": round(drained, 1),
            "tasks/s": round(len(self._history.runs) / drained),
            **verdict.figures,
        }
        self._store(verdict)
        return verdict

    # Waiting

    def _wait(
        self, what: str, condition: Callable[[], object], *, at_most: float = float("inf")
    ) -> bool:
        """Until it is true, or the time is up: then False."""
        deadline = min(time.monotonic() + at_most, self._begin + self._options.limit)
        while not condition():
            if what != "chaos":  # then the nemesis looks
                self._fleet.look()
            if time.monotonic() > deadline:
                return False
            self._say(what)
            time.sleep(QUIET)
        return True

    def _say(self, what: str) -> None:
        now = time.monotonic()
        if not self._options.quiet and now - self._said >= 1.0:
            self._said = now
            print(
                f"{now - self._begin:6.1f} s  {what:<9} {self._starts.count():>7} runs "
                f"of {len(self._history.calls)} calls, "
                f"{len(self._fleet.faults)} faults, {self._queues()}",
                flush=True,
            )

    def _queues(self) -> str:
        try:
            stats = self._server.broker.stats()
        except MachineryError as error:
            return f"no answer: {error}"
        return ", ".join(
            f"{one.waiting} waiting, {one.running} held, {one.delayed} delayed" for one in stats
        )

    def _is_idle(self) -> bool:
        try:
            return not any(
                one.waiting or one.running or one.delayed for one in self._server.broker.stats()
            )
        except MachineryError:
            return False

    def _stays_idle(self) -> bool:
        """A quorum queue whose server just came back may have no leader, and counts as empty."""
        for _ in range(LOOKS):
            if not self._is_idle():
                return False
            time.sleep(QUIET)
        return True

    def _is_drained(self) -> bool:
        """No message, ready group or outbox, seen twice, since groups become messages."""
        for _ in range(2):
            if (
                not self._stays_idle()
                or self._server.backend.ready_groups(100)
                or self._server.backend.unsent(100, older_than=0.0)
            ):
                return False
            if not self._is_idle():
                return False
        return True

    def _are_dead_forgotten(self) -> bool:
        try:
            registered = {one.name for one in self._server.broker.workers()}
        except MachineryError:
            return False
        return registered <= {member.name for member in self._fleet.members}

    # The end

    def _dump(self) -> None:
        history = self._history
        if not history.drained:
            history.left += [
                f"not drained within {self._options.limit:g} s: {self._queues()}",
                f"ready groups: "
                f"{[one.group_uuid for one in self._server.backend.ready_groups(20)]}",
            ]
            self._show_held()
        self._fleet.end()
        read_folder(history, self._folder)
        history.faults, history.incidents = self._fleet.faults, self._fleet.incidents
        uuids = list(
            dict.fromkeys([*history.calls, *history.sent, *(one.uuid for one in history.runs)])
        )
        for start in range(0, len(uuids), STORE):
            for uuid, state in self._server.backend.get_states(
                uuids[start : start + STORE]
            ).items():
                history.states[uuid] = Final(
                    state=state.state,
                    results=tuple(arg.value for arg in state.results),
                    error=state.error,
                    error_type=state.error_type,
                )
                if uuid in history.samples:
                    history.samples[uuid].append((state.run, state.state))
        history.strikes = {
            letter.uuid: letter.strikes for letter in self._server.inspect.dead(limit=100_000)
        }
        history.doubles = not self._server.broker.features.deduplicates
        if self._server.backend.features.listing:
            counted = self._server.backend.finished_since(
                self._began_at - dt.timedelta(seconds=2.0)
            )
            history.finished = sum(one.succeeded + one.failed for one in counted)
        if history.drained:
            history.left += self._left()

    def _show_held(self) -> None:
        waiting = [
            message.uuid
            for message in self._server.broker.pending(self._server.config.default_queue, 20)
        ]
        self._history.left.append(f"workers: {self._server.broker.workers()}; waiting: {waiting}")

    def _left(self) -> list[str]:
        """I20: what is in the stores now that everybody has gone."""
        broker, backend = self._server.broker, self._server.backend
        left = [f"{one}" for one in broker.stats() if one.waiting or one.running or one.delayed]
        left += [f"worker {one.name} ({one.pid})" for one in broker.workers()]
        left += [
            f"group {one.group_uuid} is still to be settled" for one in backend.ready_groups(100)
        ]
        left += [f"outbox {key}" for key, _ in backend.unsent(100, older_than=0.0)]
        dead = self._server.inspect.dead(limit=1000)
        left += [f"dead letter {one.uuid}: {one.reason}" for one in dead if one.reason != "poison"]
        return left

    def _store(self, verdict: Verdict) -> None:
        dump_faults(self._history.faults, self._folder / "faults.jsonl")
        (self._folder / "verdict.json").write_text(json.dumps(verdict.as_dict(), indent=1))
        (self._folder / "page.txt").write_text(verdict.page(f"{self._options}"))


class Tally:
    """Counts the runs that have started, as the ledgers grow."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._read: dict[pathlib.Path, int] = {}
        self._count = 0

    def count(self) -> int:
        for path in self._folder.glob("ledger-*"):
            at = self._read.get(path, 0)
            if path.stat().st_size > at:
                with path.open("rb") as file:
                    file.seek(at)
                    news = file.read()
                self._read[path] = at + len(news)
                self._count += news.count(b"start\t")
        return self._count


@contextlib.contextmanager
def _loader(
    plan: Plan, options: Options, folder: pathlib.Path, url: str
) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        sys.executable,
        "-m",
        "tests.chaos.load",
        str(folder),
        url,
        str(plan.seed),
        str(plan.tasks),
        str(options.rate),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (folder / "loader.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def main() -> int:
    """The command line; prints the page, and exits with 0 (passed), 1 (failed) or 2 (invalid)."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.run", description="workers are killed while tasks run"
    )
    for field in dataclasses.fields(Options):
        if field.name != "quiet":
            parser.add_argument(
                f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default
            )
    parser.add_argument(
        "--folder", type=pathlib.Path, help="default: a new one in the system's folder for such"
    )
    arguments = vars(parser.parse_args())
    folder: pathlib.Path = arguments.pop("folder") or pathlib.Path(
        tempfile.mkdtemp(prefix="chaos-")
    )
    folder.mkdir(parents=True, exist_ok=True)
    options = Options(
        **{**arguments, "seed": arguments["seed"] or random.SystemRandom().randrange(1, 10**6)}
    )
    print(f"seed {options.seed}, folder {folder}", flush=True)
    verdict = run(options, folder)
    print((folder / "page.txt").read_text())
    return PASSED if verdict.passed else FAILED if verdict.valid else INVALID


if __name__ == "__main__":
    sys.exit(main())
