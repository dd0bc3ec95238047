"""Command that serves the dashboard."""

from __future__ import annotations

import argparse
import os
import re
import threading
from typing import TYPE_CHECKING

from machinery_py.cli import logs
from machinery_py.cli.http import serve
from machinery_py.cli.processes import until_stopped
from machinery_py.connections.streams import announce
from machinery_py.errors import ConfigError

if TYPE_CHECKING:
    from machinery_py.dashboard.web import Authenticate, Environ
    from machinery_py.server import Server

LOOPBACK = ("localhost", "127.0.0.1", "::1")
VARIABLE = "MACHINERY_DASHBOARD_AUTH"
MAX_NAME = 200  # characters of a user's name


def dashboard(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery dashboard` until SIGTERM or Ctrl+C."""
    auth = args.auth or os.environ.get(VARIABLE) or None
    if auth is None and not args.insecure and args.host not in LOOPBACK:
        raise ConfigError(
            f"dashboard on {args.host}: no user and password, and other machines reach it "
            f"(set {VARIABLE}=user:password, or say --insecure)"
        )
    checked: str | Authenticate | None = auth
    if auth is None and args.insecure:
        checked = _anybody
    if args.user_header:
        checked = _named_by(args.user_header, checked, args.host)
    logs.configure("", "text")
    web = server.dashboard.wsgi(read_only=args.read_only, auth=checked)
    with until_stopped(), serve(web, args.host, args.port) as address:
        announce(f"Dashboard of {args.app}: {address}  Ctrl+C stops.")
        threading.Event().wait()
    return 0


def _anybody(_: Environ) -> str:
    return ""


def _named_by(header: str, auth: str | Authenticate | None, host: str) -> Authenticate:
    """Return a check that takes the user's name from a header; without it, nobody is answered.

    Raises:
        ConfigError: others than the proxy could say any name there.
    """
    from machinery_py.dashboard.web import basic

    if auth is None or (auth is _anybody and host not in LOOPBACK):
        raise ConfigError(
            f"--user-header {header}: all who reach {host} could say any name (give the proxy a "
            f"password with {VARIABLE}, or say --insecure on 127.0.0.1, where it alone connects)"
        )
    if not re.fullmatch("[A-Za-z0-9-]+", header):
        raise ConfigError(
            f"--user-header {header!r}: expected letters, digits and -, for instance X-Remote-User"
        )
    check = basic(auth) if isinstance(auth, str) else auth
    key = f"HTTP_{header.upper().replace('-', '_')}"

    def user(environ: Environ) -> str | None:
        name = environ.get(key, "").encode("latin-1").decode("utf-8", "replace")
        # With a comma there are two such headers, and the first may be the client's.
        is_one = name and "," not in name and check(environ) is not None
        return name[:MAX_NAME] if is_one else None

    return user
