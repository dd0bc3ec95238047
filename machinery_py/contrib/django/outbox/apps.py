"""The app for INSTALLED_APPS."""

from __future__ import annotations

from django.apps import AppConfig


class OutboxConfig(AppConfig):
    """The table of the outbox, whose relay runs in the project's workers."""

    name = "machinery_py.contrib.django.outbox"
    label = "machinery_outbox"
    verbose_name = "machinery_py outbox"

    def ready(self) -> None:
        from machinery_py.contrib.django.outbox.sending import outbox

        outbox.in_workers()
