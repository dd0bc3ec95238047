"""Outbox in Django's transactions: a table beside the project's own; docs/how-to/outbox.md.

    INSTALLED_APPS += ["machinery_py.contrib.django.outbox"]

apps, models, migrations   the app and its table
sending                    `outbox.send`, and the rows for the relay
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from machinery_py.contrib.django.outbox.sending import DjangoOutbox, outbox

__all__ = ["DjangoOutbox", "outbox"]

if not TYPE_CHECKING:  # on first use: the app is loaded before its models are

    def __getattr__(name: str) -> Any:
        if name in __all__:
            from machinery_py.contrib.django.outbox import sending

            return getattr(sending, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
