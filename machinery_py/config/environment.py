"""The Config of a Server: what the call says, then the environment, then a file, then the defaults.

    1  what the call passes      `broker=`, `result_backend=`, `lock=`, then `url`, then what was chosen in `config`
    2  MACHINERY_*               MACHINERY_BROKER before MACHINERY_URL, and so on
    3  the file                  that MACHINERY_CONFIG names: .yml, .yaml or .toml
    4  the defaults

It is decided for each option apart: a Server with a broker of its own has its results where MACHINERY_URL says, if that
is set. Importing this module reads nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from machinery_py.config.config import (
    Config,
    Layer,
    config_layer,
    environment_layer,
    mapping_layer,
    merge,
    url_layer,
)
from machinery_py.config.files import read_file


def resolve(
    url: str | None = None,
    *,
    config: Config | None = None,
    broker: str | None = None,
    result_backend: str | None = None,
    lock: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """The Config that holds for this call here and now; `Config.sources` tells where each value is from.

    Args:
        url: broker, result backend and lock at once, as far as its store can be each of them.
        config: its chosen values count as passed by this call; its defaults give way to the environment and the file.
        broker: None is not passed. An empty `result_backend` or `lock` is: it means "where the broker is".

    Raises:
        ConfigError: all that is wrong, each with its argument, variable or file; or MACHINERY_CONFIG cannot be read.
    """
    given = {"broker": broker, "result_backend": result_backend, "lock": lock}
    return merge(
        mapping_layer(given, "argument"),
        url_layer(url, "argument") if url is not None else Layer(),
        config_layer(config) if config is not None else Layer(),
        environment_layer("MACHINERY_", environ),
        _file_layer(environ.get("MACHINERY_CONFIG", "").strip()),
    )


def _file_layer(path: str) -> Layer:
    return mapping_layer(read_file(path), path) if path else Layer()
