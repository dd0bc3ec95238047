"""One table of operations makes the command line and the JSON API."""

from __future__ import annotations

import collections

from machinery_py.cli.commands import COMMANDS
from machinery_py.control.orders import KINDS
from machinery_py.dashboard import api
from machinery_py.dashboard.routes import ROUTES
from machinery_py.operations import BY_COMMAND, BY_ROUTE, OPERATIONS, Kind

#: Commands whose second word is an argument.
ACTIONS = {"flow": ("cancel", "retry"), "control": tuple(one.replace("_", "-") for one in KINDS)}


def test_operation_has_one_command_and_one_route() -> None:
    named = collections.Counter(one.command for one in OPERATIONS if one.command)
    named += collections.Counter(one.route for one in OPERATIONS if one.route)

    assert set(named.values()) == {1}
    assert all(one.command or one.route for one in OPERATIONS)


def test_every_command_of_the_table_can_be_typed() -> None:
    actions = {f"{name} {one}" for name, words in ACTIONS.items() for one in words}

    assert set(COMMANDS) <= set(BY_COMMAND)
    assert set(BY_COMMAND) - set(COMMANDS) <= actions


def test_every_route_is_of_the_table() -> None:
    assert api.Api  # its methods are the routes
    routes = {f"{method} {path}" for path, methods in ROUTES.items() for method in methods}

    assert routes == set(BY_ROUTE)


def test_route_changes_something_if_its_operation_acts() -> None:
    for path, methods in ROUTES.items():
        for method, route in methods.items():
            assert route.changes == (BY_ROUTE[f"{method} {path}"].kind is Kind.ACT)
            assert method == "POST" or not route.changes
