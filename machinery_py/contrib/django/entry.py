"""The project's Server for the command line: workers and task processes import this module.

DJANGO_SETTINGS_MODULE names the settings; manage.py sets it, and their processes inherit it.
"""

from __future__ import annotations

from django import setup
from django.apps import apps

if not apps.ready:
    setup()

from machinery_py.contrib.django.project import server

__all__ = ["server"]
