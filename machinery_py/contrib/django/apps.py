"""The app for INSTALLED_APPS."""

from __future__ import annotations

import sys

from django.apps import AppConfig, apps
from django.utils.module_loading import autodiscover_modules


class MachineryConfig(AppConfig):
    """Imports `tasks.py` of every installed app, when all models are loaded."""

    name = "machinery_py.contrib.django"
    label = "machinery_py"
    verbose_name = "machinery_py"

    def ready(self) -> None:
        autodiscover_modules("tasks")
        if "django.tasks" in sys.modules:  # Django 6, with a task
            _register_django_tasks()


def _register_django_tasks() -> None:
    """Register also those Django tasks whose own backend is not ours: `using` may name ours."""
    from django.tasks import Task, task_backends  # pyright: ignore[reportMissingImports]

    from machinery_py.contrib.django.backend import MachineryBackend, register

    backends = [one for one in task_backends.all() if isinstance(one, MachineryBackend)]
    for app in apps.get_app_configs():
        for value in list(getattr(sys.modules.get(f"{app.name}.tasks"), "__dict__", {}).values()):
            if isinstance(value, Task):
                for backend in backends:
                    register(value, backend.server)
