"""The project's Server: settings.MACHINERY, and database connections around its tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any

from asgiref.sync import AsyncToSync, SyncToAsync, async_to_sync
from django import setup
from django.apps import apps
from django.conf import settings
from django.core.signals import setting_changed
from django.db import close_old_connections

from machinery_py.call_threads import in_thread
from machinery_py.config.config import Config, resolve
from machinery_py.config.files import kind_of
from machinery_py.errors import ConfigError
from machinery_py.registry.hooks import RunCoroutine
from machinery_py.server import Server
from machinery_py.tasks.signature import Signature

SETTING = "settings.MACHINERY"
DASHBOARD_URL = "dashboard_url"  # its key for the link in the admin
_STORES = ("broker", "result_backend", "lock")

# Of django.tasks
BACKENDS = (
    "machinery_py.contrib.django.MachineryBackend",
    "machinery_py.contrib.django.backend.MachineryBackend",
)
TASK_OPTIONS = "task_options"  # in OPTIONS of a backend, besides those of a Server
DEFAULT = "default"  # Django's alias of a backend, and name of a queue


def config_of(values: object, setting: str = SETTING) -> Config:
    """Return the Config that this value of `settings.MACHINERY` means.

    Its keys are those of a configuration file, and `url`, for all stores that are not named.
    What it does not say is read from MACHINERY_* in the environment.

    Raises:
        ConfigError: it is no mapping, or a key or value is wrong.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{setting}: found {kind_of(values)} (expected a dict of options)")
    given: dict[Any, Any] = dict(values)
    url = given.pop("url", None)
    given.pop(DASHBOARD_URL, None)
    config = Config.from_mapping(given, setting)
    if url is None:
        return resolve(config=config)
    if not isinstance(url, str):
        raise ConfigError(f"{setting}: url: found {kind_of(url)} (expected a URL)")
    stores = {store: given[store] for store in _STORES if given.get(store) is not None}
    return resolve(url, config=config, source=setting, **stores)


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
    waiting = getattr(AsyncToSync.executors, "current", None)  # see `calls_in_this_thread`
    (waiting or SyncToAsync.single_thread_executor).submit(close_old_connections)


def calls_in_this_thread(run: RunCoroutine) -> RunCoroutine:
    """Let this thread make the coroutine's calls of `sync_to_async` while it waits.

    Its database connections are in the transaction of a test, or of a view with the eager store.
    """

    async def on_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
        calls = AsyncToSync.executors.current  # made by the thread that waits for `async_to_sync`

        async def served() -> Any:
            AsyncToSync.executors.current = calls  # of another loop, `sync_to_async` looks here
            return await coroutine

        return await in_thread(lambda: run(served()))

    def run_here(coroutine: Coroutine[Any, Any, Any]) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return async_to_sync(on_loop)(coroutine)
        return run(coroutine)  # inside of a coroutine Django makes no call to the database

    return run_here


def queue_of(name: str, config: Config) -> str:
    """Return the queue that a queue of django.tasks is."""
    return config.default_queue if name == DEFAULT else name


def server_of(options: Mapping[str, Any], alias: str) -> Server:
    """Return the Server of a backend of django.tasks with these OPTIONS.

    It is the project's, if they are empty or the project's own.
    """
    given = _without_calls(options)
    if not given or given == _project_values():
        return server
    key = repr(sorted(given.items()))
    with _making:
        if key not in _others:
            config = _with_queues(config_of(given, "settings.TASKS: OPTIONS"), given)
            _others[key] = _server(config, alias)
        return _others[key]


def _without_calls(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != TASK_OPTIONS}


def _backends() -> dict[str, Mapping[str, Any]]:
    """Return the backends in `settings.TASKS` that are ours."""
    found: Mapping[str, Mapping[str, Any]] = getattr(settings, "TASKS", None) or {}
    return {alias: one for alias, one in found.items() if one.get("BACKEND") in BACKENDS}


def _project_values() -> object:
    """Return `settings.MACHINERY`; without it, OPTIONS of our default backend of django.tasks."""
    values = getattr(settings, "MACHINERY", None)
    if values is None:
        values = _without_calls(_backends().get(DEFAULT, {}).get("OPTIONS", {}))
    return values


def _with_queues(config: Config, values: object) -> Config:
    """Let workers that name no queue serve the QUEUES of the backends with these values, too."""
    if config.queues:
        return config
    names = dict.fromkeys([config.default_queue])
    for backend in _backends().values():
        given = _without_calls(backend.get("OPTIONS", {}))
        if given == values or (not given and values == _project_values()):
            names |= dict.fromkeys(queue_of(one, config) for one in backend.get("QUEUES", ()))
    if len(names) == 1:
        return config
    return config.replace(queues=",".join(f"{name}:1" for name in names))


def _project_config() -> Config:
    return _with_queues(config_of(_project_values()), _project_values())


def _server(config: Config, alias: str = "") -> Server:
    made = Server(config)
    made.app.program = "python manage.py machinery" + (f" --backend {alias}" if alias else "")
    made.around_task(connections_around)
    made.app.hooks.awaiting = calls_in_this_thread
    return made


_making = threading.Lock()
_others: dict[str, Server] = {}  # of backends of django.tasks with OPTIONS of their own
_config = _project_config()
server: Server = _server(_config)


def _renew(*, setting: str, **_: object) -> None:
    """Let `override_settings` of a test take effect. A Harness keeps its stores in memory."""
    global _config  # that of `server`, while no Harness is open
    if setting not in ("MACHINERY", "TASKS"):
        return
    before, _config = _config, _project_config()
    if server.config == before and _config != before:
        server.close()
        server.app.swap(_config, server.clock)


setting_changed.connect(_renew)
if not apps.loading:  # a task process, or a script: the tasks are found when Django is set up
    setup()
