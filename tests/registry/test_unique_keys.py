from __future__ import annotations

import pytest

from machinery_py import Server
from machinery_py.errors import ArgumentError
from machinery_py.registry.calls import Call
from machinery_py.registry.options import TaskOptions
from machinery_py.registry.unique_keys import key_text


def import_feed(tenant: str, feed: int = 7, *, full: bool = False) -> None: ...


CALL = Call("import_feed", import_feed)


@pytest.mark.parametrize(
    ("how", "key"),
    [
        ("tenant", "tenant=acme"),  # a parameter: the argument's value
        ("feed", "feed=7"),  # its default
        ("full", "full=true"),
        ("feeds", "feeds"),  # no parameter: the key itself
        (lambda tenant, feed=7, *, full: f"{tenant}/{full}", "acme/True"),
    ],
)
def test_key_is_a_text_an_argument_or_a_function_of_them(how: object, key: str) -> None:
    args = CALL.arguments(("acme",), {"full": True})

    assert key_text("import_feed", CALL, args, how, "rate_key") == key


def test_function_that_gives_no_text_is_refused() -> None:
    with pytest.raises(ArgumentError, match="rate_key gives 7"):
        key_text("import_feed", CALL, CALL.arguments(("a",), {}), lambda *_, **__: 7, "rate_key")


@pytest.mark.parametrize("limit", ["rate", "running"])
def test_key_of_a_limit_that_names_no_parameter_is_refused_with_the_known_ones(limit: str) -> None:
    options: TaskOptions = {"rate": "5/s", "max_running": 2}
    options["rate_key" if limit == "rate" else "running_key"] = "tennant"
    task = Server("memory://keys").task(**options)

    with pytest.raises(
        ValueError, match=f"import_feed: {limit}_key='tennant' is no parameter"
    ) as got:
        task(import_feed)
    assert str(got.value).endswith(
        "; did you mean 'tenant'? (parameters: feed, full, tenant; or a function of the arguments)"
    )
