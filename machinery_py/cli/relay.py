"""`machinery relay`: publish what the app's outboxes keep."""

from __future__ import annotations

import argparse
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from machinery_py.cli import logs
from machinery_py.cli.processes import until_stopped
from machinery_py.connections.streams import announce
from machinery_py.contrib.outbox import outboxes_of

if TYPE_CHECKING:
    from machinery_py.server import Server


def relay(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery relay` until SIGTERM or Ctrl+C."""
    logs.configure("", "text")
    relays = [outbox.relay() for outbox in outboxes_of(server)]
    with until_stopped(), ExitStack() as stack:
        for one in relays:
            stack.enter_context(one)
        announce(f"Publishing the outbox of {args.app}. Ctrl+C stops.")
        threading.Event().wait()
    server.close()
    return 0
