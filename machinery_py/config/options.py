"""How a setting is described and checked: `Option`, and the records whose fields are made of them.

Nothing here knows which settings there are; `config/config.py` does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, cast

from machinery_py.config import urls
from machinery_py.config.files import kind_of
from machinery_py.errors import ConfigError

T = TypeVar("T")

CENTURY = 100 * 365 * 86400  # seconds; what is longer overflows the clocks of some store
MOMENT = 0.001  # seconds; the shortest length where none at all would make no sense
UNLIMITED = 2**63 - 1  # what Go and the stores keep in an integer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Option:
    """Facts about one option.

    Attributes:
        key: as in a file, with a dot after its section: "redis.max_idle".
        kind: "str", "int", "float", "bool" or "Mapping[str, object]".
        low: the least value; of a text the least length.
        empty_is_default: whether 0 or "" stands for the default, as in Go.
        variable: its name in the environment, after the prefix.
    """

    key: str
    kind: str
    default: object
    meaning: str
    unit: str
    low: float
    empty_is_default: bool
    variable: str

    def problem(self, value: object) -> str:
        """Return what is wrong with the value: what was found and what is expected; "" if nothing."""
        high = CENTURY if self.unit in {"s", "ms"} else UNLIMITED
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
            case _:
                fits = isinstance(value, Mapping) and all(
                    isinstance(key, str) for key in cast(Any, value)
                )
                expected = "a mapping of names to values"
        return "" if fits else f"{self.key}: found {_shown(value)} (expected {expected})"

    def settled(self, value: object) -> object:
        """A value that has no problem, as it is kept: a length as float, a mapping as a copy, Go's 0 as the default."""
        if self.empty_is_default and not value:
            return self.default
        if self.kind == "float":
            return float(cast(float, value))
        return dict(cast(Mapping[str, object], value)) if isinstance(value, Mapping) else value


def _shown(value: object) -> str:
    """The value for an error text: short, and without what may be a password at a wrong place."""
    if isinstance(value, str):
        text = urls.redact_word(value)
        return repr(text if len(text) <= 60 else f"{text[:60]}…")
    if isinstance(value, int | float):
        return "a huge number" if math.isfinite(value) and abs(value) > 1e30 else repr(value)
    return kind_of(value)


def option(
    default: T,
    meaning: str,
    unit: str = "",
    *,
    low: float = 0,
    empty_is_default: bool = False,
    variable: str = "",
) -> T:
    """A field of a Section with what `Option` wants to know; `variable` only where it is not the key's."""
    facts = {
        "meaning": meaning,
        "unit": unit,
        "low": low,
        "empty_is_default": empty_is_default,
        "variable": variable,
    }
    return field(default=default, metadata=facts)


def table(meaning: str) -> Mapping[str, object]:
    """A field of a Section that holds a mapping, by default an empty one."""
    facts = {"meaning": meaning, "unit": "", "low": 0, "empty_is_default": False, "variable": ""}
    return field(default_factory=dict[str, object], hash=False, metadata=facts)


class Section:
    """A frozen dataclass of options, checked when it is made. `PREFIX` stands before its keys, as "redis."."""

    __slots__ = ()
    PREFIX: ClassVar[str]

    def __post_init__(self) -> None:
        raise_all(
            [
                text
                for name, opt in options_of(type(self)).items()
                if (text := opt.problem(getattr(self, name)))
            ]
        )
        self.settle()

    def settle(self) -> None:
        """Bring the values, which have no problem, into the form in which they are kept."""
        for name, opt in options_of(type(self)).items():
            object.__setattr__(self, name, opt.settled(getattr(self, name)))


def options_of(section: type[Section]) -> Mapping[str, Option]:
    """The options of a Section by the names of their fields."""
    found: dict[str, Option] = {}
    for each in dataclasses.fields(cast(Any, section)):
        if not each.metadata:
            continue  # a section inside the Config
        key = section.PREFIX + each.name
        facts = {
            **each.metadata,
            "variable": each.metadata["variable"] or key.upper().replace(".", "_"),
        }
        default = each.default if each.default is not dataclasses.MISSING else {}
        found[each.name] = Option(key=key, kind=str(each.type), default=default, **facts)
    return found


def raise_all(problems: Sequence[str]) -> None:
    """Raise one ConfigError with a line for each problem, if there is any."""
    if problems:
        heading = f"{len(problems)} settings cannot be used:\n  " if len(problems) > 1 else ""
        raise ConfigError(heading + "\n  ".join(problems))
