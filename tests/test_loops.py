"""`make quick` and `make store` forget no test of a store, and the Makefile says what they run."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from tests import by_store
from tests.by_store import SHARED, STORES, is_wanted, store_of_file, stores_of_test
from tests.support import fixtures as servers

ROOT = pathlib.Path(__file__).parents[1]
FILES = [path.relative_to(by_store.TESTS).as_posix() for path in by_store.TESTS.rglob("test_*.py")]

#: Folders whose tests are all in the loop of some store.
FOLDERS = ("backends/", "brokers/", "connections/", "locks/", "models/", "stores/")


def test_every_file_of_stores_models_and_workflows_is_in_a_loop() -> None:
    forgotten = [
        file
        for file in FILES
        if file.startswith((*FOLDERS, "system/test_pairs", "system/test_workflows"))
        if not any(is_wanted(file, store) for store in STORES)
    ]

    assert forgotten == []


def test_every_file_that_names_a_store_is_in_its_loop_alone() -> None:
    named = {file: owner for file in FILES if (owner := store_of_file(file))}

    assert {"stores/redis/test_wire.py", "stores/mongodb/test_conformance.py"} <= named.keys()
    for file, owner in named.items():
        loops = [store for store in STORES if is_wanted(file, store)]
        assert loops == ([] if by_store.is_left_out(file) else [owner]), file


def test_every_pattern_of_shared_files_finds_some() -> None:
    assert all(any(by_store.matches(file, [pattern]) for file in FILES) for pattern in SHARED)


def test_every_server_of_a_store_is_a_fixture() -> None:
    assert all(hasattr(servers, name) for one in STORES.values() for name in one.servers)


@pytest.mark.parametrize(
    ("path", "names", "fixtures", "stores"),
    [
        ("stores/redis_cluster/test_store.py", "test_a", ["redis_server"], {"cluster"}),
        ("brokers/rabbitmq/test_cluster.py", "test_a", [], {"rabbitmq"}),
        (
            "stores/test_two.py",
            "TestMemoryBrokerAndRedisBackend::test_a",
            [],
            {"memory", "redis"},
        ),
        ("stores/test_two.py", "TestRedisCluster::test_a", [], {"cluster"}),
        ("stores/test_store_pairs.py", "test_a[redis+mongodb]", [], {"redis", "mongodb"}),
        ("brokers/test_pausing.py", "test_a", ["request", "redis_server"], {"redis"}),
        ("brokers/test_pausing.py", "test_a_full_server RedisServer", [], {"redis"}),
        ("connections/test_session_files.py", "test_a", ["tmp_path"], {"memory"}),
        ("models/test_scripts.py", "test_a", [], {"redis"}),
    ],
)
def test_a_test_belongs_to_stores_by_file_names_and_fixtures(
    path: str, names: str, fixtures: list[str], stores: set[str]
) -> None:
    assert stores_of_test(path, names, fixtures) == stores


def ask(store: str) -> subprocess.CompletedProcess[str]:
    """Ask whether there is such a store, as `make store` does first."""
    return subprocess.run(
        [sys.executable, "-m", "tests.by_store", store],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("store", ["", "reddis"])
def test_an_unknown_store_is_refused_with_the_known_ones(store: str) -> None:
    done = ask(store)

    assert done.returncode == 1
    assert done.stderr == (
        f"unknown STORE {store!r}"
        " (known: cluster, memcached, memory, mongodb, postgresql, rabbitmq, redis, sqlite)\n"
    )


def test_a_known_store_is_accepted() -> None:
    done = ask("redis")

    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_makefiles_header_names_all_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    header = makefile.partition("\nPYTHON ?=")[0]
    [phony] = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))

    assert targets == set(phony.split())
    assert set(re.findall(r"(?:^#   |;  )make (\w+)", header, re.MULTILINE)) == targets


def test_every_file_of_the_quick_loop_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    [first, names] = re.findall(
        r"^QUICK := (.*)\$\(patsubst %,tests/test_%\.py,(.*)\)$", makefile, re.MULTILINE
    )[0]

    files = [*first.split(), *(f"tests/test_{name}.py" for name in names.split())]
    assert len(files) > 10
    assert [file for file in files if not (ROOT / file).exists()] == []
