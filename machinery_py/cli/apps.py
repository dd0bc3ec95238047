"""Import of the user's Server by `module` or `module:object`, with a text for each failure."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from importlib import metadata
from types import ModuleType, TracebackType

from machinery_py.cli.output import at_home
from machinery_py.config.urls import redact
from machinery_py.errors import AppNotFound, MachineryError
from machinery_py.server import Server

LIBRARIES = ("msgspec", "redis", "pymongo", "pika", "croniter")
EXTRAS = ("psycopg",)
HINT = "run from the folder that holds it or pass --app-dir"


class AppBroken(AppNotFound):
    """The user's module raised when it was imported. `trace`: its traceback without our frames."""

    def __init__(self, text: str, trace: str) -> None:
        self.trace = trace
        super().__init__(text)


def load(app: str, app_dir: str = "", *, command: str = "worker") -> Server:
    """Return the Server that `app` names.

    Args:
        app_dir: the folder to import from, put first on sys.path; empty is the working directory.
        command: the one that was typed, for the advice in an error.

    Raises:
        AppNotFound: there is no such module or Server, or several.
        AppBroken: the module raised.
        MachineryError: making the Server failed (a wrong setting).
    """
    name, _, path = app.partition(":")
    if "://" in app or "@" in app:
        raise AppNotFound(
            f"app {redact(app)!r}: found a URL "
            "(expected MODULE or MODULE:OBJECT; the URL goes to its Server, or into MACHINERY_URL)"
        )
    if "/" in app or os.sep in app:
        raise AppNotFound(_instead_of_path(app, command))
    if not name:
        raise AppNotFound(f"app {app!r}: no module named (expected MODULE or MODULE:OBJECT)")
    module = _import(name, os.path.abspath(app_dir or "."))
    return _named(module, name, path) if path else _only(module, name, command)


def _instead_of_path(app: str, command: str) -> str:
    """Return the error text for a file or folder in place of a module."""
    path, colon, rest = app.partition(":")
    folder, file = os.path.split(path.rstrip("/" + os.sep))
    module = file.removesuffix(".py")
    if not module.isidentifier():
        hint = "as shop.tasks for shop/tasks.py"
    else:
        place = "" if folder in ("", ".") else f" --app-dir {folder}"
        hint = f"machinery {command} {module}{colon}{rest}{place}"
    return f"app {app!r}: found a path (expected MODULE or MODULE:OBJECT: {hint})"


def _import(name: str, folder: str) -> ModuleType:
    if not os.path.isdir(folder):
        raise AppNotFound(
            f"cannot import {name!r} from {at_home(folder)}: no such folder (see --app-dir)"
        )
    while folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    where = f"cannot import {name!r} from {at_home(folder)}"
    try:
        return importlib.import_module(name)
    except MachineryError:
        raise  # a setting, or a name that is taken: its text is enough
    except (Exception, SystemExit) as error:  # user code
        if isinstance(error, ModuleNotFoundError) and _is_missing(error, name):
            raise AppNotFound(
                f"{where}: no such module ({_there_is(name, folder)}{HINT})"
            ) from None
        text = ": ".join(filter(None, (type(error).__name__, str(error))))
        if isinstance(error, SystemExit):
            text = (
                f"it calls sys.exit({error.code!r}) when it is imported "
                '(put that below: if __name__ == "__main__":)'
            )
        shown = _first_user_frame(error.__traceback__)
        trace = "".join(traceback.format_exception(type(error), error, shown))
        raise AppBroken(f"{where}: {text}", trace) from error


def _is_missing(error: ModuleNotFoundError, name: str) -> bool:
    """Whether the module itself is missing, and not one that it imports."""
    parents = [name] + [name[:at] for at, letter in enumerate(name) if letter == "."]
    return error.name in parents and _first_user_frame(error.__traceback__) is None


def _there_is(name: str, folder: str) -> str:
    """Return the part of an error that offers the module with the nearest name."""
    *packages, last = name.split(".")
    for parents, part in ((packages, last), ([], name.split(".")[0])):
        inner = os.path.join(folder, *parents)
        if os.path.isdir(inner):
            there = [found for found in _modules(inner) if [*parents, found] != name.split(".")]
            if close := difflib.get_close_matches(part, there, n=1, cutoff=0.5):
                return f"there is {'.'.join([*parents, close[0]])!r}; "
    return ""


def _modules(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            stem, ending = os.path.splitext(entry.name)
            if not stem.isidentifier():
                continue
            if ending == ".py" or (
                not ending and os.path.isfile(os.path.join(entry.path, "__init__.py"))
            ):
                yield stem


def _first_user_frame(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the user's code on; None if the error never got there."""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name not in (__file__, importlib.__file__) and not name.startswith("<frozen importlib"):
            return trace
        trace = trace.tb_next
    return None


def _named(module: ModuleType, name: str, path: str) -> Server:
    found: object = module
    for part in path.split("."):
        if not hasattr(found, part):
            names = list(_servers(module))
            there = f"there is {_listed(names)}" if names else "there is no Server in it"
            raise AppNotFound(f"module {name!r}: no {path!r} in it ({there})")
        found = getattr(found, part)
    if not isinstance(found, Server):
        kind = type(found).__name__
        article = "an" if kind[:1].lower() in "aeiou" else "a"
        raise AppNotFound(f"module {name!r}: {path!r} is {article} {kind} (expected a Server)")
    return found


def _only(module: ModuleType, name: str, command: str) -> Server:
    found = _servers(module)
    if not found:
        raise AppNotFound(
            f"module {name!r}: no Server found (name it: machinery {command} {name}:my_server)"
        )
    if len(found) > 1:
        raise AppNotFound(
            f"module {name!r}: {len(found)} Servers, {_listed(found)} "
            f"(pick one: machinery {command} {name}:{next(iter(found))})"
        )
    return next(iter(found.values()))


def _servers(module: ModuleType) -> dict[str, Server]:
    """Return the Servers of a module, each under its first name."""
    found: dict[str, Server] = {}
    for key, value in vars(module).items():
        if isinstance(value, Server) and value not in found.values():
            found[key] = value
    return found


def _listed(names: Iterable[str]) -> str:
    *others, last = map(repr, names)
    return f"{', '.join(others)} and {last}" if others else last


def library_versions() -> dict[str, str]:
    """Return the versions of the packages that stores need; "" is missing, but for an extra."""
    found = {name: _version(name) for name in (*LIBRARIES, *EXTRAS)}
    return {name: version for name, version in found.items() if version or name in LIBRARIES}


def _version(package: str) -> str:
    """Return the version of an installed package, or ""."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
