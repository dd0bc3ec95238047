"""The contents of sdist and wheel, and what a project can do with the wheel alone.

They are built as an installer builds them: the wheel from the sdist.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser

import pytest

from machinery_py import __version__

ROOT = pathlib.Path(__file__).parents[2]
FILES = (
    *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md"),
    *("pyproject.toml", "pyrightconfig.json", "setup.cfg"),
)
FOLDERS = ("benchmarks", "changelog.d", "docs", "examples", "machinery_py", "scripts", "tests")
UNBUILT = shutil.ignore_patterns("__pycache__", "*.db", "*.db-*", "*.egg-info", ".*")
HANG = 300.0  # seconds; a guard, nothing is measured with it

#: Everything in machinery_py.testing but its conformance suites; our own are in tests/support.
TESTING = {"__init__", "clocks", "crash_points", "flaky", "harness", "plugin", "waiting"}

THIRD_PARTY_TEST = """
    import importlib.util

    import pytest

    import machinery_py
    from machinery_py.brokers.memory import MemoryBroker
    from machinery_py.rows.memory import MemoryRows
    from machinery_py.testing import Harness, ManualClock
    from machinery_py.testing.conformance.brokers import BrokerConformance, OpenBroker


    class ShopBroker(MemoryBroker):
        pass


    class TestShopBroker(BrokerConformance):
        @pytest.fixture
        def open_broker(self, clock: ManualClock) -> OpenBroker:
            broker = ShopBroker(MemoryRows(clock))
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


def build(kind: str, source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Build with the backend that pyproject.toml names, in this environment; no index is asked."""
    program = f"from setuptools import build_meta as b; b.build_{kind}({str(target)!r})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    [built] = target.glob({"sdist": "*.tar.gz", "wheel": "*.whl"}[kind])
    return built


def files_of(folder: pathlib.Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The tree as it is checked out, with one script of a store in each depth of the package."""
    source = tmp_path_factory.mktemp("source") / "tree"
    source.mkdir()
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=UNBUILT)
    for name in FILES:
        shutil.copy(ROOT / name, source)
    for folder in ("machinery_py", "machinery_py/brokers", "machinery_py/brokers/redis"):
        (source / folder / "probe_of_test.lua").write_text("return 1\n")
    return source


@pytest.fixture(scope="module")
def sdist(source: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The unpacked sdist."""
    unpacked = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", source, unpacked)) as archive:
        archive.extractall(unpacked, filter="data")
    [folder] = [path for path in unpacked.iterdir() if path.is_dir()]
    return folder


@pytest.fixture(scope="module")
def wheel(sdist: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build("wheel", sdist, tmp_path_factory.mktemp("wheel")))


def metadata(wheel: zipfile.ZipFile) -> Message:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def test_sdist_holds_the_whole_tree(source: pathlib.Path, sdist: pathlib.Path) -> None:
    made = {"PKG-INFO", *(name for name in files_of(sdist) if ".egg-info/" in name)}
    tree = {name for name in files_of(source) if ".egg-info/" not in name}

    assert files_of(sdist) - made == tree


def test_wheel_holds_the_package_alone_with_its_scripts(
    source: pathlib.Path, wheel: zipfile.ZipFile
) -> None:
    package = {f"machinery_py/{name}" for name in files_of(source / "machinery_py")}
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}

    assert names == package
    assert {
        "machinery_py/py.typed",
        "machinery_py/probe_of_test.lua",
        "machinery_py/brokers/redis/probe_of_test.lua",
    } <= names


def test_metadata_names_author_licence_and_pythons(wheel: zipfile.ZipFile) -> None:
    found = metadata(wheel)
    classifiers = found.get_all("Classifier", [])

    assert (found["Name"], found["Version"]) == ("machinery_py", __version__)
    assert found["Author"] == "The machinery_py authors"
    assert found["License-Expression"] == "MIT AND Apache-2.0"
    assert not [one for one in classifiers if one.startswith("License ::")]  # an index refuses both
    assert found["Requires-Python"] == ">=3.11"
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 16)} <= set(
        classifiers
    )
    assert found["Description-Content-Type"] == "text/markdown"


def test_extra_all_brings_every_extra_but_that_of_tests(wheel: zipfile.ZipFile) -> None:
    found = metadata(wheel)
    [line] = [one for one in found.get_all("Requires-Dist", []) if one.endswith('extra == "all"')]

    extras = set(line.partition("[")[2].partition("]")[0].split(","))
    assert extras == {*found.get_all("Provides-Extra", [])} - {"all", "dev", "test"}


def test_wheel_holds_no_tool_that_only_our_own_tests_use(wheel: zipfile.ZipFile) -> None:
    testing = [pathlib.PurePath(name) for name in wheel.namelist() if "/testing/" in name]

    assert {path.stem for path in testing if path.parent.name == "testing"} == TESTING


def test_store_of_a_third_party_is_tested_with_the_wheel_alone(
    wheel: zipfile.ZipFile,
    tmp_path: pathlib.Path,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wheel.extractall(tmp_path / "wheel")
    monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path / "wheel"))
    pytester.makepyfile(test_shop_broker=THIRD_PARTY_TEST)

    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=HANG)

    outcomes = result.parseoutcomes()
    assert result.ret == 0
    assert outcomes["passed"] > 20
