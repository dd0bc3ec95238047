"""Values of tasks as text: secrets masked, JSON, cut.

A secret is found by its name: of a parameter, a header, a note, a key inside a value. Texts of
errors and tracebacks stay as the task wrote them.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from machinery_py.tasks.signature import Arg
from machinery_py.values.values import from_result

Mask = Callable[[str, Any], Any]

MASKED = "•••"
LONGEST = 20_000  # characters of a value or a dead letter, and items of a list in it
SHORT = 300  # of a cell in a list
DEEPEST = 50  # levels of a value; what is deeper is left out

_SECRET = re.compile(
    r"passw|pwd|secret|token|authoriz|credential|cookie|session|(api|private|access)[-_]?key", re.I
)
_NESTED = ("OnSuccess", "OnError", "ChordCallback")


def mask_secrets(name: str, value: Any) -> Any:
    """Return MASKED for a value whose name is that of a secret, else the value."""
    return MASKED if _SECRET.search(name) else value


class Masking:
    """The shown form of values.

    Args:
        mask: gets the name and the value of each argument, header, note, and pair in a mapping;
            returns what is shown in its place.
        parameters: names of the positional parameters of a task.
    """

    def __init__(self, mask: Mask, parameters: Callable[[str], Sequence[str]]) -> None:
        self._mask = mask
        self._parameters = parameters

    def text(self, value: Any, name: str = "", limit: int = LONGEST) -> str:
        """Return a value as JSON; a text at the top is one in quotes, too."""
        return _cut(_json(self.masked(value, name, limit)), limit)

    def masked(self, value: Any, name: str = "", limit: int = LONGEST, depth: int = 0) -> Any:
        """Return the value with all secrets in it masked, and of large ones the beginning."""
        if name:
            value = self._mask(name, value)
        if depth > DEEPEST:
            return "…"
        if isinstance(value, str | bytes):
            return value[:limit]
        if isinstance(value, Mapping):
            if value.get("$") == "secret":  # what was a SecretStr
                return MASKED
            if value.get("$") == "dict" and isinstance(value.get("v"), list):  # of pairs
                return {"$": "dict", "v": self._pairs(value["v"][:limit], limit, depth + 1)}
            if value.keys() == {"$", "v"} and isinstance(value["v"], str):  # a moment, a Decimal, …
                return value["v"][:limit]
            pairs = itertools.islice(value.items(), limit)
            return {key: self.masked(one, str(key), limit, depth + 1) for key, one in pairs}
        if isinstance(value, list | tuple):
            return [self.masked(one, "", limit, depth + 1) for one in value[:limit]]
        return value

    def _pairs(self, pairs: Sequence[Any], limit: int, depth: int) -> list[Any]:
        return [
            [one[0], self.masked(one[1], str(one[0]), limit, depth)]
            if isinstance(one, list) and len(one) == 2
            else self.masked(one, "", limit, depth)
            for one in pairs
        ]

    def args(self, task: str, args: Sequence[Arg]) -> list[tuple[str, Arg]]:
        """Return the arguments masked, each under its own name or that of its parameter."""
        names = self._parameters(task)
        found = []
        for index, arg in enumerate(args):
            name = arg.name or (names[index] if index < len(names) else "")
            value = self.masked(arg.value, name)
            found.append((name, msgspec.structs.replace(arg, value=value)))
        return found

    def body(self, body: bytes) -> str:
        """Return a message as text; of what is no JSON object, the bytes as they are."""
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            return _cut(body[:LONGEST].decode("utf-8", "backslashreplace"), LONGEST)
        return _cut(_json(self._message(message)), LONGEST)

    def _message(self, value: Any, depth: int = 0) -> Any:
        """Return a signature with its arguments masked, and the signatures inside it as well."""
        if isinstance(value, list) and depth <= DEEPEST:
            return [self._message(one, depth + 1) for one in value]
        if not isinstance(value, dict) or depth > DEEPEST:
            return self.masked(value, "", depth=depth)
        found = {}
        for key, one in value.items():
            if key == "Args" and isinstance(one, list):
                names = self._parameters(str(value.get("Name")))
                found[key] = [self._arg(arg, names[place:]) for place, arg in enumerate(one)]
            else:
                inner = key in _NESTED
                found[key] = self._message(one, depth + 1) if inner else self.masked(one, key)
        return found

    def _arg(self, arg: Any, names: Sequence[str]) -> Any:
        if not isinstance(arg, dict):
            return self.masked(arg, names[0] if names else "")
        name = arg.get("Name") or (names[0] if names else "")
        return {**arg, "Value": self.masked(arg.get("Value"), str(name))}


def python_call(task: str, args: Sequence[tuple[str, Arg]], queue: str) -> str:
    """Return the call as Python; what is masked stays masked."""
    words = []
    for _, arg in args:
        value = _cut(repr(from_result(arg.type, arg.value)), LONGEST)
        words.append(f"{arg.name}={value}" if arg.name.isidentifier() else value)
    given = ", ".join(words)
    options = f".options(queue={queue!r})" if queue else ""
    short = task.rpartition(".")[2]
    if short.isidentifier():
        return f"{short}{options}.send({given})"
    return f"server.send_task(Signature.of({', '.join([repr(task), *words])}))"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def _plain(value: Any) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
