"""The load generator: a process that sends a plan's items, and journals what it was told of each.

journal    attempt | accepted | refused | unknown, moment, UUID, unix time of its ETA or 0 (tabs)

python -m tests.chaos.load FOLDER URL SEED TASKS RATE
"""

from __future__ import annotations

import datetime as dt
import os
import pathlib
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from machinery_py import Server, Signature, chain, chord, group
from machinery_py.errors import PublishRefused, PublishUnknown
from machinery_py.tasks.signature import Step
from tests.chaos.app import config_of
from tests.chaos.plan import Call, Item, Plan

BATCH = 30  # single tasks that are sent with one submission, at most
SINGLE = ("noop", "nap", "fails", "flaky", "delayed", "spawn")


class Loader:
    """Sends items, and writes down what became of them."""

    def __init__(self, server: Server, journal: pathlib.Path) -> None:
        self._server = server
        self._file = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._now = dt.datetime.now(dt.timezone.utc)

    def send(self, items: Sequence[Item]) -> None:
        """Send all in one submission, single tasks or one workflow; refused ones again."""
        self._now = dt.datetime.now(dt.timezone.utc)
        signatures = [step_of(item, self._now) for item in items]
        calls = [call for item in items for call in item.calls if call.is_sent]
        while True:
            self._note("attempt", calls)
            try:
                if items[0].kind in SINGLE:
                    self._server.app.submit(
                        [one for one in signatures if isinstance(one, Signature)]
                    )
                else:
                    self._server.send(signatures[0])
            except PublishUnknown:
                self._note("unknown", calls)
            except PublishRefused:
                self._note("refused", calls)
                continue  # it has waited for `publish_timeout`
            else:
                self._note("accepted", calls)
            return

    def _note(self, word: str, calls: Sequence[Call]) -> None:
        now = time.monotonic()
        etas = [eta_of(call, self._now).timestamp() if call.delay else 0.0 for call in calls]
        lines = [
            f"{word}\t{now:.6f}\t{call.uuid}\t{eta:.6f}\n"
            for call, eta in zip(calls, etas, strict=True)
        ]
        os.write(self._file, "".join(lines).encode())

    def close(self) -> None:
        os.close(self._file)


def eta_of(call: Call, now: dt.datetime) -> dt.datetime:
    return now + dt.timedelta(seconds=call.delay)


def step_of(item: Item, now: dt.datetime) -> Step[Any]:
    """The item's calls, linked as its shape says."""
    errors = {call.catches: call for call in item.calls if call.catches}

    def build(shape: Any) -> Step[Any]:
        if isinstance(shape, int):
            return one(item.calls[shape])
        kind, *parts = shape
        match kind:
            case "chain":
                return chain(*map(build, parts))
            case "group":
                return group(*map(build, parts))
            case _:
                members, callback = map(build, parts)
                return chord(members, callback)  # type: ignore[arg-type]  # the shape says what they are

    def one(call: Call) -> Signature[Any]:
        signature = Signature.of(call.task, *call.args).replace(
            uuid=call.uuid, retry_count=call.retries
        )
        if call.delay:
            signature = signature.replace(eta=eta_of(call, now))
        if call.uuid in errors:
            signature = signature.catch(one(errors[call.uuid]))
        return signature

    return build(item.shape)


def batches(items: Sequence[Item], seed: int) -> Iterator[list[Item]]:
    """The items in order; neighbours that are single tasks go together in random numbers."""
    random_ = random.Random(f"batches {seed}")
    batch: list[Item] = []
    limit = 1
    for item in items:
        if item.kind not in SINGLE:
            yield [item]
            continue
        batch.append(item)
        if len(batch) >= limit:
            yield batch
            batch, limit = [], random_.randint(1, BATCH)
    if batch:
        yield batch


def main(folder: str, url: str, seed: str, tasks: str, rate: str) -> None:
    """Send the whole plan, at `rate` tasks/s (0: as fast as it goes)."""
    plan = Plan(seed=int(seed), tasks=int(tasks), workers=0, kill_every=1.0, lease=10.0)
    server = Server(config_of(url, plan.lease))
    loader = Loader(server, pathlib.Path(folder, "journal"))
    begin, sent = time.monotonic(), 0
    for batch in batches(plan.items(), plan.seed):
        loader.send(batch)
        sent += sum(len(item.calls) for item in batch)
        if float(rate):
            time.sleep(max(0.0, begin + sent / float(rate) - time.monotonic()))
    loader.close()
    server.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
