"""What `import machinery_py` gives, and what it costs."""

from __future__ import annotations

import subprocess
import sys

import machinery_py

HEAVY = (
    "redis",
    "pymongo",
    "pika",
    "croniter",
    "sqlite3",
    "asyncio",
    "yaml",
    "pytest",
    "http.server",
    "ctypes",
)


def test_the_public_names_are_sorted_and_there() -> None:
    names = machinery_py.__all__

    assert names == sorted(names)
    assert all(hasattr(machinery_py, name) for name in names)


def test_the_import_loads_no_client_library_and_starts_no_thread() -> None:
    program = (
        "import sys, threading\n"
        f"heavy = {HEAVY!r}\n"
        "before = set(sys.modules)\n"
        "import machinery_py\n"
        "new = set(sys.modules) - before\n"
        "print([name for name in heavy if name in new], threading.active_count())\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.strip() == "[] 1"


def test_making_a_server_opens_nothing(tmp_path: object) -> None:
    program = (
        "import os, sys\n"
        f"os.chdir({str(tmp_path)!r})\n"
        "from machinery_py import Server\n"
        "server = Server()\n"
        "server.task(len)\n"
        "print(os.listdir('.'), 'sqlite3' in sys.modules)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.strip() == "[] False"
