"""Own options of store plug-ins: the setting `stores`, and the Section made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from machinery_py.config.files import from_text, kind_of
from machinery_py.config.options import Section, options_of
from machinery_py.config.plugins import plugin_of, plugin_schemes
from machinery_py.config.server_urls import MASK
from machinery_py.errors import ConfigError, nearest


def section_of(stores: Mapping[str, object], scheme: str) -> Section | None:
    """Return the options of the plug-in with this scheme, or None if it has no section.

    `stores` holds a mapping for each scheme, or as in the environment `scheme.option` → value.

    Raises:
        ConfigError: an option is unknown, or has a wrong value.
    """
    plugin = plugin_of(scheme)
    if plugin is None or plugin.section is None:
        return None
    section = cast("type[Section]", plugin.section)
    given = _flat(stores).get(scheme, {})
    options = options_of(section)
    for name in given:
        if name not in options:
            key = f"stores.{scheme}.{name}"
            raise ConfigError(f"{key}: unknown key{nearest(name, options)}")
    return section(**{name: _meant(options[name].kind, value) for name, value in given.items()})


def _meant(kind: str, value: object) -> Any:
    """Return the value for an option of this kind; in the environment 42 may be a text."""
    if isinstance(value, str):
        return from_text(kind, value)
    if kind == "str" and isinstance(value, int):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return value


def stores_problem(stores: Mapping[str, object]) -> str:
    """Return what is wrong with the setting `stores`; "" if nothing."""
    try:
        for scheme, given in _flat(stores).items():
            plugin = plugin_of(scheme)
            if plugin is None:
                known = plugin_schemes()
                listing = ", ".join(known) or "none"
                hint = nearest(scheme, known)
                return f"no store plug-in {scheme!r} (installed: {listing}{hint})"
            if plugin.section is None and given:
                return f"the store {scheme!r} has no options (found {', '.join(given)})"
            section_of(stores, scheme)
    except ConfigError as error:
        return str(error)
    return ""


def masked(stores: Mapping[str, object]) -> dict[str, object]:
    """Return the setting to be shown: whatever is in it might be a secret."""
    return {
        scheme: {
            name: value if value is None or isinstance(value, bool) else MASK
            for name, value in given.items()
        }
        for scheme, given in _flat(stores).items()
    }


def _flat(stores: Mapping[str, object]) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for key, value in stores.items():
        scheme, dot, name = key.partition(".")
        if dot:
            found.setdefault(scheme, {})[name] = value
        elif isinstance(value, Mapping):
            found.setdefault(scheme, {}).update(cast("Mapping[str, object]", value))
        else:
            raise ConfigError(f"{key}: found {kind_of(value)} (expected a mapping of options)")
    return found
