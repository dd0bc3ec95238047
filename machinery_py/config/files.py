"""Readers of settings: YAML and TOML files as plain mappings, and values that arrive as text.

This module knows no setting; `config.py` does. Each parser is imported by the call that needs it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from machinery_py.errors import ConfigError

FilePath = str | os.PathLike[str]

_TRUE = frozenset({"1", "t", "true", "y", "yes", "on"})
_FALSE = frozenset({"0", "f", "false", "n", "no", "off"})


def read_file(path: FilePath) -> Mapping[Any, object]:
    """Return the settings of a .yml, .yaml or .toml file, as nested mappings.

    Raises:
        ConfigError: the ending is another one, or the file cannot be read.
    """
    ending = os.path.splitext(os.fspath(path))[1].lower()
    if ending in {".yml", ".yaml"}:
        return read_yaml(path)
    if ending == ".toml":
        return read_toml(path)
    raise _refused(path, f"unknown ending {ending!r} (known: .toml, .yaml, .yml)")


def read_yaml(path: FilePath) -> Mapping[Any, object]:
    """Return the settings of a YAML file of any length (Go reads 1,000 bytes).

    Raises:
        ConfigError: PyYAML is missing, or the file cannot be read or is no mapping.
    """
    text = _text_of(path)
    try:
        import yaml  # an extra
    except ImportError as error:
        raise ConfigError(
            "Config.from_yaml needs PyYAML: pip install 'machinery_py[yaml]'"
        ) from error
    try:
        content: object = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        # Not `from error`, and only up to the first quote: PyYAML quotes the file, where passwords
        # are.
        problem = (error.problem or "").partition("'")[0].strip()
        raise _refused(path, f"not valid YAML{where} ({problem})") from None
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date that does not exist
        raise _refused(path, "not valid YAML") from None
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise _refused(path, f"found {kind_of(content)} (expected 'key: value' lines)")
    return content


def read_toml(path: FilePath) -> Mapping[Any, object]:
    """Return the settings of a TOML file, with the keys of Go's YAML.

    Raises:
        ConfigError: the file cannot be read or is not valid TOML.
    """
    import tomllib  # costs every program 4 ms at its start, and few read TOML

    text = _text_of(path)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"not valid TOML ({error})") from error


def _text_of(path: FilePath) -> str:
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise _refused(path, f"not UTF-8 at byte {error.start}") from error
    except OSError as error:
        raise _refused(path, (error.strerror or type(error).__name__).lower()) from error


def _refused(path: FilePath, text: str) -> ConfigError:
    return ConfigError(f"config file {os.fspath(path)!r}: {text}")


def from_text(kind: str, text: str) -> object:
    """Return the value of this kind that a text means, or the text itself if it means none.

    A flag is any of 1, t, true, y, yes, on and their opposites, in any case. A mapping is
    `key:value,key:value` as in Go; its whole numbers and true or false are taken as such (Go makes
    all of them texts, or null).
    """
    if kind == "bool":
        word = text.lower()
        return True if word in _TRUE else False if word in _FALSE else text
    if kind in {"int", "float"}:
        try:
            return int(text) if kind == "int" else float(text)
        except ValueError:
            return text
    if kind == "str":
        return text
    pairs = [pair.partition(":") for pair in text.split(",")]
    if not all(key.strip() and colon for key, colon, _ in pairs):
        return text
    return {key.strip(): _scalar(value.strip()) for key, _, value in pairs}


def _scalar(text: str) -> object:
    if text in {"true", "false"}:
        return text == "true"
    return int(text) if text.isascii() and text.removeprefix("-").isdigit() else text


def kind_of(value: object) -> str:
    """Name the kind of a value, in the words of a configuration file."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "a true or false"
        case str():
            return "a text"
        case int() | float():
            return "a number"
        case list() | tuple():
            return "a list"
        case Mapping():
            return "a mapping"
        case _:
            return f"a {type(value).__name__}"
