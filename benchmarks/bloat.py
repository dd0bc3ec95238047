"""`python -m benchmarks bloat`: how the tables of a PostgreSQL grow while tasks go through them.

A private server vacuums as its tables say. A worker runs the tasks that this process sends, of
which some thousand wait; states are kept for KEEP. The sizes, of a table and of its indexes, should
not grow any more once the first tasks were forgotten. With `--snapshot` somebody else's transaction
is open from the first task to the last, so that nothing can be vacuumed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence

from benchmarks.__main__ import Steps
from benchmarks.peers.report import machine
from benchmarks.workers import THREADS
from benchmarks.workload import Figures
from tests.support.servers import PostgreSQLServer

TASKS, QUICK = 1_000_000, 8_000
POINTS = 10  # lines of the table
KEEP = 30  # seconds
STEP = 1_000  # tasks that are sent together
AHEAD = 4 * STEP  # tasks that wait, about
POLL = 0.05  # seconds between two looks
TABLES = ("items", "rows")
SETTINGS = {"autovacuum": "on", "autovacuum_naptime": "5s", "max_wal_size": "4GB"}

# In: table. Dead tuples are as of the last report of the server's statistics.
_SIZE = """
SELECT pg_relation_size(relid), pg_indexes_size(relid), n_dead_tup, autovacuum_count
FROM pg_stat_user_tables WHERE schemaname = 'machinery' AND relname = %s
"""


def measure(tasks: int, *, snapshot: bool, steps: Steps) -> list[Figures]:
    """Run the tasks, and return the figures at each point."""
    import psycopg

    from machinery_py import Config, Server, group

    found: list[Figures] = []
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(PostgreSQLServer(settings=SETTINGS)).url
        looker = stack.enter_context(psycopg.connect(url, autocommit=True))
        config = Config(broker=url, results_expire_in=KEEP, publish_timeout=60.0)
        server = stack.enter_context(contextlib.closing(Server(config)))
        task = server.register_task("noop", lambda number: number)
        group(task.signature(number) for number in range(AHEAD)).send()
        sent = AHEAD
        if snapshot:
            old = stack.enter_context(psycopg.connect(url))
            old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            old.execute("SELECT 1")
        worker = stack.enter_context(server.new_worker(concurrency=THREADS))
        last, before = time.monotonic(), 0
        for goal in (tasks * point // POINTS for point in range(1, POINTS + 1)):
            steps.begin(f"{goal:,} of {tasks:,} tasks")
            while (done := worker.processed) < goal:
                if sent < min(tasks, done + AHEAD):
                    group(task.signature(number) for number in range(STEP)).send()
                    sent += STEP
                else:
                    time.sleep(POLL)
            now = time.monotonic()
            figures = {"tasks": float(done), "rate": (done - before) / (now - last)}
            for table in TABLES:
                [row] = looker.execute(_SIZE, (table,)).fetchall()
                names = (f"{table} {what}" for what in ("bytes", "index", "dead", "vacuums"))
                figures |= dict(zip(names, map(float, row), strict=True))
            found.append(figures)
            last, before = now, done
    return found


def rows(found: Sequence[Figures]) -> Iterator[str]:
    head = ["tasks", "tasks/s"]
    for table in TABLES:
        head += [f"`{table}`", "its indexes", "dead rows", "vacuums"]
    yield "| " + " | ".join(head) + " |"
    yield "|---" * len(head) + "|"
    for one in found:
        cells = [f"{one['tasks']:,.0f}", f"{one['rate']:,.0f}"]
        for table in TABLES:
            cells += [f"{one[f'{table} {what}'] / 1e6:,.1f} MB" for what in ("bytes", "index")]
            cells += [f"{one[f'{table} {what}']:,.0f}" for what in ("dead", "vacuums")]
        yield "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks bloat", description=str(__doc__).partition("\n")[2]
    )
    parser.add_argument("--tasks", type=int, default=TASKS)
    parser.add_argument("--snapshot", action="store_true", help="keep a transaction open meanwhile")
    parser.add_argument("--quick", action="store_true", help="shows that everything works")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(arguments)
    steps = Steps(POINTS, sys.stderr)
    load = os.getloadavg()[0]
    found = measure(
        QUICK if options.quick else options.tasks, snapshot=options.snapshot, steps=steps
    )
    steps.end()
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print(f"{machine()}, load {load:.1f}", "", *rows(found), sep="\n")
    return 0
