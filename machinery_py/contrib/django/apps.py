"""The app for INSTALLED_APPS."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules


class MachineryConfig(AppConfig):
    """Imports `tasks.py` of every installed app, when all models are loaded."""

    name = "machinery_py.contrib.django"
    label = "machinery_py"
    verbose_name = "machinery_py"

    def ready(self) -> None:
        autodiscover_modules("tasks")
