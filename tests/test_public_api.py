"""What `import machinery_py` gives, and what it costs."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

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
    "http.client",
    "ssl",
    "zoneinfo",
    "multiprocessing",
    "difflib",
    "ctypes",
    "opentelemetry",
    "sentry_sdk",
)


def test_the_public_names_are_sorted_and_there() -> None:
    names = machinery_py.__all__

    assert names == sorted(names)
    assert all(hasattr(machinery_py, name) for name in names)
    assert set(names) <= set(dir(machinery_py))


def test_public_names_are_those_that_type_checkers_see() -> None:
    tree = ast.parse(pathlib.Path(machinery_py.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and not node.orelse][:1]
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert sorted(seen) == machinery_py.__all__
    for name, module in seen.items():
        assert getattr(machinery_py, name) is getattr(sys.modules[str(module)], name)


def test_moved_name_is_found_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"is now machinery_py\.errors\.WorkerLost") as told:
        found = machinery_py.WorkerLost  # type: ignore[attr-defined]

    assert found is machinery_py.errors.WorkerLost
    assert told[0].filename == __file__
    assert "WorkerLost" not in dir(machinery_py)


def test_public_names_are_fifty_at_most() -> None:
    assert len(machinery_py.__all__) <= 50


def test_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'machinery_py' has no attribute 'Sever'"):
        machinery_py.Sever  # type: ignore[attr-defined]  # noqa: B018 - a misspelt name


def test_the_bare_import_loads_no_module_of_ours() -> None:
    program = (
        "import sys, machinery_py\n"
        "print([name for name in sys.modules if name.startswith('machinery_py.')], end=' ')\n"
        "print(machinery_py.errors.MachineryError.__name__)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout == "[] MachineryError\n"


def test_the_import_loads_no_client_library_and_starts_no_thread() -> None:
    program = (
        "import sys, threading\n"
        f"heavy = {HEAVY!r}\n"
        "before = set(sys.modules)\n"
        "from machinery_py import Server, Worker\n"
        "new = set(sys.modules) - before\n"
        "print([name for name in heavy if name in new], threading.active_count())\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.strip() == "[] 1"


def test_the_bare_import_loads_little_of_the_standard_library() -> None:
    late = ("msgspec", "dataclasses", "inspect", "json", "socket", "subprocess", "uuid", "datetime")
    program = (
        "import logging, sys, typing\n"  # the library needs them, whatever they load
        "before = set(sys.modules)\n"
        "import machinery_py\n"
        f"print([name for name in {HEAVY + late!r} if name in set(sys.modules) - before])\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout == "[]\n"


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
