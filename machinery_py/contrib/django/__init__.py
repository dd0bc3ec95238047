"""Django: the project's Server, `manage.py machinery`, sending on commit; docs/how-to/django.md.

project     the Server that settings.MACHINERY describes
apps        the app: imports `tasks.py` of every installed app
backend     the backend for django.tasks, of Django 6
entry       the Server for the command line, with Django set up
commits     sending when a transaction is committed
testing     test cases whose tasks run in memory
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import django as _django  # noqa: F401
except ImportError as _error:
    raise ImportError(
        "machinery_py.contrib.django needs Django 4.2 or newer: pip install 'machinery_py[django]'"
    ) from _error

if TYPE_CHECKING:
    from machinery_py.contrib.django.backend import MachineryBackend
    from machinery_py.contrib.django.commits import send_on_commit
    from machinery_py.contrib.django.project import server

__all__ = ["MachineryBackend", "send_on_commit", "server"]

if not TYPE_CHECKING:  # on first use: these read the settings

    def __getattr__(name: str) -> Any:
        if name == "MachineryBackend":
            from machinery_py.contrib.django.backend import MachineryBackend

            return MachineryBackend
        if name == "send_on_commit":
            from machinery_py.contrib.django.commits import send_on_commit

            return send_on_commit
        if name == "server":
            from machinery_py.contrib.django.project import server

            return server
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
