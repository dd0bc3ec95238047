"""Measurements in fresh processes, on this or another tree of the library."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support import private_mongo
from tests.support.private_postgres import AS_SHIPPED, PostgreSQLServer
from tests.support.servers import RabbitMQServer, RedisServer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# Servers that are started for each measurement, so that no old state is in its way.
PRIVATE_REDIS = "redis://private"
PRIVATE_AMQP = f"amqp://private+{PRIVATE_REDIS}"  # messages in RabbitMQ, results in Redis
PRIVATE_MONGODB = (
    "mongodb://private"  # mongod where it is installed, else the stand-in of the tests
)
PRIVATE_POSTGRESQL = "postgresql://private"
#: The file is never rewritten while something is measured.
REDIS_CONFIG = {"appendfsync": "everysec", "auto-aof-rewrite-percentage": "0"}
HANG = 300.0  # seconds after which a measurement is taken to hang


class MeasurementFailed(Exception):
    """A child failed; the text is its output."""


@contextlib.contextmanager
def environment(tree: Path = ROOT) -> Iterator[dict[str, str]]:
    """Return an environment whose children import machinery_py from `tree`.

    The benchmarks come from here.
    """
    with tempfile.TemporaryDirectory(prefix="machinery-bench-") as name:
        # The tree has benchmarks of its own, perhaps older ones: measure both sides with the same.
        (Path(name) / "benchmarks").symlink_to(HERE)
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("MACHINERY_", "PYTHON"))
        }
        path = os.pathsep.join([name, str(tree)])
        yield {**kept, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "MACHINERY_BENCH_TREE": str(tree)}


def measure(
    name: str, url: str, count: int, environ: dict[str, str], *, folder: Path
) -> dict[str, float]:
    """Run one measurement of measure.py; return its figures by name.

    Args:
        folder: where the stores that are files are made; each child has its own, removed after.

    Raises:
        MeasurementFailed: it did not end well, or what it measured was not right.
    """
    with own_store(url, folder) as store:
        command = [sys.executable, "-m", "benchmarks.measure", name, store, str(count)]
        try:
            done = subprocess.run(
                command, env=environ, capture_output=True, text=True, timeout=HANG, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise MeasurementFailed(f"{name} on {url}: not done after {HANG:g} s") from error
    if done.returncode:
        raise MeasurementFailed(
            f"{name} on {url}: {done.stderr.strip()[-2000:] or done.returncode}"
        )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


@contextlib.contextmanager
def own_store(url: str, folder: Path) -> Iterator[str]:
    """Return the URL of an empty store.

    A SQLite URL gets a file in `folder`, a private one its servers. Any other URL stays as it is,
    with all its data.
    """
    if url == PRIVATE_REDIS:
        with RedisServer(appendonly=True, config=REDIS_CONFIG) as server:
            yield server.url
    elif url == PRIVATE_AMQP:
        with (
            RabbitMQServer() as rabbit,
            RedisServer(appendonly=True, config=REDIS_CONFIG) as server,
        ):
            yield f"{rabbit.url}+{server.url}"
    elif url == PRIVATE_MONGODB:
        with private_mongo.KINDS[private_mongo.best_kind()]() as mongo:
            yield f"{mongo.url}bench"
    elif url == PRIVATE_POSTGRESQL:
        with PostgreSQLServer(settings=AS_SHIPPED) as postgres:
            yield postgres.url
    elif url.startswith("sqlite:"):
        with tempfile.TemporaryDirectory(prefix="store-", dir=folder) as place:
            query = url.partition("?")[2]
            yield f"sqlite:///{place}/bench.db{'?' + query if query else ''}"
    else:
        yield url
