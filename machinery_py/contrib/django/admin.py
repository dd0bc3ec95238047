"""The link to the dashboard in the admin, for `dashboard_url` in settings.MACHINERY.

Django's admin imports this module, if it is used. The link is an entry in its list of apps: so it
is on the index and in the sidebar, whatever templates the project has of its own.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib import admin
from django.http import HttpRequest

from machinery_py.contrib.django.project import DASHBOARD_URL

_without_link = admin.site.get_app_list


def _get_app_list(request: HttpRequest, app_label: str | None = None) -> list[dict[str, Any]]:
    listed = _without_link(request) if app_label is None else _without_link(request, app_label)
    url = (getattr(settings, "MACHINERY", None) or {}).get(DASHBOARD_URL)
    if not url or app_label is not None or not admin.site.has_permission(request):
        return list(listed)
    dashboard = {
        "name": "Dashboard",
        "object_name": "Dashboard",
        "admin_url": url,
        "add_url": None,
        "view_only": True,
        "perms": {"view": True},
    }
    entry = {
        "name": "Tasks",
        "app_label": "machinery_py",
        "app_url": url,
        "has_module_perms": True,
        "models": [dashboard],
    }
    return [*listed, entry]


admin.site.get_app_list = _get_app_list
