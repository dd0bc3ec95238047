"""The project's Server: settings.MACHINERY, and database connections around its tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from asgiref.sync import SyncToAsync
from django.conf import settings
from django.db import close_old_connections

from machinery_py.config.config import Config, resolve
from machinery_py.config.files import kind_of
from machinery_py.errors import ConfigError
from machinery_py.server import Server
from machinery_py.tasks.signature import Signature

SETTING = "settings.MACHINERY"
_STORES = ("broker", "result_backend", "lock")


def config_of(values: object) -> Config:
    """Return the Config that this value of `settings.MACHINERY` means.

    Its keys are those of a configuration file, and `url`, for all stores that are not named.
    What it does not say is read from MACHINERY_* in the environment.

    Raises:
        ConfigError: it is no mapping, or a key or value is wrong.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{SETTING}: found {kind_of(values)} (expected a dict of options)")
    given: dict[Any, Any] = dict(values)
    url = given.pop("url", None)
    config = Config.from_mapping(given, SETTING)
    if url is None:
        return resolve(config=config)
    if not isinstance(url, str):
        raise ConfigError(f"{SETTING}: url: found {kind_of(url)} (expected a URL)")
    stores = {store: given[store] for store in _STORES if given.get(store) is not None}
    try:
        return resolve(url, config=config, **stores)
    except ConfigError as error:
        raise ConfigError(f"{SETTING}: url: {error}") from None


def connections_around(_: Signature[Any]) -> Iterator[None]:
    """Close the database connections that are too old or broken, before and after a task.

    Django does the same around a request. It leaves a connection inside `atomic` alone.
    """
    _close_old_connections()
    try:
        yield
    finally:
        _close_old_connections()


def _close_old_connections() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        close_old_connections()
        return
    # A connection belongs to its thread, and coroutines use those of the thread of `sync_to_async`.
    # It works off its calls in order, so this one stands before or after the calls of the task.
    SyncToAsync.single_thread_executor.submit(close_old_connections)


server = Server(config_of(getattr(settings, "MACHINERY", {})))
server.around_task(connections_around)
