"""The wheel: what it holds, and what a project that has nothing else can do with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from machinery_py.testing.waiting import HANG

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "machinery_py"
WRITTEN_BY_PYTHON = shutil.ignore_patterns("__pycache__")

#: All of machinery_py.testing beside its conformance suites. What only our own tests use belongs into tests/support.
TESTING = {"__init__", "clocks", "flaky", "harness", "plugin", "waiting"}

THIRD_PARTY_TEST = """
    import importlib.util

    import pytest

    import machinery_py
    from machinery_py.brokers.memory import MemoryBroker
    from machinery_py.connections.memory import MemoryHub
    from machinery_py.testing import Harness, ManualClock
    from machinery_py.testing.conformance.brokers import BrokerConformance, OpenBroker


    class ShopBroker(MemoryBroker):
        pass


    class TestShopBroker(BrokerConformance):
        @pytest.fixture
        def open_broker(self, clock: ManualClock) -> OpenBroker:
            broker = ShopBroker(MemoryHub(clock))
            return lambda: broker


    @pytest.fixture
    def machinery_server() -> machinery_py.Server:
        return machinery_py.Server("memory://")


    def test_fixture_of_the_plugin_is_there(machinery: Harness) -> None:
        assert machinery.drain() == 0


    def test_nothing_but_the_wheel_is_there() -> None:
        assert "/wheel/" in machinery_py.__file__
        assert importlib.util.find_spec("tests") is None
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked; built from a copy, because a build leaves files beside its sources and takes up older ones."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    sources.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, sources)
    for name in ("machinery_py", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, sources / name, ignore=WRITTEN_BY_PYTHON)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)],
        cwd=sources,
        capture_output=True,
        text=True,
        timeout=5 * HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    [packed] = folder.glob("*.whl")
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(folder / "wheel")
    return folder / "wheel"


def test_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    folders = {path.name for path in wheel.iterdir() if path.suffix != ".dist-info"}
    files = {path.relative_to(wheel) for path in (wheel / "machinery_py").rglob("*.*")}
    ours = {path.relative_to(ROOT) for path in PACKAGE.rglob("*.*") if path.suffix != ".pyc"}

    assert folders == {"machinery_py"}
    assert files == ours


def test_wheel_holds_no_tool_that_only_our_own_tests_use(wheel: Path) -> None:
    modules = {path.stem for path in (wheel / "machinery_py" / "testing").glob("*.py")}

    assert modules == TESTING


def test_store_of_a_third_party_is_tested_with_the_wheel_alone(
    wheel: Path, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.fspath(wheel))
    pytester.makepyfile(test_shop_broker=THIRD_PARTY_TEST)

    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=5 * HANG)

    outcomes = result.parseoutcomes()
    assert result.ret == 0
    assert outcomes["passed"] > 20
