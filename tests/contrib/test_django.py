"""The Django app: its settings, its command, and the project of examples/django with a worker."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from machinery_py.testing.waiting import wait_until
from tests.docs.pages import ROOT, blocks, environment

PROJECT = ROOT / "examples" / "django"
PAGE = "docs/how-to/django.md"
HANG = 60.0  # seconds; a guard


def run(words: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,  # not the project's: manage.py may be called from anywhere
        env=environment(folder, SHOP_DATA=str(folder), **more),
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )


def manage(folder: Path, *words: str) -> str:
    done = run([str(PROJECT / "manage.py"), *words], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def in_project(folder: Path, program: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the project's settings, as a web process does."""
    more = {"DJANGO_SETTINGS_MODULE": "shop.settings", "PYTHONPATH": str(PROJECT), **more}
    return run(["-c", f"import django\ndjango.setup()\n{program}"], folder, **more)


GET = (
    "from django.test import Client\nimport json\nprint(json.dumps(Client().get({path!r}).json()))"
)


def get(folder: Path, path: str) -> dict[str, Any]:
    done = in_project(folder, GET.format(path=path))
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture
def data(tmp_path: Path) -> Path:
    manage(tmp_path, "migrate", "--verbosity", "0")
    return tmp_path


@contextlib.contextmanager
def working(words: list[str], folder: Path) -> Iterator[None]:
    """A live worker; it must end well."""
    process = subprocess.Popen(
        [sys.executable, *words, "--no-banner"],
        cwd=folder,
        env=environment(folder, SHOP_DATA=str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=HANG)
        assert process.returncode == 0, out
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture(params=["thread", "process"])
def worker(request: pytest.FixtureRequest, data: Path) -> Iterator[None]:
    words = ["machinery", "worker", "--pool", str(request.param)]
    with working([str(PROJECT / "manage.py"), *words], data):
        yield


@pytest.mark.parametrize("view", ["order", "order-for-sure"])
def test_live_worker_runs_what_a_view_sent(worker: None, data: Path, view: str) -> None:
    uuid = get(data, f"/{view}/tea")["task"]

    wait_until(lambda: get(data, f"/receipt/{uuid}")["text"] is not None, HANG, "the receipt")

    assert get(data, f"/receipt/{uuid}") == {"text": "one tea, with thanks"}
    rows = in_project(data, "from shop.models import Receipt\nprint(Receipt.objects.get().text)")
    assert rows.stdout == "one tea, with thanks\n"
    assert "SUCCESS  1 " in manage(data, "machinery", "send", "count_receipts", "--wait")


PROCESSES = """
from machinery_py.contrib.django import server
from machinery_py.testing.harness import swapped
with swapped(server), server.new_worker("w", 1, pool="process"):
    print(server.get_registered_task("count_receipts").send().get(timeout=60))
"""


def test_task_process_of_any_worker_has_the_tasks_of_the_project(data: Path) -> None:
    done = in_project(data, PROCESSES)

    assert done.stdout == "0\n", done.stderr


CHANGE = """
from pathlib import Path
import shop.tasks
from machinery_py.contrib.django import server
from machinery_py.testing.waiting import wait_until
def said():
    return server.get_registered_task("say").send().get(timeout=60)
assert said() == "old"
path = Path(shop.tasks.__file__)
path.write_text(path.read_text().replace("'old'", "'new!'"))
wait_until(lambda: said() == "new!", 60, "the new code")
"""


def test_worker_with_reload_runs_changed_code(tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(PROJECT, project)
    with (project / "shop" / "tasks.py").open("a") as file:
        file.write("\n\n@server.task\ndef say() -> str:\n    return 'old'\n")

    with working([str(project / "manage.py"), "machinery", "worker", "--reload"], tmp_path):
        done = in_project(tmp_path, CHANGE, PYTHONPATH=str(project))

    assert done.returncode == 0, done.stderr


def test_tests_of_the_project_pass(tmp_path: Path) -> None:
    done = run([str(PROJECT / "manage.py"), "test", "shop"], tmp_path)

    assert done.returncode == 0, done.stderr
    assert "Ran 6 tests" in done.stderr


def test_command_has_the_exit_code_of_machinery(data: Path) -> None:
    done = run([str(PROJECT / "manage.py"), "machinery", "send", "write_recipt", "1"], data)

    assert done.returncode == 2
    assert "write_receipt" in done.stderr  # the one that was meant


def test_help_and_advice_name_manage_py_and_no_app(data: Path) -> None:
    manage(data, "machinery", "send", "write_receipt", "1")

    told = [manage(data, "machinery", *words, "--help") for words in ((), ("worker",), ("send",))]
    doctor = run([str(PROJECT / "manage.py"), "machinery", "doctor"], data)
    settings = manage(data, "machinery", "config")

    assert [one.partition("\n")[0] for one in told] == [
        "usage: manage.py machinery [-h] [--version] COMMAND ...",
        "usage: manage.py machinery worker [option …]",
        "usage: manage.py machinery send TASK [ARGUMENT …] [option …]",
    ]
    assert "  manage.py machinery send add 20 22 --wait\n" in told[2]
    assert not [one for one in told if "APP" in one or "server" in one.partition("examples:")[2]]
    advice = "(start one: python manage.py machinery worker -Q machinery_tasks)"
    assert doctor.stdout.count(advice) == 1, doctor.stdout + doctor.stderr
    assert settings.count("settings.MACHINERY") == 4  # three stores, results_expire_in


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("{'default_que': 'x'}", "settings.MACHINERY: default_que: unknown key"),
        ("{'lease': 'x'}", "settings.MACHINERY: lease"),
        ("{'url': 'reddis://host'}", "settings.MACHINERY: broker URL 'reddis://host': "),
        ("{'url': 5}", "settings.MACHINERY: url: found a number (expected a URL)"),
        ("'redis://host'", "settings.MACHINERY: found a text (expected a dict of options)"),
    ],
)
def test_wrong_setting_is_named_with_its_key(setting: str, text: str, tmp_path: Path) -> None:
    program = f"from django.conf import settings\nsettings.configure(MACHINERY={setting})\n"

    done = run(["-c", f"{program}import machinery_py.contrib.django.project"], tmp_path)

    assert text in done.stderr.splitlines()[-1]


CONNECTIONS = """
from asgiref.sync import SyncToAsync, sync_to_async
from django.db import connection, connections
from machinery_py.contrib.django import server
from machinery_py.testing.harness import running_worker

seen = {}

@server.task
def ask() -> None:
    connection.ensure_connection()
    seen["sync"] = connections["default"]

@server.task
async def ask_async() -> None:
    def use():
        connection.ensure_connection()
        seen["async"] = connections["default"]
    await sync_to_async(use)()

with running_worker(server):
    ask.send().get(timeout=30)
    ask_async.send().get(timeout=30)
SyncToAsync.single_thread_executor.submit(lambda: None).result(30)
print({kind: one.connection is None for kind, one in sorted(seen.items())})
"""


def test_connections_of_tasks_are_closed_as_those_of_requests(data: Path) -> None:
    done = in_project(data, CONNECTIONS)

    assert done.stdout == "{'async': True, 'sync': True}\n", done.stderr


def test_blocks_of_the_page_are_parts_of_the_project() -> None:
    shown = [block for block in blocks(PAGE, "python") if block.file]

    assert len(shown) >= 4
    for block in shown:
        project = (PROJECT / block.file).read_text()
        # The page shows a part with what it imports; the file has that of all parts at its top.
        code = re.sub(r"\A((from|import) .*\n|\n)*", "", block.text).strip()
        assert code in project, f"{PAGE}:{block.line}"


def test_blocks_of_the_page_import_what_they_use() -> None:
    for block in blocks(PAGE, "python"):
        if block.file and not block.file.endswith("settings.py"):  # Django's own has BASE_DIR
            check = [sys.executable, "-m", "ruff", "check", "-q", "--select", "F821", "-"]
            done = subprocess.run(
                check, input=block.text, text=True, capture_output=True, check=False
            )
            assert done.returncode == 0, f"{PAGE}:{block.line}: {done.stdout}"
