"""Settings that a running worker reads again at SIGHUP. All others need a restart."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from machinery_py.config.config import OPTIONS, Config
from machinery_py.config.files import read_file

LIVE = ("concurrency", "events", "log_level", "log_tasks")

_ENDINGS = (".toml", ".yaml", ".yml")
_VARIABLES = frozenset(f"MACHINERY_{OPTIONS[key].variable}" for key in LIVE)


def read_again(config: Config, environ: Mapping[str, str] = os.environ) -> Config:
    """Return the Config with what its files and the environment say of LIVE now.

    Values that were passed stay. Of several sources the same one wins as in `resolve`.

    Raises:
        ConfigError: a file cannot be read, or one of these values cannot be used.
    """
    passed = config.source if config.source.lower().endswith(_ENDINGS) else ""
    last = environ.get("MACHINERY_CONFIG", "").strip()
    layers = [
        _of_file(passed),
        Config.from_env(environ={name: environ[name] for name in _VARIABLES & set(environ)}),
        _of_file(last),
    ]
    sources = dict(config.sources)
    values: dict[str, Any] = {}
    for key in LIVE:
        if sources[key] in {"default", last, passed, *_VARIABLES}:
            found = next((one for one in layers if one.sources[key] != "default"), Config())
            values[key], sources[key] = getattr(found, key), found.sources[key]
    again = config.replace(**values)
    object.__setattr__(again, "sources", sources)
    return again


def _of_file(path: str) -> Config:
    values = read_file(path) if path else {}
    return Config.from_mapping({key: values[key] for key in LIVE if key in values}, path)
