"""Routes of the JSON API: methods whose parameters are the fields of a query or of a JSON body."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from machinery_py.dashboard.records import Problem
from machinery_py.errors import ArgumentError
from machinery_py.operations import BY_ROUTE, Kind
from machinery_py.values.malformed import MALFORMED

M = TypeVar("M", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Route:
    """One route.

    Attributes:
        help: what it does; and what holds for the API alone, if there is such a thing.
        key: the field that the answer stands in; "": the answer is a record itself.
        takes: a record of the parameters.
        gives: the type of the answer.
        changes: whether it changes anything.
    """

    method: str
    path: str
    help: str
    key: str
    function: Callable[..., Any]
    takes: type[msgspec.Struct]
    gives: Any
    changes: bool

    def prepared(
        self, api: object, query: Mapping[str, Sequence[str]], body: bytes
    ) -> Callable[[], Any]:
        """Return the call that makes the answer to a request.

        Raises:
            ArgumentError: the query or the body does not fit.
        """
        try:
            if self.method == "POST":
                given: Any = msgspec.json.decode(body, type=self.takes)
            else:
                hints = typing.get_type_hints(self.takes)
                fields = {
                    key: values if hints.get(key) == Sequence[str] else values[-1]
                    for key, values in query.items()
                }
                given = msgspec.convert(fields, self.takes, strict=False)
        except MALFORMED as error:
            what = "body" if self.method == "POST" else "query"
            raise ArgumentError(f"{self.path}: its {what} cannot be read: {error}") from None

        def call() -> Any:
            answer = self.function(api, **msgspec.structs.asdict(given))
            return {self.key: answer} if self.key else answer

        return call


ROUTES: dict[str, dict[str, Route]] = {}  # path → method → route


def route(name: str, key: str = "") -> Callable[[M], M]:
    """Return a decorator that makes a method of Api a route.

    Args:
        name: its method and path, as the table of operations has them.
    """
    operation, (method, path) = BY_ROUTE[name], name.split(" ")

    def add(function: M) -> M:
        hints = typing.get_type_hints(function, include_extras=True)
        gives = hints.pop("return")
        name = "".join(word.title() for word in function.__name__.split("_"))
        defaults = {p.name: p.default for p in inspect.signature(function).parameters.values()}
        fields = [
            (one, hint) if defaults[one] is inspect.Parameter.empty else (one, hint, defaults[one])
            for one, hint in hints.items()
        ]
        takes = msgspec.defstruct(f"{name}Fields", fields, kw_only=True, forbid_unknown_fields=True)
        # The first line of a docstring is for the readers of the code.
        _, _, more = (inspect.getdoc(function) or "").partition("\n\n")
        help = " ".join(f"{operation.help}. {more}".split()) if more else operation.help
        is_change = operation.kind is Kind.ACT
        ROUTES.setdefault(path, {})[method] = Route(
            method, path, help, key, function, takes, gives, is_change
        )
        return function

    return add


@functools.cache
def schema() -> dict[str, Any]:
    """Return all routes, with JSON Schemas of what they take and give."""
    routes = [one for methods in ROUTES.values() for one in methods.values()]
    kinds = [kind for one in routes for kind in (one.takes, one.gives)]
    shown, definitions = msgspec.json.schema_components(
        [*kinds, Problem], ref_template="#/definitions/{name}"
    )
    found = []
    for one, takes, answer in zip(routes, shown[::2], shown[1::2], strict=False):
        keyed = {"type": "object", "properties": {one.key: answer}, "required": [one.key]}
        found.append(
            {
                "method": one.method,
                "path": f"api/{one.path}",
                "help": one.help,
                "takes": takes,
                "gives": keyed if one.key else answer,
            }
        )
    return {"routes": found, "definitions": definitions}
