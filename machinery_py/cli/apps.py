"""Import of the user's Server by `module` or `module:object`, and an error text for each failure."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType, TracebackType

from machinery_py.cli.output import at_home
from machinery_py.config.urls import redact
from machinery_py.errors import AppNotFound, MachineryError
from machinery_py.server import Server

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
            f"app {redact(app)!r}: found a URL (expected MODULE or MODULE:OBJECT; the URL goes to its Server, "
            "or into MACHINERY_URL)"
        )
    if not name:
        raise AppNotFound(f"app {app!r}: no module named (expected MODULE or MODULE:OBJECT)")
    module = _import(name, os.path.abspath(app_dir or "."))
    return _named(module, name, path) if path else _only(module, name, command)


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
    except ModuleNotFoundError as error:
        if _is_missing(error, name):
            raise AppNotFound(
                f"{where}: no such module ({_there_is(name, folder)}{HINT})"
            ) from None
        raise AppBroken(f"{where}: {_says(error)}", _trace(error)) from error
    except MachineryError:
        raise  # a setting, or a name that is taken: its text is enough
    except SystemExit as error:
        raise AppBroken(
            f"{where}: it calls sys.exit({error.code!r}) when it is imported "
            '(put that below: if __name__ == "__main__":)',
            _trace(error),
        ) from error
    except Exception as error:  # user code
        raise AppBroken(f"{where}: {_says(error)}", _trace(error)) from error


def _is_missing(error: ModuleNotFoundError, name: str) -> bool:
    """Whether the module itself is missing, and not one that it imports."""
    parents = [name] + [name[:at] for at, letter in enumerate(name) if letter == "."]
    return error.name in parents and _first_user_frame(error.__traceback__) is None


def _there_is(name: str, folder: str) -> str:
    """Return the part of an error that offers the module with the nearest name."""
    *packages, last = name.split(".")
    close: list[str] = []
    if os.path.isdir(inner := os.path.join(folder, *packages)):
        close = difflib.get_close_matches(
            last, [found for found in _modules(inner) if found != last], n=1, cutoff=0.5
        )
    if close:
        return f"there is {'.'.join([*packages, close[0]])!r}; "
    close = difflib.get_close_matches(name.split(".")[0], list(_modules(folder)), n=1, cutoff=0.5)
    return f"there is {close[0]!r}; " if close and close[0] != name else ""


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


def _says(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _first_user_frame(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the user's code on; None if the error never got there."""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if (
            name != __file__
            and not name.startswith("<frozen importlib")
            and name != importlib.__file__
        ):
            return trace
        trace = trace.tb_next
    return None


def _trace(error: BaseException) -> str:
    shown = _first_user_frame(error.__traceback__)
    return "".join(traceback.format_exception(type(error), error, shown))


def _named(module: ModuleType, name: str, path: str) -> Server:
    found: object = module
    for part in path.split("."):
        if not hasattr(found, part):
            names = [key for key, _ in _servers(module)]
            there = f"there is {_listed(names)}" if names else "there is no Server in it"
            raise AppNotFound(f"module {name!r}: no {path!r} in it ({there})")
        found = getattr(found, part)
    if not isinstance(found, Server):
        raise AppNotFound(f"module {name!r}: {path!r} is {_kind(found)} (expected a Server)")
    return found


def _kind(value: object) -> str:
    kind = type(value).__name__
    return f"an {kind}" if kind[:1].lower() in "aeiou" else f"a {kind}"


def _only(module: ModuleType, name: str, command: str) -> Server:
    found = _servers(module)
    if not found:
        raise AppNotFound(
            f"module {name!r}: no Server found (name it: machinery {command} {name}:my_server)"
        )
    if len(found) > 1:
        names = [key for key, _ in found]
        raise AppNotFound(
            f"module {name!r}: {len(found)} Servers, {_listed(names)} "
            f"(pick one: machinery {command} {name}:{names[0]})"
        )
    return found[0][1]


def _servers(module: ModuleType) -> list[tuple[str, Server]]:
    """Return the Servers of a module, each under its first name."""
    found: dict[int, tuple[str, Server]] = {}
    for key, value in vars(module).items():
        if isinstance(value, Server):
            found.setdefault(id(value), (key, value))
    return list(found.values())


def _listed(names: list[str]) -> str:
    shown = [repr(name) for name in names]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def installed_version(package: str) -> str:
    """Return the version of an installed package, or ""."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
