"""The project's Server for the command line: workers and task processes import this module.

DJANGO_SETTINGS_MODULE names the settings; manage.py sets it, and their processes inherit it. So
they do DJANGO_MACHINERY_BACKEND, the alias of a backend of django.tasks whose Server it is.
"""

from __future__ import annotations

import os

from machinery_py.contrib.django import project
from machinery_py.server import Server

BACKEND = "DJANGO_MACHINERY_BACKEND"


def _server() -> Server:
    if not (alias := os.environ.get(BACKEND)):
        return project.server
    from machinery_py.contrib.django.backend import server_of_alias

    return server_of_alias(alias)


server: Server = _server()

__all__ = ["server"]
