"""Chains that are longer than Go reads: sent in pieces, each fetched when its turn comes."""

from __future__ import annotations

import json

import pytest

from machinery_py import Config, Server, State, TaskFailed, Unsupported, chain
from machinery_py.tasks import linking
from tests.support.apps import Bench, bench

__all__ = ["bench"]


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linking, "LONG", 5)
    monkeypatch.setattr(linking, "PIECE", 3)


def steps(bench: Bench, count: int) -> list[object]:
    return [bench.add.signature(0, 1), *(bench.add.partial(1) for _ in range(count - 1))]


@pytest.mark.parametrize("count", [5, 6, 7, 8, 9, 10])
def test_long_chain_runs_all_steps(bench: Bench, count: int) -> None:
    result = bench.server.send_chain(chain(*steps(bench, count)))

    bench.drain()

    assert result.get(timeout=0) == count
    assert [one.get(timeout=0) for one in result.steps] == list(range(1, count + 1))


def test_no_message_has_more_than_a_piece(bench: Bench) -> None:
    bench.server.send_chain(chain(*steps(bench, 10)))

    [first] = bench.server.broker.pending("machinery_tasks", 9)

    assert first.body.count(b'"UUID":"task_') == 2
    assert json.loads(first.body)["OnSuccess"][0]["OnSuccess"] is None


def test_failure_in_a_later_piece_is_that_of_the_chain(bench: Bench) -> None:
    members = steps(bench, 10)
    members[7] = bench.fail.partial()
    result = bench.server.send_chain(chain(*members))

    bench.drain()

    with pytest.raises(TaskFailed):
        result.get(timeout=0)
    assert result.steps[-1].get_state().state is State.FAILURE


def test_lost_record_fails_the_chain(bench: Bench) -> None:
    result = bench.server.send_chain(chain(*steps(bench, 10)))
    [first] = bench.server.broker.pending("machinery_tasks", 9)
    last = json.loads(first.body)["OnSuccess"][0]
    bench.server.backend.purge_group_meta(last["Headers"]["machinery_rest"])

    bench.drain()

    with pytest.raises(TaskFailed, match="record group_rest_\\S+ of the steps behind it") as raised:
        result.get(timeout=0)
    assert raised.value.error_type == "ChainLost"
    assert result.steps[-1].get_state().state is State.FAILURE


def test_long_chain_needs_a_result_backend() -> None:
    server = Server(Config(broker="memory://", result_backend="null"))
    add = server.register_task("add", lambda a, b: a + b)

    with pytest.raises(Unsupported, match="more than 4999 steps needs a result backend"):
        server.send_chain(chain(add.signature(1, 1), *(add.partial(1) for _ in range(5))))
    server.close()
