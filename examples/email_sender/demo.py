"""Demo in a temporary folder: mail server, web service and workers.

It has sign-ups, a bulk, a scheduled digest, and trouble.

The exit code is 0 if every mail that was to arrive is there exactly once, and nothing else is.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from email import message_from_bytes
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
CRON = HERE.parent / "cron"  # the example with the digest
sys.path.insert(0, str(HERE))  # for `python -m`; a script has its folder there already
sys.dont_write_bytecode = True  # nothing is left behind beside the examples, either

from bulk import TEXT, follow, read_recipients  # noqa: E402
from mailserver import Mailbox  # noqa: E402
from tasks import bulk, server  # noqa: E402

LIMIT = 100.0  # seconds for all of it; some ten are enough, but a machine may be busy
OUTAGE = 2.0  # seconds without a mail server
OUTAGE_AT = 300  # mails of the bulk
THREADS = 8  # of the worker
STOP_TIMEOUT = 15.0  # seconds for a process to end in order
FORCE_AFTER = 5.0  # seconds that it gets when the demo has failed or was interrupted
LOOK = 0.05  # seconds between two looks
DIGEST_SPEC = "* * * * * *"  # each second: a demo has no minute
DIGESTS = 3  # that are waited for

SIGNUPS = [
    ("ada@example.com", "Ada"),
    ("grace@example.com", "Grace"),
    ("alan@example.com", "Alan"),
    ("emilie@example.com", "Émilie"),
    ("edsger@example.com", "Edsger"),
]
BUSY = ("busy@example.com", "Busy")  # 451 twice, then accepted
DROPPED = (
    "dropped@example.com",
    "Dropped",
)  # accepted, but the connection breaks before the client is told
GONE = ("gone@example.com", "Gone")  # 550: no such mailbox
WRONG = ("not an address", "Wrong")  # never gets past the web service
BULK_GONE = "reader0500@example.net"  # one of the bulk is refused for good, too
ANSWERS = {
    BUSY[0]: ["451", "451"],
    DROPPED[0]: ["drop"],
    GONE[0]: ["550"] * 50,
    BULK_GONE: ["550"] * 50,
}


class Trouble(Exception):
    """The demo failed; the text says how."""


class Demo:
    """State that the steps share. `started` is the start on the monotonic clock."""

    def __init__(self, folder: Path, mailbox: Mailbox) -> None:
        self.folder = folder
        self.mailbox = mailbox
        self.started = time.monotonic()
        self.address = ""  # of the web service
        self.dashboard = ""  # address
        self.uuids: dict[str, str] = {}  # task by recipient
        self.answer_times: list[float] = []

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.started:5.1f} s  {text}", flush=True)

    def check_time(self) -> None:
        if time.monotonic() - self.started > LIMIT:
            raise Trouble(f"not done after {LIMIT:g} s")

    def wait_until(self, predicate: Callable[[], bool]) -> None:
        pause = threading.Event()
        while not predicate():
            self.check_time()
            pause.wait(LOOK)

    # The web service, from outside

    def request(
        self, method: str, path: str, content: object = None, *, address: str = ""
    ) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection(address or self.address, timeout=10.0)
        try:
            connection.request(method, path, json.dumps(content) if content is not None else None)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def sign_up(self, email: str, name: str) -> int:
        """Post a sign-up; return the HTTP status."""
        began = time.perf_counter()
        status, answer = self.request("POST", "/signup", {"email": email, "name": name})
        if status == http.HTTPStatus.ACCEPTED:
            self.answer_times.append(time.perf_counter() - began)
            self.uuids[email] = answer["task"]
        return status

    def state(self, email: str) -> dict[str, Any]:
        return self.request("GET", f"/tasks/{self.uuids[email]}")[1]

    def is_finished(self, email: str) -> bool:
        return self.state(email)["state"] in ("SUCCESS", "FAILURE")


# The steps


def sign_ups(demo: Demo) -> None:
    people = [*SIGNUPS, BUSY, DROPPED, GONE]
    for email, name in people:
        if demo.sign_up(email, name) != http.HTTPStatus.ACCEPTED:
            raise Trouble(f"the sign-up of {email} was not accepted")
    if demo.sign_up(*WRONG) != http.HTTPStatus.BAD_REQUEST:
        raise Trouble(f"the sign-up of {WRONG[0]!r} was not refused")
    median = statistics.median(demo.answer_times)
    demo.say(
        f"{len(people)} sign-ups posted, answered in {1000 * median:.1f} ms (median); "
        "one with a wrong address refused"
    )
    demo.wait_until(lambda: all(demo.is_finished(email) for email, _ in people))
    for email, _ in people:
        state = demo.state(email)
        if state["state"] != ("FAILURE" if email == GONE[0] else "SUCCESS"):
            raise Trouble(f"the mail to {email} ended as {state}")
    demo.say(
        f"their mails are through; {BUSY[0]} was busy (451): {demo.state(BUSY[0])['runs']} runs"
    )
    demo.say(
        f"{DROPPED[0]}: the connection broke before the 250, "
        "so it was sent twice, under one Message-ID"
    )
    demo.say(f"{GONE[0]} failed for good: {demo.state(GONE[0])['error']}")


def send_bulk(demo: Demo) -> list[str]:
    """Send the bulk, with an outage in the middle; return the UUIDs of its tasks."""
    recipients = read_recipients()
    result = bulk("This week", recipients, TEXT)
    demo.say(
        f"a bulk of {len(recipients):,} accepted; "
        f"the mail server goes down for {OUTAGE:g} s on the way"
    )
    began = time.monotonic()
    down_at = 0.0

    def each_look(done: int) -> None:
        nonlocal down_at
        demo.check_time()
        if not down_at and done >= OUTAGE_AT:
            demo.mailbox.stop()
            down_at = time.monotonic()
        elif down_at and time.monotonic() - down_at >= OUTAGE:
            down_at = float("inf")
            demo.mailbox.start()

    text = follow(result, each_look)
    demo.say(f"{text}; {time.monotonic() - began:.1f} s")
    if text != f"This week: {len(recipients) - 1:,} of {len(recipients):,} delivered, 1 refused":
        raise Trouble(f"the report says {text!r}")
    return [one.uuid for one in result.group.results]


def check_mails(demo: Demo) -> None:
    """Check that each expected mail arrived exactly once, and no other."""
    expected = Counter({email: 1 for email, _ in [*SIGNUPS, BUSY, *read_recipients()]})
    expected[DROPPED[0]] = 2  # what the mail server saw; its reader sees one
    del expected[BULK_GONE]
    mails = demo.mailbox.mails()
    found = Counter(mail["to"] for mail in mails)
    for email in sorted(expected | found):
        if expected[email] != found[email]:
            raise Trouble(f"{email} has {found[email]} mails, not {expected[email]}")
    ids = {mail["message_id"] for mail in mails}
    if len(ids) != len(expected):
        raise Trouble(f"{len(ids):,} Message-IDs for {len(expected):,} mails")
    demo.say(
        f"the mail server has {len(mails):,} mails for {len(expected):,} readers "
        f"under {len(ids):,} Message-IDs: each reader keeps exactly one"
    )


def digests(demo: Demo) -> None:
    """Send the digest by its schedule, then once by hand; check that each reader gets each once."""
    demo.wait_until(
        lambda: any(one.name == "digest" and one.sent >= DIGESTS for one in server.schedules.list())
    )
    server.schedules.run_now("digest")
    server.schedules.pause("digest")  # sent ones are run, and no more are sent
    demo.wait_until(lambda: not any(one.waiting or one.running for one in server.inspect.queues()))
    mails = [
        message_from_bytes(path.read_bytes()) for path in (demo.folder / "outbox").glob("*.eml")
    ]
    news = Counter(
        (mail["To"], mail.get_payload()) for mail in mails if mail["Subject"].startswith("News")
    )
    sent, readers = server.schedules.get("digest").sent, {to for to, _ in news}
    if len(news) != sent * len(readers) or set(news.values()) != {1}:
        raise Trouble(f"{sent} ticks of the digest became {news}")
    demo.say(
        f"the digest, here due each second, came {sent} times, "
        f"the last one by hand: each once to {len(readers)} readers"
    )


def summary(demo: Demo, uuids: list[str]) -> None:
    states = server.backend.get_states([*uuids, *demo.uuids.values()])
    print("\nQUEUE            WAITING   HELD  DELAYED  DEAD")
    for queue in server.inspect.queues():
        print(
            f"{queue.queue:16} {queue.waiting:7,} {queue.running:6,} "
            f"{queue.delayed:8,} {queue.dead:5,}"
        )
        if queue.waiting or queue.running or queue.delayed or queue.dead:
            raise Trouble(f"queue {queue.queue!r} is not empty")
    ended = Counter(state.state.value for state in states.values())
    print(
        f"\n{len(states):,} mails: {ended['SUCCESS']:,} tasks succeeded, "
        f"{ended['FAILURE']:,} failed for good; "
        f"{sum(state.run for state in states.values()):,} runs had to be repeated"
    )
    _, errors = demo.request("GET", "/api/errors", address=demo.dashboard)
    failed = sum(group["count"] for group in errors["groups"])
    if failed != ended["FAILURE"]:
        raise Trouble(f"the dashboard shows {failed} failed tasks")
    if sys.stdin.isatty():
        input(f"\nThe dashboard is at http://{demo.dashboard}/ until you press Enter: ")


# The processes


@contextlib.contextmanager
def process(
    demo: Demo, name: str, command: list[str], environ: dict[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """Run a process, its errors in a file of the folder; ends it in order, or else by force."""
    with (demo.folder / f"{name}.log").open("w") as log:
        # A group of its own: Ctrl+C reaches only this program, which stops the others in order.
        child = subprocess.Popen(
            command,
            cwd=demo.folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            process_group=0,
        )
        try:
            yield child
            child.send_signal(signal.SIGTERM)
            began = time.monotonic()
            child.communicate(timeout=STOP_TIMEOUT)
            if child.returncode:
                raise Trouble(f"the {name} ended with {child.returncode}")
            demo.say(f"{name} stopped in {time.monotonic() - began:.1f} s")
        finally:
            if child.poll() is None:
                child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.communicate(timeout=FORCE_AFTER)
                child.kill()
                child.communicate()


def printed_address(child: subprocess.Popen[str]) -> str:
    """Return the host and port that the process prints first."""
    line = child.stdout.readline() if child.stdout else ""
    return line.partition("http://")[2].partition("/")[0].strip()


def run(demo: Demo) -> None:
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("SMTP_", "MAIL_"))
    }
    environ |= {
        "SMTP_HOST": "127.0.0.1",
        "SMTP_PORT": str(demo.mailbox.port),
        "MAIL_PATIENCE": "0.5",
        "PYTHONPATH": str(HERE),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(demo.folder),
    }
    machinery = [sys.executable, "-m", "machinery_py"]
    worker_command = [*machinery, "worker", "tasks", "-Q", "mail,bulk", "-c", str(THREADS)]
    clock = {"DIGEST_SPEC": DIGEST_SPEC, "OUTBOX": str(demo.folder / "outbox")}
    digest_command = [*machinery, "worker", "digest", "--app-dir", str(CRON), "-c", "2"]
    dashboard_command = [*machinery, "dashboard", "tasks", "--port", "0"]
    service_command = [sys.executable, str(HERE / "app.py"), "--port", "0"]
    # Stopped in reverse order: the senders, then the workers, then the mail server.
    with (
        process(demo, "worker", worker_command, environ),
        process(demo, "digest worker", digest_command, environ | clock),
        process(demo, "service", service_command, environ) as service,
        process(demo, "dashboard", dashboard_command, environ) as dashboard,
    ):
        demo.address, demo.dashboard = printed_address(service), printed_address(dashboard)
        demo.say(f"mail server, web service and workers started in {demo.folder}")
        demo.say(f"dashboard: http://{demo.dashboard}/")
        sign_ups(demo)
        uuids = send_bulk(demo)
        check_mails(demo)
        digests(demo)
        summary(demo, uuids)
        print()


def interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    signal.signal(signal.SIGTERM, interrupted)
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="machinery-demo-") as name:
        folder = Path(name)
        os.chdir(folder)  # the embedded store is a file in the working directory
        try:
            with Mailbox(folder, answers=ANSWERS) as mailbox:
                demo = Demo(folder, mailbox)
                run(demo)
            demo.say("all stopped; every mail is there exactly once")
        except Trouble as trouble:
            print(f"\ndemo failed: {trouble}", file=sys.stderr)
            for log in sorted(folder.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-3000:]}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        finally:
            server.close()
            os.chdir(before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
