"""The workers under test, and the faults that hit them. Each is recorded: what, whom, from, until.

kill      SIGKILL a worker, start another         term    SIGTERM one, start another; exit code 0
child     SIGKILL one of a worker's task processes
freeze    SIGSTOP one for longer than its lease   server  SIGKILL the server, restart on its files
clients   CLIENT KILL, pg_terminate_backend       scripts SCRIPT FLUSH
drop, reset, hole    a worker's proxy drops replies, resets its connections, lets nothing through
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

from machinery_py.worker.processes.pool import TRIES
from tests.chaos.history import Happened
from tests.chaos.plan import Fault, Plan
from tests.support.private import PrivateServer
from tests.support.private_postgres import PostgreSQLServer
from tests.support.private_redis import RedisServer
from tests.support.proxy import Proxy
from tests.support.supervised import children

ROOT = pathlib.Path(__file__).parents[2]
DROPPED = 0.2  # of the replies, while they are dropped
END = 45.0  # seconds that a worker has to end when it was asked to
APART = ("unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")  # needs root
LOOK = 0.02  # seconds between two looks at processes that have to end


class Member:
    """One worker process, and the proxy between it and the server, if there is one."""

    def __init__(self, name: str, slot: int, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.slot = slot
        self.process = process
        self.is_frozen = False
        self.only_ones_killed = 0  # task processes that were its only one

    def pids(self) -> list[int]:
        """The supervisor, which may be the child of `unshare`, and its worker process."""
        is_apart = self.process.args[0] == APART[0]  # type: ignore[index]  # a list, as Fleet has made it
        supervisors = children(self.process.pid) if is_apart else [self.process.pid]
        return [pid for one in supervisors for pid in (one, *children(one))]

    def signal(self, number: signal.Signals) -> None:
        """Send it to the supervisor; SIGSTOP and SIGCONT to all that is below it as well."""
        to_all = number in (signal.SIGSTOP, signal.SIGCONT)
        for pid in [*self.pids(), *self.task_processes()] if to_all else self.pids()[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def task_processes(self) -> list[int]:
        return [pid for worker in self.pids()[1:] for pid in children(worker)]

    def kill(self) -> None:
        """Kill the supervisor and its worker process, and wait until they are gone."""
        pids = self.pids()
        for pid in (self.process.pid, *pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


class Fleet:
    """Worker processes in numbered slots; a slot whose worker ends is filled again with another.

    With `apart` each lives in its own PID namespace, as on a host of its own: only missing
    heartbeats show that it has ended.
    """

    def __init__(
        self,
        plan: Plan,
        folder: pathlib.Path,
        urls: list[str],
        *,
        concurrency: int,
        apart: bool = False,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._urls = urls
        self._concurrency = concurrency
        self._prefix = APART if apart else ()
        self._names = itertools.count(1)
        self._slots: dict[int, Member] = {}
        self._leaving: list[tuple[Member, float]] = []
        self.incidents: list[str] = []
        self.faults: list[Happened] = []

    def start(self, slot: int) -> Member:
        name = f"w{next(self._names)}"
        environment = {
            **os.environ,
            "CHAOS_URL": self._urls[slot % len(self._urls)],
            "CHAOS_FOLDER": str(self._folder),
            "CHAOS_WORKER": name,
            "CHAOS_LEASE": str(self._plan.lease),
            "PYTHONPATH": str(ROOT),
        }
        command = [
            *self._prefix,
            sys.executable,
            "-m",
            "machinery_py",
            "worker",
            "tests.chaos.app:server",
            "-c",
            str(self._concurrency),
            "-n",
            name,
            "--no-banner",
            "--log-level",
            "warning",
        ]
        with (self._folder / f"log-{name}").open("wb") as log:
            process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        member = self._slots[slot] = Member(name, slot, process)
        return member

    @property
    def members(self) -> list[Member]:
        return [self._slots[slot] for slot in sorted(self._slots)]

    def on_slot(self, slot: int) -> set[str]:
        """The members that use this slot's proxy, also those asked to end that have not yet."""
        everybody = [*self.members, *(member for member, _ in self._leaving)]
        return {member.name for member in everybody if member.slot == slot}

    def pick(self, victim: float) -> Member | None:
        """Return a worker that is not frozen.

        None if it would be the last that is not frozen, or the last at work.

        On a slow machine Python may start too late for the plan; some faults are left out then.
        """
        awake = [member for member in self.members if not member.is_frozen]
        if len(awake) < min(2, len(self._slots)):
            return None
        chosen = awake[int(victim * len(awake))]
        spared = [member for member in awake if member is not chosen] or [chosen]
        return chosen if any(map(self._has_run, spared)) else None

    def kill(self, member: Member) -> None:
        now = time.monotonic()
        member.kill()
        self.note("kill", member.name, now, time.monotonic())
        self.start(member.slot)

    def ask_to_end(self, member: Member, *, replace: bool = True) -> None:
        del self._slots[member.slot]
        if self._prefix and not (self._folder / f"ledger-{member.name}").exists():
            # The first process of a namespace ignores SIGTERM until it has a handler.
            member.kill()
        else:
            self._leaving.append((member, time.monotonic()))
            member.signal(signal.SIGTERM)
        if replace:
            self.start(member.slot)

    def note(self, kind: str, worker: str, start: float, end: float, note: str = "") -> None:
        self.faults.append(Happened(kind=kind, worker=worker, start=start, end=end, note=note))

    def look(self) -> None:
        """See who has ended: those that were asked must have ended well, the others must not."""
        now = time.monotonic()
        for member, asked in list(self._leaving):
            code = member.process.poll()
            if code is None and now - asked < END:
                continue
            self._leaving.remove((member, asked))
            if code is None:
                member.kill()
                self.note("kill", member.name, now, time.monotonic(), "did not end")
            self.note("term", member.name, asked, now)
            # Told to end while Python was still starting, it had no handler yet.
            if code not in (0, -signal.SIGTERM) or (code and self._has_run(member)):
                took = f"{now - asked:.1f} s"
                self.incidents.append(
                    f"{member.name} ended with {code} after SIGTERM ({took}): {self._said(member)}"
                )
        for member in self.members:
            code = member.process.poll()
            if code is not None:
                self.incidents.append(
                    f"{member.name} ended by itself with {code}: {self._said(member)}"
                )
                self.note("kill", member.name, now, now, "ended by itself")
                self.start(member.slot)

    def _has_run(self, member: Member) -> bool:
        ledger = self._folder / f"ledger-{member.name}"
        return ledger.exists() and ledger.stat().st_size > 0

    def _said(self, member: Member) -> str:
        return (self._folder / f"log-{member.name}").read_text(errors="replace")[-1500:]

    def end(self) -> None:
        """Ask all to end, and wait for it."""
        for member in self.members:
            self.ask_to_end(member, replace=False)
        while self._leaving:
            self.look()
            time.sleep(LOOK)

    def close(self) -> None:
        """Whatever happened: no process is left."""
        for member in [*self.members, *(member for member, _ in self._leaving)]:
            if member.process.poll() is None:
                member.kill()
            member.process.wait()


class Nemesis:
    """Carries the plan's faults out, in a thread of its own."""

    def __init__(
        self,
        plan: Plan,
        fleet: Fleet,
        *,
        server: PrivateServer | None = None,
        proxies: dict[int, Proxy] | None = None,
    ) -> None:
        self._plan = plan
        self._fleet = fleet
        self._server = server
        self._proxies = proxies or {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="nemesis", daemon=True)
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._down = (
            0.0  # seconds in which there was no server; the plan's moments come so much later
        )
        self.failure: BaseException | None = None

    def __enter__(self) -> Nemesis:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.heal()

    def heal(self) -> None:
        """No more faults, and an end to those that last. Returns when all is well again."""
        self._stop.set()
        self._thread.join(60.0)
        if self.failure is not None:
            raise self.failure

    def _work(self) -> None:
        try:
            begin = time.monotonic()
            for fault in self._plan.faults():
                while (
                    left := begin + self._down + fault.at - time.monotonic()
                ) > 0 and not self._stop.is_set():
                    self._end_due()
                    self._fleet.look()
                    self._stop.wait(min(left, LOOK))
                if self._stop.is_set():
                    break
                self._do(fault)
        except BaseException as error:  # handed over by `heal`: a thread has nobody else to tell
            self.failure = error
        finally:
            self._end_due(everything=True)

    def _end_due(self, *, everything: bool = False) -> None:
        while self._ends and (everything or self._ends[0][0] <= time.monotonic()):
            heapq.heappop(self._ends)[2]()

    def _later(self, seconds: float, end: Callable[[], None]) -> None:
        heapq.heappush(self._ends, (time.monotonic() + seconds, next(self._numbers), end))

    def _do(self, fault: Fault) -> None:
        match fault.kind:
            case "server":
                self._kill_server(fault)
            case "clients" | "scripts":
                self._command(fault)
            case "drop" | "reset" | "hole":
                self._harm_link(fault)
            case _:
                self._harm_worker(fault)

    def _harm_worker(self, fault: Fault) -> None:
        member = self._fleet.pick(fault.victim)
        if member is None:
            return
        match fault.kind:
            case "kill":
                self._fleet.kill(member)
            case "term":
                self._fleet.ask_to_end(member)
            case "child":
                self._kill_child(member, fault.victim)
            case _:
                self._freeze(member, fault.length)

    def _kill_child(self, member: Member, victim: float) -> None:
        start, found = time.monotonic(), member.task_processes()
        # A worker whose first process is killed TRIES times cannot start, and says so.
        if len(found) > 1 or (found and member.only_ones_killed < TRIES - 1):
            member.only_ones_killed += len(found) == 1
            pid = found[int(victim * len(found))]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._fleet.note("child", member.name, start, time.monotonic(), str(pid))

    def _freeze(self, member: Member, seconds: float) -> None:
        if sum(not one.is_frozen for one in self._fleet.members) < 3:
            return
        start = time.monotonic()
        member.is_frozen = True
        member.signal(signal.SIGSTOP)

        def thaw() -> None:
            member.signal(signal.SIGCONT)
            member.is_frozen = False
            self._fleet.note("freeze", member.name, start, time.monotonic())

        self._later(seconds, thaw)

    def _kill_server(self, fault: Fault) -> None:
        assert self._server is not None
        start = time.monotonic()
        self._server.kill()
        self._stop.wait(fault.length)
        self._server.start()
        self._fleet.note("server", "", start, time.monotonic())
        self._down += time.monotonic() - start

    def _command(self, fault: Fault) -> None:
        start = time.monotonic()
        if isinstance(self._server, PostgreSQLServer):
            done = str(self._server.end_clients())
        else:
            assert isinstance(self._server, RedisServer)
            clients, scripts = ("CLIENT", "KILL", "TYPE", "normal"), ("SCRIPT", "FLUSH")
            done = str(self._server.cli(*(clients if fault.kind == "clients" else scripts)))
        self._fleet.note(fault.kind, "", start, time.monotonic(), done)

    def _harm_link(self, fault: Fault) -> None:
        slot, proxy = sorted(self._proxies.items())[int(fault.victim * len(self._proxies))]
        names = self._fleet.on_slot(slot)
        start = time.monotonic()
        if fault.kind == "reset":
            proxy.reset()
            for name in names:
                self._fleet.note("reset", name, start, time.monotonic())
            return
        if fault.kind == "drop":
            proxy.drop_replies(DROPPED)
        else:
            proxy.black_hole()

        def end() -> None:
            proxy.heal()
            for name in names | self._fleet.on_slot(slot):  # successors have the same proxy
                self._fleet.note(fault.kind, name, start, time.monotonic())

        self._later(fault.length, end)


@contextlib.contextmanager
def proxies_for(server: PrivateServer | None, workers: int) -> Iterator[dict[int, Proxy]]:
    """A proxy for each second slot."""
    with contextlib.ExitStack() as stack:
        slots = range(0, workers, 2) if server is not None else range(0)
        yield {
            slot: stack.enter_context(Proxy(server.port, seed=slot))
            for slot in slots
            if server is not None
        }
