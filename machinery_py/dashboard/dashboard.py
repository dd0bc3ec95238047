"""`server.dashboard`: the dashboard as an application, to be mounted in others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from machinery_py.dashboard.fleet import Fleet

if TYPE_CHECKING:
    from machinery_py.dashboard.asgi import DashboardASGI
    from machinery_py.dashboard.web import DashboardWSGI


class Dashboard:
    """The methods of `server.dashboard`. Each returns a new application.

    Args (each method):
        read_only: change nothing.
        auth: "user:password", or a callable that gets the WSGI environ of a request and returns
            the user's name, or None: then it is refused. Without it, this machine alone is
            answered, as localhost.
        mask: gets the name and the value of each argument, header, note, and pair inside a value,
            and returns what is shown in its place. By default names as password, token or secret
            show "•••".

    Raises (each method):
        ConfigError: `auth` is a text without a user or a password.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def wsgi(
        self,
        *,
        read_only: bool = False,
        auth: str | Callable[[dict[str, Any]], str | None] | None = None,
        mask: Callable[[str, Any], Any] | None = None,
    ) -> DashboardWSGI:
        """Return a WSGI application, for any prefix: Flask, Django, gunicorn."""
        from machinery_py.dashboard.web import DashboardWSGI

        return DashboardWSGI(self._fleet, read_only=read_only, auth=auth, mask=mask)

    def asgi(
        self,
        *,
        read_only: bool = False,
        auth: str | Callable[[dict[str, Any]], str | None] | None = None,
        mask: Callable[[str, Any], Any] | None = None,
    ) -> DashboardASGI:
        """Return an ASGI application, for any prefix: FastAPI, Starlette, uvicorn.

        The environ that `auth` gets has the connection's scope as "asgi.scope".
        """
        from machinery_py.dashboard.asgi import DashboardASGI

        return DashboardASGI(self.wsgi(read_only=read_only, auth=auth, mask=mask))
