"""Each example runs in its folder as its README.md says, with a worker process and no server."""

from __future__ import annotations

import contextlib
import csv
import datetime as dt
import email
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from machinery_py.testing import Harness
from machinery_py.testing.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
HANG = 150.0  # seconds


def environ(folder: Path, **more: str) -> dict[str, str]:
    """An environment with only the given settings of ours; all files go into the folder."""
    return {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(folder), **more}


@contextlib.contextmanager
def worker(module: str, place: Path, folder: Path, *options: str, **more: str) -> Iterator[None]:
    """Run `machinery worker module` in `folder`, with `place`'s application; it must end well."""
    child = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "machinery_py",
            "worker",
            module,
            "--app-dir",
            str(place),
            "--no-banner",
            *options,
        ],
        cwd=folder,
        env=environ(folder, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield
        child.send_signal(signal.SIGTERM)
        out, _ = child.communicate(timeout=HANG)
        assert child.returncode == 0, out
    finally:
        if child.poll() is None:
            child.kill()
            child.communicate()


def python(*arguments: str, folder: Path, patience: float = HANG, **more: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environ(folder, **more),
        timeout=patience,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_quickstart_equals_the_first_page_and_runs(tmp_path: Path) -> None:
    place = EXAMPLES / "quickstart"
    assert (place / "tasks.py").read_text() == (
        "from machinery_py import Server\n\nserver = Server()\n\n\n"
        "@server.task\ndef add(a: int, b: int) -> int:\n    return a + b\n"
    )

    with worker("tasks", place, tmp_path):
        out = python(
            "-c",
            "from tasks import add; print(add.send(2, 3).get(timeout=30))",
            folder=tmp_path,
            PYTHONPATH=str(place),
        )

    assert out == "5\n"


def test_async_sum_prints_the_output_of_its_readme(tmp_path: Path) -> None:
    place = EXAMPLES / "async_sum"

    with worker("sums", place, tmp_path, LONG_RUNNING_PERIOD="0.01"):
        out = python(str(place / "send.py"), folder=tmp_path)

    shown = re.findall(
        r"^(?:[A-Z ] .*|Retry:|Single task:)$", (place / "README.md").read_text(), re.MULTILINE
    )
    assert "  4 * (5 + 5 + (1 + 1)) = 48" in shown
    assert [
        line
        for line in shown
        if line.startswith("  ") and "…" not in line and line not in out.splitlines()
    ] == []
    assert out.splitlines()[-1] == "  done"


def test_demo_delivers_every_mail_once(tmp_path: Path) -> None:
    pytest.importorskip("aiosmtpd")
    before = sorted(path.name for path in (EXAMPLES / "email_sender").iterdir())

    out = python(str(EXAMPLES / "email_sender" / "demo.py"), folder=tmp_path)

    assert "each reader keeps exactly one" in out
    assert "999 of 1,000 delivered, 1 refused" in out
    assert re.search(
        r"the digest, .* came \d+ times, the last one by hand: each once to 2 readers", out
    )
    assert re.search(r"dashboard: http://127\.0\.0\.1:\d+/\n", out)
    assert list(tmp_path.iterdir()) == []
    assert sorted(path.name for path in (EXAMPLES / "email_sender").iterdir()) == before
    assert not children_of(tmp_path)


def children_of(folder: Path) -> list[str]:
    """The processes that were started with this folder as their place for temporary files."""
    found: list[str] = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (
                process.name.isdigit()
                and f"TMPDIR={folder}".encode() in (process / "environ").read_bytes()
            ):
                found.append((process / "cmdline").read_text())
    return found


def test_a_wrong_sign_up_is_refused_and_sends_nothing(tmp_path: Path) -> None:
    place = EXAMPLES / "email_sender"
    post = """
import http.client, json, sys
from tasks import server
connection = http.client.HTTPConnection(sys.argv[1], timeout=30)
for body in sys.argv[2:]:
    connection.request("POST", "/signup", body)
    answer = connection.getresponse()
    print(answer.status, json.loads(answer.read())["error"])
print(sum(queue.waiting for queue in server.inspect.queues()))
"""
    command = [sys.executable, str(place / "app.py"), "--port", "0"]
    service = subprocess.Popen(
        command, cwd=tmp_path, env=environ(tmp_path), stdout=subprocess.PIPE, text=True
    )
    try:
        assert service.stdout is not None
        address = service.stdout.readline().strip().removeprefix("http://")
        bodies = [
            "no json",
            "[]",
            '{"email": "ada@example.com"}',
            '{"email": "ada", "name": "Ada"}',
            json.dumps({"email": "ada@example.com\nBcc: all@example.com", "name": "Ada"}),
            json.dumps({"email": "ada@example.com", "name": "Ada\nLovelace"}),
            json.dumps({"email": "ada@example.com", "name": "A" * 20_000}),
        ]

        out = python(
            "-c", post, address, *bodies, folder=tmp_path, PYTHONPATH=str(place)
        ).splitlines()
    finally:
        service.terminate()
        service.communicate(timeout=HANG)

    assert [line[:3] for line in out[:-1]] == ["400"] * len(bodies)
    assert out[-1] == "0"
    assert service.returncode == 0


def test_the_recipients_are_a_thousand_different_ones() -> None:
    text = (EXAMPLES / "email_sender" / "recipients.csv").read_text(encoding="utf-8")

    rows = list(csv.DictReader(io.StringIO(text)))

    assert len({row["email"] for row in rows}) == len(rows) == 1000
    assert all(row["name"] for row in rows)


def test_progress_bar_prints_lines_without_a_terminal() -> None:
    script = """
import io, sys
from progress import Progress
class Terminal(io.StringIO):
    encoding = "utf-8"
    def isatty(self): return True
for out in (io.StringIO(), Terminal()):
    with Progress(200, "mails", out) as bar:
        for done in range(201):
            bar.show(done, "(3 to be tried again)" if done == 100 else "")
    print(repr(out.getvalue()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG,
        env={
            **os.environ,
            "PYTHONPATH": str(EXAMPLES / "email_sender"),
            "PYTHONIOENCODING": "utf-8",
        },
    )

    plain, moving = done.stdout.splitlines()
    assert plain.count("mails: ") == 11
    assert "100 of 200" in plain and "(3 to be tried again)" in plain
    assert "█" * 32 + " 200 of 200" in moving
    assert moving.endswith("\\n'")


def test_a_report_that_failed_goes_on_from_the_customer_that_failed(tmp_path: Path) -> None:
    place = EXAMPLES / "nightly_report"
    mail, orders = tmp_path / "mail.txt", (place / "orders.json").read_text()
    (tmp_path / "orders.json").write_text(orders)

    def flow(*words: str) -> str:
        line = ("-m", "machinery_py", "flow", "report", *words, "--app-dir", str(place))
        done = subprocess.run(
            [sys.executable, *line],
            check=False,
            cwd=tmp_path,
            env=environ(tmp_path, PYTHONIOENCODING="utf-8"),
            capture_output=True,
            text=True,
            timeout=HANG,
        )
        return done.stdout + done.stderr

    # At two o'clock the schedule would send one more.
    with worker("report", place, tmp_path, "--no-scheduler"):
        uuid = python(str(place / "report.py"), folder=tmp_path).strip()
        wait_until((tmp_path / "alarm.txt").exists, HANG)
        wait_until(lambda: "3 of 3 steps  FAILURE" in flow(uuid), HANG)
        assert "2 SUCCESS, 1 FAILURE (ValueError: orders of linus: unsupp" in flow(uuid[:13])

        python(str(place / "report.py"), "--partial", folder=tmp_path)
        wait_until(lambda: mail.exists() and mail.read_text().count("\n") == 2, HANG)
        text = "2 customers, 142.40 in all\nmissing: orders of linus: unsupported"
        assert mail.read_text().startswith(text)

        (tmp_path / "orders.json").write_text(orders.replace('"seven"', "7.0"))
        assert flow(uuid, "retry") == "sent 1 task again\n"
        wait_until(lambda: "3 of 3 steps  SUCCESS" in flow(uuid), HANG)

    assert mail.read_text() == "3 customers, 164.40 in all\n"
    assert len((tmp_path / "alarm.txt").read_text().splitlines()) == 1
    line = ("-m", "machinery_py", "periodic", "report", "--app-dir", str(place))
    assert "0 2 * * *" in python(*line, folder=tmp_path)


def test_the_digest_comes_by_the_clock_from_the_command_line(tmp_path: Path) -> None:
    place = EXAMPLES / "cron"
    outbox = tmp_path / "outbox"

    spec = {"DIGEST_SPEC": "* * * * * *"}
    with worker("digest", place, tmp_path, **spec), worker("digest", place, tmp_path, **spec):
        wait_until(
            lambda: len(list(outbox.glob("*.eml"))) >= 6, HANG, "three digests for two readers"
        )

    mails = [email.message_from_bytes(path.read_bytes()) for path in outbox.glob("*.eml")]
    assert {mail["To"] for mail in mails} == {"ada@example.com", "grace@example.com"}
    listing = python(
        "-m", "machinery_py", "periodic", "digest", "--app-dir", str(place), folder=tmp_path
    )
    assert re.search(
        r"^digest +\* \* \* \* \* \* +Europe/Berlin +digest +on +\d{4}-", listing, re.MULTILINE
    ), listing


def test_two_workers_are_polite_to_an_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = EXAMPLES / "polite_api"
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.chdir(tmp_path)
    # Less than the rate of the task: it is also told to wait.
    api, taken, refused = importlib.import_module("api").serve(0, limit=6)
    monkeypatch.setenv("API_URL", url := f"http://127.0.0.1:{api.server_port}")
    orders = importlib.import_module("orders")
    with api, contextlib.closing(orders.server):
        threading.Thread(target=api.serve_forever, daemon=True).start()
        for order in range(8):
            for tenant in ("acme", "globex"):
                orders.tell.send(tenant, order)
            orders.cancel.send(("initech", order))

        two = [worker("orders", place, tmp_path, API_URL=url) for _ in range(2)]
        with two[0], two[1]:
            wait_until(lambda: sum(map(len, taken.values())) == 24, HANG, "all orders")
        api.shutdown()

    assert {tenant: len(times) for tenant, times in taken.items()} == dict.fromkeys(
        ("acme", "globex", "initech"), 8
    )
    assert set(refused) == {"acme", "globex", "initech"}
    cancelled = taken.pop("initech")
    assert len(set(cancelled)) < 8  # in few calls
    for times in taken.values():
        assert times[5] - times[0] >= 0.4  # ten a second


def test_onboarding_pays_when_it_is_approved_after_three_short_days(tmp_path: Path) -> None:
    place = EXAMPLES / "onboarding"

    with worker("onboarding", place, tmp_path, DAY="0.1"):
        out = python(
            "-c",
            "from onboarding import onboard, server; sent = onboard.send('ada'); "
            "server.signal(sent.uuid, 'approval', {'yes': True}); print(sent.get(timeout=60))",
            folder=tmp_path,
            PYTHONPATH=str(place),
        )

    assert out == "receipt-1\n"


def test_onboarding_passes_its_own_tests(tmp_path: Path) -> None:
    place = EXAMPLES / "onboarding"

    out = python(
        *("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--rootdir", str(place)),
        *("-c", str(place / "setup.cfg"), str(place)),
        folder=tmp_path,
    )

    [shown] = re.findall(r"^onboard: .*\n.*\n.*$", (place / "README.md").read_text(), re.MULTILINE)
    assert shown in out
    assert "6 passed" in out


def test_the_file_store_passes_the_conformance_suites(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    place = EXAMPLES / "store"
    assert len((place / "file_store.py").read_text().splitlines()) <= 250

    out = python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "files")),
        *("--rootdir", str(place), str(place)),
        folder=tmp_path,
        patience=4 * HANG,  # hundreds of tests
    )

    assert re.search(r"^\d{3} passed", out, re.MULTILINE), out


def test_the_sqs_store_passes_the_conformance_suites(tmp_path: Path) -> None:
    pytest.importorskip("boto3")
    pytest.importorskip("moto")
    place = EXAMPLES / "store-sqs"

    out = python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "files")),
        *("--rootdir", str(place), str(place)),
        folder=tmp_path,
        patience=4 * HANG,  # hundreds of tests
    )

    assert re.search(r"^\d{2,3} passed", out, re.MULTILINE), out


def test_a_year_of_digests_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "cron"))
    monkeypatch.setenv("OUTBOX", str(tmp_path / "outbox"))
    digest = importlib.import_module("digest")
    berlin = ZoneInfo("Europe/Berlin")

    with Harness(digest.server) as machinery:
        digest.server.schedules.change(
            "watch", spec="0 */6 * * *"
        )  # the other 100,000 looks show nothing new
        start = machinery.clock.now().astimezone(berlin)
        for _ in range(365):
            machinery.advance(days=1)
            machinery.drain()
        end = machinery.clock.now().astimezone(berlin)
        sent = machinery.sent

    headers = [one.headers["machinery_tick"] for one in sent if one.name == "digest"]
    ticks = [dt.datetime.fromisoformat(header).astimezone(berlin) for header in headers]
    days = [(start + dt.timedelta(days=number)).date() for number in range(367)]
    mornings = [dt.datetime.combine(day, dt.time(8), berlin) for day in days if day.weekday() < 5]
    assert ticks == [morning for morning in mornings if start < morning <= end]
    assert sum(one.name == "invoices" for one in sent) in (12, 13)
    assert (
        sum(one.name == "watch" for one in sent) == 365
    )  # nothing runs while a day passes, and it leaves out overlaps
    assert len(list((tmp_path / "outbox").glob("*.eml"))) == 2 * len(ticks) + sum(
        one.name == "invoices" for one in sent
    )
