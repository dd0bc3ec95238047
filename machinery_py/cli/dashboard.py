"""Command that serves the dashboard."""

from __future__ import annotations

import argparse
import os
import threading
from typing import TYPE_CHECKING

from machinery_py.cli import logs
from machinery_py.cli.http import serve
from machinery_py.cli.processes import until_stopped
from machinery_py.errors import ConfigError

if TYPE_CHECKING:
    from machinery_py.server import Server

LOOPBACK = ("localhost", "127.0.0.1", "::1")
VARIABLE = "MACHINERY_DASHBOARD_AUTH"


def dashboard(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery dashboard` until SIGTERM or Ctrl+C."""
    auth = args.auth or os.environ.get(VARIABLE) or None
    if auth is None and not args.insecure and args.host not in LOOPBACK:
        raise ConfigError(
            f"dashboard on {args.host}: no user and password, and other machines reach it "
            f"(set {VARIABLE}=user:password, or say --insecure)"
        )
    logs.configure("", "text")
    checked = (lambda environ: "") if auth is None and args.insecure else auth
    web = server.dashboard.wsgi(read_only=args.read_only, auth=checked)
    with until_stopped(), serve(web, args.host, args.port) as address:
        print(f"Dashboard of {args.app}: {address}  Ctrl+C stops.", flush=True)
        threading.Event().wait()
    return 0
