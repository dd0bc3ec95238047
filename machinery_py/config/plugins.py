"""Store plug-ins: packages that bring a URL scheme by an entry point.

    [options.entry_points]
    machinery_py.stores =
        file = file_store:FileFamily      the scheme, and the Family that its URLs open

Entry points are read when a scheme is met that this package does not have, and never else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, cast

from machinery_py.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

GROUP = "machinery_py.stores"


class Plugin(Protocol):
    """Attributes that are read of a `stores.open.Family` before it is opened.

    Attributes:
        roles: "broker", "result backend", "lock": those that its URLs can be.
        section: the `Section` of its own options, or None.
    """

    roles: Iterable[str]
    section: type | None


_loaded: dict[str, Plugin] = {}


def plugin_of(scheme: str) -> Plugin | None:
    """Return the plug-in that brings this scheme; None if no installed package does.

    Raises:
        ConfigError: it cannot be imported, is no store, or two packages bring the scheme.
    """
    if scheme and scheme not in _loaded:
        found = [one for one in _entry_points() if one.name == scheme]
        if not found:
            return None
        if len({one.value for one in found}) > 1:
            raise ConfigError(
                f"two store plug-ins for {scheme!r}: {' and '.join(map(_shown, found))} "
                "(uninstall one)"
            )
        _loaded[scheme] = _load(found[0])
    return _loaded.get(scheme)


def _entry_points() -> EntryPoints:
    from importlib.metadata import entry_points  # only programs with other schemes pay for it

    return entry_points(group=GROUP)


def _load(point: EntryPoint) -> Plugin:
    try:
        found = point.load()
    except Exception as error:  # code of another package: whatever it raises
        raise ConfigError(
            f"store plug-in {_shown(point)} cannot be imported: {type(error).__name__}: {error} "
            f"(repair or uninstall {_package(point)})"
        ) from error
    if not hasattr(found, "roles"):
        raise ConfigError(
            f"store plug-in {_shown(point)} is no store "
            "(expected a class derived from machinery_py.stores.open.Family)"
        )
    return cast(Plugin, found)


def _shown(point: EntryPoint) -> str:
    return f"{point.name!r} ({point.value} of {_package(point)})"


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"


def plugin_schemes() -> list[str]:
    """Return the schemes that installed packages bring, without importing them."""
    return sorted({point.name for point in _entry_points()})
