"""The pytest plug-in: the fixtures `machinery`, `machinery_worker` and `crash_points`.

    # setup.cfg
    [tool:pytest]
    machinery_app = shop.tasks:server

They use the Server of the fixture `machinery_server`: the one that `machinery_app` names, unless a
conftest.py overrides it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from machinery_py import Server, Worker
    from machinery_py.testing.crash_points import CrashPoints
    from machinery_py.testing.harness import Harness

OPTION = "machinery_app"
#: Each has the Server for itself.
ALONE = {
    "machinery": "nothing runs by itself",
    "machinery_worker": "everything does",
    "crash_points": "its stores are new for each run",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        OPTION,
        "the Server under test, as module:object or module, for the fixtures of machinery_py",
    )


@pytest.fixture
def machinery_server(pytestconfig: pytest.Config) -> Server:
    """Return the Server that the ini option machinery_app names."""
    target = str(pytestconfig.getini(OPTION)).strip()
    if not target:
        raise pytest.UsageError(
            f"no {OPTION}: which Server is to be tested? (in setup.cfg: [tool:pytest], "
            f"{OPTION} = shop.tasks:server; in pyproject.toml: [tool.pytest.ini_options])"
        )
    return find_server(target, pytestconfig.rootpath)


@pytest.fixture
def machinery(request: pytest.FixtureRequest, machinery_server: Server) -> Iterator[Harness]:
    """Your Server on memory stores, with a manual clock; tasks run when the test calls `drain`."""
    from machinery_py.testing.harness import Harness

    _only_one(request)
    with Harness(machinery_server) as harness:
        yield harness


@pytest.fixture
def machinery_worker(request: pytest.FixtureRequest, machinery_server: Server) -> Iterator[Worker]:
    """A started worker of your Server, on memory stores, in threads and in real time."""
    from machinery_py.testing.harness import running_worker

    _only_one(request)
    with running_worker(machinery_server) as worker:
        yield worker


@pytest.fixture
def crash_points(request: pytest.FixtureRequest, machinery_server: Server) -> CrashPoints:
    """Runs of a task of your Server that are killed once at each of its writes."""
    from machinery_py.testing.crash_points import CrashPoints

    _only_one(request)
    return CrashPoints(machinery_server)


def _only_one(request: pytest.FixtureRequest) -> None:
    taken = [name for name in ALONE if name in request.fixturenames]
    if len(taken) > 1:
        reasons = ", ".join(f"with {name} {ALONE[name]}" for name in taken)
        raise pytest.UsageError(
            f"{request.node.name} takes both {' and '.join(map(repr, taken))} ({reasons}: take one)"
        )


def find_server(target: str, folder: Path) -> Server:
    """Return the Server that `module:object` or `module` names.

    The search is that of the command line, but starts from this folder.

    Raises:
        pytest.UsageError: it is not there, or its module cannot be imported.
    """
    from machinery_py.cli.apps import AppBroken, load
    from machinery_py.errors import AppNotFound

    try:
        return load(target, str(folder))
    except AppNotFound as error:
        trace = f"\n{error.trace}" if isinstance(error, AppBroken) else ""
        raise pytest.UsageError(
            f"{OPTION} = {target}, seen from pytest's rootdir: {error}{trace}"
        ) from None
