"""The backend for django.tasks, on Django 6: what Django promises, and a live worker.

The promises are in `django_tasks/box/tests.py`, which Django itself runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, environment
from tests.support.django6 import python_with_django_6

BOX = ROOT / "tests" / "contrib" / "django_tasks"
PROJECT = ROOT / "examples" / "django"
HANG = 120.0  # seconds; a guard


@pytest.fixture(scope="module")
def python() -> str:
    found = python_with_django_6()
    if not found:
        pytest.skip("django.tasks needs Django 6, and that Python 3.12: neither is here")
    return found


def run(python: str, words: list[str], folder: Path, **more: str) -> tuple[str, str]:
    """Return what it printed to both streams; `more`: variables of its environment."""
    more = {"PYTHONPATH": os.pathsep.join([str(PROJECT), str(ROOT)]), **more}
    done = subprocess.run(
        [python, *words],
        cwd=folder,
        env=environment(folder, SHOP_DATA=str(folder), **more),
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def test_backend_keeps_what_django_promises(python: str, tmp_path: Path) -> None:
    path = os.pathsep.join([str(BOX), str(ROOT)])
    words = ["-m", "django", "test", "box", "--settings", "box.settings"]

    _, told = run(python, words, tmp_path, PYTHONPATH=path)

    assert "OK" in told


def test_tests_of_the_letters_pass(python: str, tmp_path: Path) -> None:
    _, told = run(python, [str(PROJECT / "manage.py"), "test", "letters"], tmp_path)

    assert "Ran 2 tests" in told


SEND = """
import django
django.setup()
import json
from letters.tasks import count_orders, write_letter
from machinery_py.contrib.django import server
from shop.models import Order
order = Order.objects.create(item="tea")
results = [write_letter.enqueue(order.id), count_orders.enqueue()]
for one in results:
    server.result(one.id).get(timeout=100)
    one.refresh()
print(json.dumps([one.return_value for one in results]))
"""


@pytest.fixture
def worker(python: str, tmp_path: Path) -> Iterator[None]:
    """A live `manage.py machinery worker`; it must end well."""
    manage = str(PROJECT / "manage.py")
    run(python, [manage, "migrate", "--verbosity", "0"], tmp_path)
    process = subprocess.Popen(
        [python, manage, "machinery", "worker", "--no-banner", "--pool", "process"],
        cwd=tmp_path,
        env=environment(tmp_path, SHOP_DATA=str(tmp_path), PYTHONPATH=str(ROOT)),
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


def test_live_worker_runs_tasks_of_django(python: str, worker: None, tmp_path: Path) -> None:
    out, _ = run(python, ["-c", SEND], tmp_path, DJANGO_SETTINGS_MODULE="shop.settings")

    assert json.loads(out) == ["Your tea is on its way.", {"orders": 1, "attempt": 1}]
