"""The order of queues: how it is written, what is refused, and how often each comes first."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machinery_py import Config, ConfigError, Server
from machinery_py.queues import QueueOrder, parse_queues


@pytest.mark.parametrize(
    ("text", "queues"),
    [
        ("mail", ("mail",)),
        ("high,default, low ,high,", ("high", "default", "low")),
        ("critical:6,default:3,low:1", {"critical": 6.0, "default": 3.0, "low": 1.0}),
        ("critical: 6, low", {"critical": 6.0, "low": 1.0}),
        ("a:0.5,b:1e3", {"a": 0.5, "b": 1000.0}),
        ("mail:high:,mail:low:", ("mail:high", "mail:low")),
        ("mail:high:6,mail:low:", {"mail:high": 6.0, "mail:low": 1.0}),
        ("a:2,a:2", {"a": 2.0}),
    ],
)
def test_how_queues_are_written(text: str, queues: object) -> None:
    assert parse_queues(text) == queues


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no queue named"),
        (" , ", "no queue named"),
        (
            "critical:x",
            "queue 'critical:x': found the weight 'x' "
            "(expected a number greater than 0, as critical:6; a name that has "
            "a colon in it ends in one: critical:x:)",
        ),
        ("critical:0,low", "found the weight '0'"),
        ("critical:-1", "found the weight '-1'"),
        ("a:nan", "found the weight 'nan'"),
        ("a:inf", "found the weight 'inf'"),
        (":6", "no name in front of the colon"),
        ("a:1,a:2", "queue 'a' is named twice, with different weights"),
        ("a,a:2", "named twice"),
    ],
)
def test_wrong_order_of_queues_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_queues(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("queues", "said"),
    [
        ({"a": 0}, "weight of queue 'a': found 0 (expected a number greater than 0)"),
        ({"a": -2.5}, "found -2.5"),
        ({"a": "6"}, "found '6'"),
        ({"a": True}, "found True"),
        ({"a": math.nan}, "found nan"),
        (
            "mail",
            "found the text 'mail' (expected a list of names, or a mapping of names to weights)",
        ),
    ],
)
def test_worker_refuses_wrong_queues(queues: object, said: str) -> None:
    server = Server("memory://")
    with pytest.raises(ConfigError) as caught:
        server.new_worker(queues=queues)  # type: ignore[arg-type]  # that is the point
    assert said in str(caught.value)


def test_a_worker_takes_its_queues_from_the_settings() -> None:
    def queues(config: Config, **options: object) -> list[str]:
        return Server(config).new_worker(**options).order.shown()  # type: ignore[arg-type]  # of queues only

    config = Config(broker="memory://", default_queue="mail")
    assert queues(config) == ["mail"]
    assert queues(config.replace(queues="high:6,low:1.5")) == ["high:6", "low:1.5"]
    assert queues(config.replace(queues="high,low")) == ["high", "low"]
    assert queues(config.replace(queues="high,low"), queues=["other"]) == ["other"]
    with pytest.raises(ConfigError, match=r"^queues: queue 'high:x': found the weight 'x'"):
        Config(queues="high:x")
    with pytest.raises(ConfigError, match=r"^MACHINERY_QUEUES: queues: queue 'high:0'"):
        Config.from_env(environ={"MACHINERY_QUEUES": "high:0"})


def test_strict_order_draws_nothing() -> None:
    order = QueueOrder.of(["b", "a", "b"])
    assert (order.names, order.draw(Random(1))) == (("b", "a"), ())


names = st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=3)
weights = st.dictionaries(names, st.floats(0.001, 1e6), min_size=1, max_size=8)


@given(weights, st.integers())
def test_each_draw_has_every_queue_once(found: dict[str, float], seed: int) -> None:
    order = QueueOrder.of(found)
    assert sorted(order.draw(Random(seed))) == sorted(found)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "found", [{"a": 6, "b": 3, "c": 1}, {"a": 1, "b": 1, "c": 1}, {"a": 0.02, "b": 0.01, "c": 0.07}]
)
def test_orders_come_as_often_as_their_weights_say(found: dict[str, float], seed: int) -> None:
    """Drawn one after the other without putting back: P(abc) = a/(a+b+c) · b/(b+c)."""
    draws = 20_000
    random, order = Random(seed), QueueOrder.of(found)
    seen = Counter(order.draw(random) for _ in range(draws))

    for first, second, third in itertools.permutations(found):
        a, b, c = found[first], found[second], found[third]
        expected = a / (a + b + c) * b / (b + c)
        spread = math.sqrt(expected * (1 - expected) / draws)
        assert abs(seen[first, second, third] / draws - expected) < 5 * spread
