"""`Option`, the description and check of one setting, and `Section`, a record of options.

This module knows no setting; `config.py` and `sections.py` declare them.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, cast, overload

from machinery_py.config import urls
from machinery_py.config.files import kind_of
from machinery_py.errors import ConfigError, nearest
from machinery_py.texts import quoted

T = TypeVar("T")

CENTURY = 100 * 365 * 86400  # seconds; what is longer overflows the clocks of some store
MOMENT = 0.001  # seconds; the shortest length where none at all would make no sense
SHORTEST_STALL = 5.0  # seconds; a worker process gives a sign of life each second, at the latest
UNLIMITED = 2**63 - 1  # what Go and the stores keep in an integer


N = TypeVar("N", int, float)

if TYPE_CHECKING:

    class _LengthField(Generic[N]):
        """Field that is given as a number or a timedelta, and read as a number."""

        @overload
        def __get__(self, instance: None, owner: type) -> Self: ...
        @overload
        def __get__(self, instance: object, owner: type) -> N: ...
        def __get__(self, instance: object, owner: type) -> Any: ...
        def __set__(self, instance: object, value: N | dt.timedelta) -> None: ...

    Length = _LengthField[float]
    WholeLength = _LengthField[int]
else:
    Length, WholeLength = float, int
_NUMBERS = {"Length": "float", "WholeLength": "int"}  # kinds of these fields

_UNITS = {"s": dt.timedelta(seconds=1), "ms": dt.timedelta(milliseconds=1)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Option:
    """Facts about one option.

    Attributes:
        key: as in a file, with a dot after its section: "redis.max_idle".
        kind: "str", "int", "float", "bool" or "Mapping[str, object]".
        low: the least value; of a text the least length.
        empty_is_default: whether 0 or "" stands for the default, as in Go.
        variable: its name in the environment, after the prefix.
        check: returns what is wrong with a value of the right kind; "" if nothing.
    """

    key: str
    kind: str
    default: object
    meaning: str
    unit: str
    low: float
    empty_is_default: bool
    variable: str
    check: Callable[[Any], str] | None

    def problem(self, value: object) -> str:
        """Return what is wrong with the value (found and expected); "" if nothing."""
        value = self._number(value)
        high = CENTURY if self.unit in _UNITS else UNLIMITED
        limits = (
            f"{self.low:g} or more" if high == UNLIMITED else f"{self.low:g} to {high} {self.unit}"
        )
        match self.kind:
            case "bool":
                fits, expected = isinstance(value, bool), "true or false"
            case "int":
                fits = type(value) is int and self.low <= value <= high
                expected = f"a whole number, {limits}"
            case "float":
                fits = type(value) in {int, float} and self.low <= cast(float, value) <= high
                expected = f"a number, {limits}"
            case "str":
                fits = isinstance(value, str) and len(value) >= self.low
                expected = "a text, not empty" if self.low else "a text"
                if self.key in urls.ROLES and isinstance(value, (list, tuple)):
                    expected = "one text: multiple_broker_separator=';' and 'redis://a;redis://b'"
            case _:
                fits = isinstance(value, Mapping) and all(
                    isinstance(key, str) for key in cast(Any, value)
                )
                expected = "a mapping of names to values"
        if not fits:
            return f"{self.key}: found {_shown(value)} (expected {expected})"
        text = self.check(value) if self.check else ""
        return text and f"{self.key}: {text}"

    def settled(self, value: object) -> object:
        """Return a right value as it is kept: a length as a number, Go's 0 as the default."""
        value = self._number(value)
        if self.empty_is_default and not value:
            return self.default
        if self.kind == "float":
            return float(cast(float, value))
        return dict(cast(Mapping[str, object], value)) if isinstance(value, Mapping) else value

    def _number(self, value: object) -> object:
        """Return a timedelta as the number of units that it is; other values as they are."""
        if not isinstance(value, dt.timedelta) or self.unit not in _UNITS:
            return value
        number = value / _UNITS[self.unit]
        return int(number) if self.kind == "int" and number.is_integer() else number


def _shown(value: object) -> str:
    """Return the value for an error text: short, and without what may be a password."""
    if isinstance(value, str):
        return quoted(urls.redact_word(value))
    if isinstance(value, int | float):
        return "a huge number" if math.isfinite(value) and abs(value) > 1e30 else repr(value)
    return kind_of(value)


def one_of(*words: str) -> Callable[[str], str]:
    """Return the check of a text that is one of these words."""

    def check(word: str) -> str:
        known = ", ".join(filter(None, words))
        return "" if word in words else f"found {word!r} (known: {known}{nearest(word, words)})"

    return check


def option(
    default: T,
    meaning: str,
    unit: str = "",
    *,
    low: float = 0,
    empty_is_default: bool = False,
    variable: str = "",
    check: Callable[[Any], str] | None = None,
) -> T:
    """Declare a field of a Section; see `Option`. `variable`: if its name is not the key's."""
    facts = {
        "meaning": meaning,
        "unit": unit,
        "low": low,
        "empty_is_default": empty_is_default,
        "variable": variable,
        "check": check,
    }
    if isinstance(default, dict):
        return cast(T, field(default_factory=dict[str, object], hash=False, metadata=facts))
    return field(default=default, metadata=facts)


def length_option(default: float, meaning: str, unit: str, **limits: Any) -> Any:
    """Declare a field of a Section that is a Length or a WholeLength; else as `option`."""
    return option(default, meaning, unit, **limits)


class _WrongCall(ConfigError, TypeError):
    """A Section is called as it cannot be: a TypeError like that of any other call."""


class Section:
    """A frozen dataclass of options, checked when it is made. `PREFIX`: of its keys, "redis."."""

    __slots__ = ()
    PREFIX: ClassVar[str]

    def __new__(cls, *given: object, **chosen: object) -> Self:
        """Refuse what is no option, in words."""
        fields = [each.name for each in dataclasses.fields(cast(Any, cls)) if each.init]
        unknown = next((name for name in chosen if name not in fields), "")
        if unknown:
            raise _WrongCall(f"{cls.PREFIX}{unknown}: unknown option{nearest(unknown, fields)}")
        if given:
            raise _WrongCall(
                f"{cls.__name__}(…): found {_shown(given[0])} without a name "
                f"(expected {cls.__name__}(option=…))"
            )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        options = options_of(type(self)).items()
        raise_all([text for name, opt in options if (text := opt.problem(getattr(self, name)))])
        self.settle()

    def settle(self) -> None:
        """Bring values without problems into the form in which they are kept."""
        for name, opt in options_of(type(self)).items():
            object.__setattr__(self, name, opt.settled(getattr(self, name)))


def options_of(section: type[Section]) -> Mapping[str, Option]:
    """The options of a Section by the names of their fields."""
    found: dict[str, Option] = {}
    for each in dataclasses.fields(cast(Any, section)):
        if not each.metadata:
            continue  # a section inside the Config
        key = section.PREFIX + each.name
        variable = each.metadata["variable"] or key.upper().replace(".", "_")
        default = each.default if each.default is not dataclasses.MISSING else {}
        facts = {**each.metadata, "variable": variable, "default": default}
        kind = _NUMBERS.get(str(each.type), str(each.type))
        found[each.name] = Option(key=key, kind=kind, **facts)
    return found


def raise_all(problems: Sequence[str]) -> None:
    """Raise one ConfigError with a line for each problem, if there is any."""
    if problems:
        heading = f"{len(problems)} settings cannot be used:\n  " if len(problems) > 1 else ""
        raise ConfigError(heading + "\n  ".join(problems))
