"""Retry and cancel that are cut off behind each of their writes, on every store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from machinery_py import Config, Server, WorkflowError, chain, group
from machinery_py.tasks.states import State
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.workflows import retry
from tests.support.fixtures import BROKERS

POINTS = 9  # writes of a retry of one chord, and one more
QUEUE = "held"


class Crash(BaseException):
    """The end of a process, as far as its stores see it."""


def die_behind(server: Server, writes: int) -> None:
    """Let the server die behind so many writes to its stores: no later one is carried out."""
    left = [writes]

    def dying(write: Callable[..., Any]) -> Callable[..., Any]:
        def carry_out(*args: Any, **kwargs: Any) -> Any:
            if not left[0]:
                raise Crash
            left[0] -= 1
            reply = write(*args, **kwargs)
            if not left[0]:
                raise Crash
            return reply

        return carry_out

    store = server.app.store
    for owner, names in (
        (store.backend, ("apply", "purge_group_meta", "release", "revoke")),
        (store, ("submit", "fire")),
    ):
        for name in names:
            setattr(owner, name, dying(getattr(owner, name)))


class Shop:
    """Tasks that note their runs; `b` fails while `broken`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.server = Server(Config(broker=url))
        self.broken = True
        self.runs: Counter[str] = Counter()
        self.told: Counter[str] = Counter()
        task = self.server.register_task
        self.fetch = task("fetch", self._fetch).options(queue=QUEUE)
        self.merge = task("merge", self._merge).options(queue=QUEUE)
        self.tell = task("tell", self._tell).options(queue=QUEUE)

    def _fetch(self, flow: str, name: str, *_: str) -> str:
        self.runs[f"{flow} {name}"] += 1
        if name == "b" and self.broken:
            raise ConnectionError("refused")
        return name

    def _merge(self, flow: str, *names: str) -> str:
        self.runs[f"{flow} {'+'.join(names)}"] += 1
        return "+".join(names)

    def _tell(self, error: str, flow: str) -> None:
        self.told[flow] += 1

    def send(self, flow: str) -> str:
        members = group(self.fetch.signature(flow, name) for name in "abc")
        callback = self.merge.partial(flow).catch(self.tell.partial(flow))
        return chain(members, callback, self.fetch.partial(flow, "end")).send().workflow

    def state(self, uuid: str) -> State:
        return self.server.workflow(uuid).state

    def crash(self, uuid: str, call: str, writes: int) -> bool:
        """Call it in another process that dies behind so many writes; whether it died."""
        other = Server(Config(broker=self.url))
        try:
            flow = other.workflow(uuid)
            die_behind(other, writes)
            getattr(flow, call)()
        except Crash:
            return True
        finally:
            other.close()
        return False


# Not in memory: there two servers share one store, and would die together. Results in RabbitMQ keep
# neither claims nor revocations.
pytestmark = pytest.mark.parametrize(
    "broker_url", ["sqlite", *(one for one in BROKERS if one != "amqp")], indirect=True
)


@pytest.fixture
def shop(broker_url: str) -> Iterator[Shop]:
    shop = Shop(broker_url)
    yield shop
    shop.server.close()


def test_retry_that_was_cut_off_is_repeated(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "LONGEST", 0.2)
    flows = [shop.send(str(writes)) for writes in range(POINTS)]
    with shop.server.new_worker("w", 4, queues=[QUEUE]):
        wait_until(lambda: all(shop.state(one) is State.FAILURE for one in flows), HANG)
        wait_until(lambda: sum(shop.told.values()) == POINTS, HANG)
        shop.broken = False
        died = [shop.crash(uuid, "retry", n) for n, uuid in enumerate(flows) if n]
        assert died[:7] == [True] * 7

        def is_retried(uuid: str) -> bool:
            try:
                shop.server.workflow(uuid).retry()
            except WorkflowError as error:
                assert "is being retried" in str(error)  # by the process that died
                return False
            return True

        for uuid in flows:
            wait_until(lambda uuid=uuid: is_retried(uuid), HANG)  # type: ignore[misc]
        wait_until(lambda: all(shop.state(one) is State.SUCCESS for one in flows), HANG)

    for number in range(POINTS):
        ran = {key: count for key, count in shop.runs.items() if key.startswith(f"{number} ")}
        once = {f"{number} {name}": 1 for name in ("a", "c", "a+b+c", "end")}
        assert ran == {**once, f"{number} b": 2}


def test_cancelling_that_was_cut_off_lets_nothing_start(shop: Shop) -> None:
    flows = [shop.send(str(writes)) for writes in range(6)]
    died = [shop.crash(uuid, "cancel", n) for n, uuid in enumerate(flows) if n]
    assert died[:3] == [True] * 3
    untouched = flows.pop(0)

    with shop.server.new_worker("w", 4, queues=[QUEUE]):
        wait_until(lambda: all(shop.state(one) is State.FAILURE for one in flows), HANG)
        wait_until(lambda: len(shop.told) == 6, HANG)
        for uuid in flows:
            shop.server.workflow(uuid).cancel()
        wait_until(lambda: shop.state(untouched) is State.FAILURE, HANG)

    assert {key.split()[0] for key in shop.runs} == {"0"}
    assert shop.told == Counter(map(str, range(6)))
