"""Calls of a task's function: from a Python call to Args, and from Args to the call."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from machinery_py.errors import ArgumentError
from machinery_py.tasks.context import Context
from machinery_py.tasks.signature import Arg, Checked, Signature
from machinery_py.values.go_conversions import INT64_MAX, INT64_MIN
from machinery_py.values.json_values import Chunk, shown
from machinery_py.values.reading import checker, converter, wire_type
from machinery_py.values.unchanged import SCALARS, unchanged
from machinery_py.values.values import EXACT, describe, from_result, result_of, to_python
from machinery_py.wire.decode import ReceivedArg
from machinery_py.wire.signatures import checked_value

REFLECT = "Reflect task args error: "  # Go's words: other programs see this text in the state
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NONE: Mapping[str, Arg] = {}
_PLAIN = {int: "int64", str: "string", bool: "bool"}  # sent as they are
_CONTAINERS = frozenset((list, tuple, dict))
_AS_SENT = SCALARS | {list, tuple, bytes}  # of the type that their type name says


class _Parameter(msgspec.Struct, frozen=True):
    """One parameter, and how a received value becomes what its annotation says.

    Attributes:
        plain: the type names of values that are sent as they are.
        wire: the type name of values that need no look.
        checks: `convert` refuses values only, and changes none.
    """

    name: str
    hint: Any
    plain: Mapping[type, str]
    convert: Callable[[Any], Any] | None = None
    wire: str = ""
    checks: bool = False

    @classmethod
    def of(cls, p: inspect.Parameter, hint: Any) -> _Parameter:
        wanted = hint
        if p.default is None:
            with contextlib.suppress(TypeError):  # an annotation that is no type
                wanted = typing.Optional[hint]  # noqa: UP045 - of a text, too
        plain = _PLAIN if hint is Any else {kind: _PLAIN[kind] for kind in _PLAIN if kind is hint}
        convert = converter(wanted) if not isinstance(hint, str) else _as_it_is
        checks = convert is None
        return cls(p.name, hint, plain, convert or checker(wanted), wire_type(wanted), checks)


def needs_check(signature: Signature[Any]) -> bool:
    """Return whether a call, or what follows it, was not held against the parameters yet."""
    return (
        type(signature.args) is not Checked
        or bool(signature.on_success)
        or bool(signature.on_error)
        or signature.chord_callback is not None
    )


class Call:
    """Signature of one function, read at the first use: annotations may name later things.

    Args:
        in_batches: the function takes a list, and may return one: a call has one item of each.
        secrets: pydantic's secrets may be sent, in clear text; None: where an annotation has them.

    Raises:
        TypeError: it is to take a list, and has other parameters.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        in_batches: bool = False,
        secrets: bool | None = None,
    ) -> None:
        self.name = name
        self.function = function
        self.in_batches = in_batches
        self._secrets = secrets
        self.is_async: bool = inspect.iscoroutinefunction(function)
        try:
            self._signature = inspect.signature(function)
        except (TypeError, ValueError):  # some functions written in C have none
            self._signature = inspect.Signature(
                [
                    inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
                    inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
                ]
            )
        parameters = list(self._signature.parameters.values())
        self.takes_context: bool = bool(parameters) and _is_context(parameters[0], function)
        self._given = parameters[1:] if self.takes_context else parameters
        self._required = sum(p.kind in _POSITIONAL and p.default is p.empty for p in self._given)
        self.places: tuple[str, ...] = tuple(p.name for p in self._given if p.kind in _POSITIONAL)
        self._positional_count = len(self.places)
        self._takes_any = any(p.kind is p.VAR_POSITIONAL for p in self._given)
        self._keyword_names = {p.name for p in self._given if p.kind is p.KEYWORD_ONLY}
        self._required_keywords = {
            p.name for p in self._given if p.kind is p.KEYWORD_ONLY and p.default is p.empty
        }
        self.names: set[str] = {*self.places, *self._keyword_names}
        self._takes_keywords = any(p.kind is p.VAR_KEYWORD for p in self._given)
        self._named = bool(self._keyword_names) or self._takes_keywords
        if in_batches and (len(self._given), self._required) != (1, 1):
            raise TypeError(
                f"{name}: a batch task takes one list, and a Context before it if it wants one "
                f"(found {self._signature})"
            )
        self._hints: dict[str, Any] | None = None
        self._parameters: list[_Parameter] = []
        self._rest = _Parameter("", Any, _PLAIN)
        self._rest_by_name = _Parameter("", Any, _PLAIN)
        self._wires: list[str] = []
        self._keywords: dict[str, _Parameter] = {}
        self._convert_any = False
        self._returns: Any = Any
        self._result_converter: Callable[[Any], Any] | None = None

    def _learn(self) -> None:
        """Resolve the annotations. Threads that run their first tasks at once may all be here.

        So nothing that another one may be reading is changed, and `_hints`, which says that all is
        there, comes last.
        """
        try:
            hints = typing.get_type_hints(self.function, include_extras=True)
        except Exception:  # a name that only type checkers know
            hints = _known_hints(self.function)
        if self.in_batches:
            hints = {name: _item_of(hint) for name, hint in hints.items()}
        positional: list[_Parameter] = []
        keywords: dict[str, _Parameter] = {}
        for p in self._given:
            parameter = _Parameter.of(p, hints.get(p.name, Any))
            self._convert_any = self._convert_any or parameter.convert is not None
            if p.kind in _POSITIONAL:
                positional.append(parameter)
            elif p.kind is p.VAR_POSITIONAL:
                self._rest = parameter
            elif p.kind is p.VAR_KEYWORD:
                self._rest_by_name = parameter
            else:
                keywords[p.name] = parameter
        self._parameters, self._keywords = positional, keywords
        self._wires = [parameter.wire for parameter in positional]
        self._returns = hints.get("return", Any)
        self._result_converter = converter(self._returns)
        self._hints = hints

    # From a Python call to what travels

    def arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, partial: bool = False
    ) -> tuple[Arg, ...]:
        """Return the arguments as they travel, each under its type name.

        Args:
            partial: others may come before or after them, so they need not fit the parameters.

        Raises:
            ArgumentError: they do not fit the parameters, or one cannot be sent.
        """
        if self._hints is None:
            self._learn()
        if kwargs or not (
            self._required <= len(args) and (self._takes_any or len(args) <= self._positional_count)
        ):
            args, kwargs = self._bind(args, kwargs, partial=partial)
        elif self._required_keywords and not partial:
            self._bound(args, kwargs, partial=False)
        fit = not partial
        parameters: Iterable[_Parameter] = self._parameters
        if len(args) > self._positional_count:
            parameters = itertools.chain(parameters, itertools.repeat(self._rest))
        described = [
            # As the first lines of `_describe`, without a call: most arguments are such.
            Arg(type=plain, value=value)
            if (plain := parameter.plain.get(type(value))) is not None
            and (plain != "int64" or INT64_MIN <= value <= INT64_MAX)
            else self._describe(parameter, value, fit=fit)
            for parameter, value in zip(parameters, args, strict=False)
        ]
        for name, value in kwargs.items():
            described.append(self._describe(self._keyword(name), value, name=name, fit=fit))
        return tuple(described) if partial else Checked(described)

    def _bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, partial: bool
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Sort keywords into their places, so that only keyword-only parameters travel by name."""
        bound = self._bound(args, kwargs, partial=partial)
        skipped = [name for name in self.places if name not in bound.arguments]
        behind = self.places[self.places.index(skipped[0]) :] if skipped else ()
        given_after = [name for name in behind if name in bound.arguments]
        if given_after:
            # Positions cannot have holes on the wire: what is left out in between gets its default.
            bound.apply_defaults()
            if partial and any(p.name in skipped and p.default is p.empty for p in self._given):
                raise ArgumentError(
                    f"{self.name}: argument {given_after[0]!r} leaves {skipped[0]!r} open before "
                    "it; results are added at the end"
                )
        return bound.args, bound.kwargs

    def _bound(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, partial: bool
    ) -> inspect.BoundArguments:
        shape = self._signature.replace(parameters=self._given)
        try:
            return (shape.bind_partial if partial else shape.bind)(*args, **kwargs)
        except TypeError as error:
            text = str(error)
            for kind in ("required argument", "required keyword-only argument"):
                text = text.replace(f"missing a {kind}:", "missing argument")
            raise ArgumentError(f"{self.name}: {text}") from None

    def _parameter(self, index: int) -> _Parameter:
        return self._parameters[index] if index < len(self._parameters) else self._rest

    def _keyword(self, name: str) -> _Parameter:
        return self._keywords.get(name) or msgspec.structs.replace(self._rest_by_name, name=name)

    def _describe(
        self, parameter: _Parameter, value: Any, *, name: str = "", fit: bool = False
    ) -> Arg:
        plain = parameter.plain.get(type(value))
        if plain is not None:
            if plain == "int64" and not INT64_MIN <= value <= INT64_MAX:
                plain = _wide(self.name, parameter, value)
            return Arg(type=plain, value=value, name=name)
        try:
            secrets = self._secrets
            if secrets is None:  # then `_check_arrival` sees that they come as secrets again
                secrets = parameter.convert is not None and not parameter.checks
            type_name, wire = describe(value, parameter.hint, secrets=secrets)
        except ArgumentError as error:
            raise ArgumentError(f"{self.name} argument {parameter.name!r}: {error}") from None
        if parameter.convert is not None and (
            type_name != parameter.wire or type(value) not in _AS_SENT
        ):
            self._check_arrival(parameter, value, to_python(type_name, wire), fit=fit)
        return Arg(type=type_name, value=wire, name=name)

    def _check_arrival(self, parameter: _Parameter, value: Any, sent: Any, *, fit: bool) -> None:
        """Raise ArgumentError if the worker would refuse the value, or change it in silence."""
        try:
            got = self._converted(parameter, sent)
        except ArgumentError:
            if fit:
                raise
            self._describe(_Parameter(parameter.name, Any, _PLAIN), value)  # refuses secrets
            return  # it may be meant for another parameter
        if parameter.checks and type(value) in _CONTAINERS:
            return  # nothing is known of its items
        if not unchanged(value, got):
            raise ArgumentError(
                f"{self.name} argument {parameter.name!r}: {_changed(value, got, parameter.hint)}"
            )

    def sorted_out(self, args: Sequence[Arg]) -> tuple[list[Arg], dict[str, Arg]]:
        """Return the arguments by position and by name, with the defaults of those left out.

        So they are the same for each way to write the same call. A default that cannot be sent is
        left out, and so are those behind it.
        """
        if self._hints is None:
            self._learn()
        placed, named = self._split(args)
        try:
            for parameter in [p for p in self._given if p.kind in _POSITIONAL][len(placed) :]:
                if parameter.default is parameter.empty:
                    break
                placed.append(self._describe(self._parameter(len(placed)), parameter.default))
            for p in self._given:
                if p.kind is p.KEYWORD_ONLY and p.name not in named and p.default is not p.empty:
                    named[p.name] = self._describe(self._keyword(p.name), p.default, name=p.name)
        except ArgumentError:
            pass
        return placed, named

    # From what travelled to the call

    def values(
        self, args: Sequence[Arg], *, room: bool = False
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments for the function.

        Args:
            room: more of them follow at the end.

        Raises:
            ArgumentError: one does not fit its type or its parameter, or there are too few or many.
        """
        if self._hints is None:
            self._learn()
        placed, by_name = (
            self._split(args) if self._named and any(arg.name for arg in args) else (args, _NONE)
        )
        try:
            values = [
                # As the first lines of `to_python`, without a call: most arguments are such.
                arg.value
                if EXACT.get(arg.type) is type(arg.value)
                and (type(arg.value) is not int or INT64_MIN <= arg.value <= INT64_MAX)
                else to_python(arg.type, arg.value)
                for arg in placed
            ]
            named = (
                {name: to_python(arg.type, arg.value) for name, arg in by_name.items()}
                if by_name
                else {}
            )
        except ArgumentError as error:
            raise ArgumentError(f"{REFLECT}{error}") from None
        if self._convert_any and (named or [arg.type for arg in placed] != self._wires):
            values = [
                self._converted(self._parameter(index), value) for index, value in enumerate(values)
            ]
            named = {
                name: self._converted(self._keyword(name), value) for name, value in named.items()
            }
        count = len(values)
        if (
            (count < self._required and not room)
            or (count > self._positional_count and not self._takes_any)
            or (self._required_keywords and not room)
        ):
            self._bound(values, named, partial=room)
        return values, named

    def check(self, args: Sequence[Arg], *, room: bool = False) -> None:
        """Raise ArgumentError for what the worker would refuse. Args and errors as `values`."""
        if type(args) is Checked:
            return
        try:
            self.values([_as_received(arg) for arg in args], room=room)
        except ArgumentError as error:
            text = str(error).removeprefix(REFLECT)
            raise ArgumentError(
                text if text.startswith(self.name) else f"{self.name}: {text}"
            ) from None

    def _split(self, args: Sequence[Arg]) -> tuple[list[Arg], dict[str, Arg]]:
        """Return them by position and by name.

        Go ignores names, and senders fill in any: they count for keyword parameters alone.
        """
        places = {parameter.name for parameter in self._parameters}
        named = {
            arg.name: arg
            for arg in args
            if arg.name
            and (
                arg.name in self._keyword_names or (self._takes_keywords and arg.name not in places)
            )
        }
        return [arg for arg in args if arg.name not in named], named

    def _converted(self, parameter: _Parameter, value: Any) -> Any:
        if parameter.convert is None:
            return value
        try:
            return parameter.convert(value)
        except ArgumentError as error:
            raise ArgumentError(f"{self.name} argument {parameter.name!r}: {error}") from None

    # Results

    def results(self, value: Any) -> tuple[Arg, ...]:
        """Return a function's value as stored: nothing for None, one Arg for each item of a tuple.

        The annotation decides where the value does not: a Go task that gets it asks for one type.

        Raises:
            ArgumentError: it cannot be stored.
        """
        if value is None:
            return ()
        if self._hints is None:
            self._learn()
        plain = _PLAIN.get(type(value))
        if (
            plain is not None
            and (self._returns is type(value) or self._returns is Any)
            and (plain != "int64" or -(2**63) <= value < 2**63)
        ):
            return (Arg(type=plain, value=value),)
        try:
            found = tuple(
                Arg(type=type_name, value=wire)
                for type_name, wire in result_of(
                    value, self._returns, secrets=self.secrets_in_results
                )
            )
            if self._result_converter is not None and type(value) not in SCALARS:
                got = [from_result(arg.type, arg.value) for arg in found]
                self.check_result(value, tuple(got) if type(value) is tuple else got[0])
        except ArgumentError as error:
            raise ArgumentError(f"{self.name} result: {error}") from None
        return found

    @property
    def secrets_in_results(self) -> bool:
        """Whether its results may hold pydantic's secrets."""
        if self._hints is None:
            self._learn()
        return self._result_converter is not None if self._secrets is None else self._secrets

    def check_result(self, value: Any, stored: Any) -> None:
        """Raise ArgumentError if whoever reads the result would get something else, in silence."""
        if self._hints is None:
            self._learn()
        if self._result_converter is None or type(value) in SCALARS:
            return
        try:
            got = self._result_converter(stored)
        except ArgumentError:
            return  # the work is done: the result is kept as it is, and who gets it is told
        if not unchanged(value, got):
            raise ArgumentError(_changed(value, got, self._returns))

    def result(self, value: Any) -> Any:
        """A received result as the function's annotation says, if it says anything."""
        if self._hints is None:
            self._learn()
        if self._result_converter is None or value is None:
            return value
        if type(value) is Chunk:
            return [self.result(one) for one in value]
        return self._result_converter(value)


def _as_it_is(value: Any) -> Any:
    return value


def _known_hints(function: Any) -> dict[str, Any]:
    """Return the annotations, each by itself; one that names what cannot be found as its text."""
    function = inspect.unwrap(function)
    try:
        given = inspect.get_annotations(function)
    except Exception:  # Python 3.14 evaluates all of them
        return {}
    hints: dict[str, Any] = {}
    for name, hint in given.items():
        alone: Any = types.SimpleNamespace(__annotations__={name: hint})
        names = getattr(function, "__globals__", {})
        try:
            hints |= typing.get_type_hints(alone, globalns=names, include_extras=True)
        except Exception:
            hints[name] = str(hint)
    return hints


def _changed(value: Any, got: Any, hint: Any) -> str:
    name = hint.__name__ if isinstance(hint, type) else str(hint)
    if isinstance(hint, str):
        return (
            f"cannot send {shown(value)}: it would arrive as {shown(got)}, since its annotation "
            f"{hint!r} names what is not there at run time (import it for the worker, too)"
        )
    return (
        f"cannot send {shown(value)} as {name}: it would arrive as {shown(got)}, which is not "
        "the same (let the annotation name its class)"
    )


def _item_of(hint: Any) -> Any:
    """Return what a list with this annotation holds; of a union, what its first list holds."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return next((item for one in args if (item := _item_of(one)) is not Any), Any)
    is_list = isinstance(origin, type) and issubclass(origin, Iterable) and args
    return args[0] if is_list else Any


def _as_received(arg: Arg) -> Arg:
    """Return it with its value as JSON has it."""
    if isinstance(arg, ReceivedArg):
        return arg
    return Arg(type=arg.type, value=checked_value(arg), name=arg.name)


def _wide(name: str, parameter: _Parameter, value: int) -> str:
    if 0 <= value < 2**64:
        return "uint64"
    raise ArgumentError(
        f"{name} argument {parameter.name!r}: cannot send {value}: it does not fit into 64 bits "
        "(send it as a string)"
    )


def _is_context(parameter: inspect.Parameter, function: Callable[..., Any]) -> bool:
    hint = parameter.annotation
    if isinstance(hint, str):
        # With postponed annotations the name is looked up where the function was written.
        hint = hint.strip("'\"")
        found = getattr(function, "__globals__", {}).get(hint.split(".")[0])
        for part in hint.split(".")[1:]:
            found = getattr(found, part, None)
        hint = found
    return hint is Context
