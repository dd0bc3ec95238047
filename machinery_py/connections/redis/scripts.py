"""Scripts for Redis: how they are read from `.lua` files, and how their arguments are packed.

A script is a file in the folder `lua/` of its package, or in a folder there that has the name of
the module. It begins with what goes in and what comes out. `--! include <path in the package>`
brings a piece that several scripts share, once, to where the first of these lines stands. Each call
runs the whole script anew, and makes a function when it comes to it: so what is rarely needed is
included behind the end of the usual case. `$NAME` is a constant that Python gives: every local that
a function uses is searched for when the function is made, but a number that stands in the text
costs nothing.

A script gets one argument, a msgpack array, and few keys: so the costs of a batch do not grow with
the number of its values. Byte strings come back as msgpack `bin`; Redis' own packer would call them
text.
"""

from __future__ import annotations

import functools
import hashlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import msgspec

from machinery_py.connections.redis.keys import DELAYED
from machinery_py.errors import BackendUnavailable, MachineryError

pack: Final = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Script:
    """A script, the name under which Redis keeps it, and what the errors of its calls say."""

    text: str
    path: str = field(default="", compare=False)  # of its file, in the package
    doing: str = ""  # for error texts: "publishing"
    away: type[MachineryError] = BackendUnavailable
    body: bytes = field(init=False, repr=False)
    sha: bytes = field(init=False, repr=False)
    call: bytes = field(init=False, repr=False)  # EVALSHA without keys, up to its argument's length

    def __post_init__(self) -> None:
        body = self.text.encode()
        object.__setattr__(self, "body", body)
        sha = hashlib.sha1(body).hexdigest().encode()
        object.__setattr__(self, "sha", sha)
        call = b"*4\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n$1\r\n0\r\n$" % sha
        object.__setattr__(self, "call", call)

    def with_text(self, text: str) -> Script:
        """Return the same script with another text."""
        return Script(text, self.path, self.doing, self.away)


@functools.cache
def with_delayed_key(script: Script, key: str) -> Script:
    """Return the script with another key for Go's delayed messages."""
    quoted = "".join(
        chr(byte) if chr(byte).isalnum() and byte < 128 else f"\\{byte:03d}"
        for byte in key.encode()
    )
    return script.with_text(script.text.replace(f"'{DELAYED}'", f"'{quoted}'"))


_CALL = "local call = redis.call\n"
# Raises as key_type of the prelude does.
_NAMING = """local function call(command, key, ...)
  if not key then return redis.call(command) end
  local reply = redis.pcall(command, key, ...)
  if type(reply) ~= 'table' or not reply.err then return reply end
  if string.find(reply.err, 'wrong kind of value', 1, true) then
    local kind = redis.call('TYPE', key).ok
    error('WRONGTYPE ' .. key .. ' holds a ' .. kind .. ', not what is kept there')
  end
  error(reply)
end
"""


@functools.cache
def naming(script: Script) -> Script:
    """Return the script with errors that name the key that holds something else.

    It is slower, and for a repeat of one that said that there is such a key.
    """
    return script.with_text(script.text.replace(_CALL, _NAMING, 1))


_CONSTANT = re.compile(r"\$([A-Z_]+)")
_NONE: Mapping[str, object] = MappingProxyType({})


class Folder:
    """The scripts of one folder, and the constants that each of them may name."""

    def __init__(
        self,
        path: str,
        constants: Mapping[str, object] = _NONE,
        *,
        away: type[MachineryError] = BackendUnavailable,
        package: str = "machinery_py",
    ) -> None:
        self._path = path
        self._constants = constants
        self._away = away
        self._package = package

    def script(self, name: str, doing: str = "", **constants: object) -> Script:
        """Read `<name>.lua`. These constants are its own, and it must name each of them.

        Raises:
            ValueError: a constant or a file is missing, or a constant is not named. It says where.
        """
        text = self.text(name, **constants)
        return Script(text, f"{self._path}/{name}.lua", doing, self._away)

    def text(self, name: str, **constants: object) -> str:
        """As `script`, but the text alone."""
        path = f"{self._path}/{name}.lua"
        pieces: dict[str, _Piece] = {}
        code = _code(self._package, path, pieces, "")
        if unused := [one for one in constants if f"${one}" not in code]:
            raise ValueError(f"{path}: nothing names the constants {', '.join(unused)}")
        values = {**self._constants, **constants}
        try:
            return _CONSTANT.sub(lambda match: str(values[match[1]]), code)
        except KeyError as error:
            at = next(at for piece in pieces.values() for at in piece.places(error.args[0]))
            raise ValueError(f"{at}: ${error.args[0]} has no value (give it to {path})") from None


@dataclass(frozen=True, slots=True)
class _Include:
    path: str
    at: str  # where that is said


@dataclass(frozen=True, slots=True)
class _Piece:
    """A file, and its lines of code without comments, or what is included there."""

    path: str
    source: str
    lines: tuple[str | _Include, ...]

    def places(self, constant: str) -> Iterator[str]:
        for number, line in enumerate(self.source.splitlines(), 1):
            if not line.lstrip().startswith("--") and constant in _CONSTANT.findall(line):
                yield f"{self.path}:{number}"


@functools.cache
def _piece(package: str, path: str) -> _Piece:
    data = pkgutil.get_data(package, path)  # from a zip as well
    if data is None:
        raise OSError("the loader of the package reads no files")
    source = data.decode()
    lines: list[str | _Include] = []
    for number, line in enumerate(source.splitlines(), 1):
        text = line.lstrip()
        if text.startswith("--!"):
            directive, _, included = text.removeprefix("--!").strip().partition(" ")
            if directive != "include" or not included:
                raise ValueError(f"{path}:{number}: {line!r} (expected '--! include <path>')")
            lines.append(_Include(included, f"{path}:{number}"))
        elif text and not text.startswith("--"):
            lines.append(line + "\n")
    return _Piece(path, source, tuple(lines))


def _code(package: str, path: str, pieces: dict[str, _Piece], at: str) -> str:
    """Return the code of a file and of what it includes, as far as `pieces` has it not yet."""
    try:
        piece = pieces[path] = _piece(package, path)
    except OSError as error:
        raise ValueError(f"{at or package}: {path} is not there ({error})") from error
    return "".join(
        line
        if isinstance(line, str)
        else ""
        if line.path in pieces
        else _code(package, line.path, pieces, line.at)
        for line in piece.lines
    )
