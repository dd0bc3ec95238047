"""Every type of argument and result, sent by one language, run by the other, read by the first."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from machinery_py import TaskFailed
from machinery_py.testing.waiting import HANG
from tests.interop.conftest import Fleet
from tests.interop.fleet import call, message
from tests.interop.golang import GoError

TEXT = 'Größe 中 \U0001f600 <&> \u2028 \x00 "\\'

#: type → values that are hard for it
EDGES: dict[str, list[Any]] = {
    "bool": [True, False],
    "string": ["", TEXT, "x" * 100_000],
    **{
        f"int{bits or ''}": [0, -(2 ** ((bits or 64) - 1)), 2 ** ((bits or 64) - 1) - 1]
        for bits in (0, 8, 16, 32, 64)
    },
    **{f"uint{bits or ''}": [0, 2 ** (bits or 64) - 1] for bits in (0, 8, 16, 32, 64)},
    "float32": [0.0, 1.5, -16777216.0],
    "float64": [0.0, 2.0, 0.1, -1e300, 5e-324, 123456789.123456789],
    "[]bool": [[True, False], []],
    "[]string": [["a", TEXT, ""], []],
    **{f"[]int{bits or ''}": [[-(2 ** ((bits or 64) - 1)), 1], []] for bits in (0, 8, 16, 32, 64)},
    **{f"[]uint{bits}": [[2**bits - 1, 1], []] for bits in (16, 32, 64)},
    "[]uint": [[2**64 - 1, 1], []],
    "[]uint8": [b"", bytes(range(256))],
    "[]byte": [b"", bytes(range(256))],
    "[]float32": [[0.5, -2.0], []],
    "[]float64": [[0.1, 2.0, 1e-9], []],
}
CASES = [(name, value) for name, values in EDGES.items() for value in values]


def go_result_type(name: str) -> str:
    return "[]uint8" if name == "[]byte" else name


def as_go_shows(name: str, value: Any) -> Any:
    """As peer/values.go `plain` writes it: floats as text, byte slices as lists."""
    if isinstance(value, bytes):
        return list(value)
    if isinstance(value, list):
        return [as_go_shows(name.removeprefix("[]"), item) for item in value]
    return value


def equal(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return len(found or []) == len(wanted) and all(map(equal, found or [], wanted))
    if isinstance(wanted, float):
        return float(found) == wanted
    return bool(found == wanted)


def test_task_from_python_runs_in_go_and_both_read_its_result(fleet: Fleet) -> None:
    fleet.needs_all_types()
    server = fleet.python()
    go = fleet.go_worker()

    results = [server.send_task(call(f"echo_{name}", (name, value))) for name, value in CASES]

    for (name, value), result in zip(CASES, results, strict=True):
        assert result.get(timeout=HANG) == value, name
        [seen] = go.ask("result", uuid=result.uuid)
        assert seen["type"] == go_result_type(name)
        assert equal(seen["value"], as_go_shows(name, value)), name


def test_task_from_go_runs_in_python_and_both_read_its_result(fleet: Fleet) -> None:
    fleet.needs_all_types()
    server = fleet.python_worker()
    go = fleet.go()

    for name, value in CASES:
        wire = base64.b64encode(value).decode() if isinstance(value, bytes) else value
        uuid = go.ask(
            "send", message=message(call(f"echo_{name}")), typed=[{"type": name, "value": wire}]
        )
        [seen] = go.ask("result", uuid=uuid)
        assert seen["type"] == go_result_type(name)
        assert equal(seen["value"], as_go_shows(name, value)), name
        found = server.result(uuid).get(timeout=HANG)
        assert found == value, name


def test_a_null_slice_stays_an_empty_one(fleet: Fleet) -> None:
    fleet.needs_all_types()
    server = fleet.python_worker()
    go = fleet.go()

    for name in (name for name in EDGES if name.startswith("[]")):
        uuid = go.ask(
            "send", message=message(call(f"echo_{name}")), typed=[{"type": name, "value": None}]
        )
        [seen] = go.ask("result", uuid=uuid)
        assert (seen["type"], seen["value"] or []) == (go_result_type(name), [])
        assert not server.result(uuid).get(timeout=HANG)


def test_many_results_and_none(fleet: Fleet) -> None:
    fleet.needs_types()
    server = fleet.python()
    go = fleet.go_worker("of_go")
    fleet.python_worker(server, "of_python")

    for queue in ("of_go", "of_python"):
        pair, none = (
            call("pair", ("int64", 1), ("string", "a"), routing_key=queue),
            call("none", routing_key=queue),
        )
        of_go = [go.ask("send", message=message(one)) for one in (pair, none)]
        for pairs, nones in (of_go, [server.send_task(one).uuid for one in (pair, none)]):
            assert server.result(pairs).get(timeout=HANG) == (2, "a!")
            assert server.result(nones).get(timeout=HANG) is None
            assert go.result(pairs) == [2, "a!"]
            assert go.result(nones) == []


def test_headers_arrive(fleet: Fleet) -> None:
    server = fleet.python()
    go = fleet.go_worker("of_go")
    fleet.python_worker(server, "of_python")

    for queue in ("of_go", "of_python"):
        signature = call("header", ("string", "who"), routing_key=queue, headers={"who": TEXT})
        assert server.send_task(signature).get(timeout=HANG) == TEXT
        uuid = go.ask("send", message=message(signature))
        assert server.result(uuid).get(timeout=HANG) == TEXT


def test_an_argument_that_does_not_fit_fails_the_task_in_both(fleet: Fleet) -> None:
    server = fleet.python()
    go = fleet.go_worker("of_go")
    fleet.python_worker(server, "of_python")
    wrong = message(call("echo_int64", ("string", "1"), retry_count=3))
    wrong["Args"][0]["Type"] = "int64"  # neither language lets its users make such a message

    for queue in ("of_go", "of_python"):
        uuid = go.ask("send", message={**wrong, "RoutingKey": queue})
        with pytest.raises(TaskFailed, match="Reflect task args error: 1 is not int64"):
            server.result(uuid).get(timeout=HANG)
        with pytest.raises(GoError, match="Reflect task args error: 1 is not int64"):
            go.result(uuid)
