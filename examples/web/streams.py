"""Server-sent events with the progress of a report, for coroutines."""

import asyncio
import json
from collections.abc import AsyncIterator

from machinery_py import Server
from reports import shown

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies hand on each event


async def events(server: Server, uuid: str) -> AsyncIterator[str]:
    """Yield an event for each change, until the report has ended."""
    last = ""
    while True:
        state = await server.result(uuid).get_state_async()
        now = json.dumps(shown(state))
        # A comment, while nothing changes: a server sees by it that the client is gone.
        yield f"data: {now}\n\n" if now != last else ":\n\n"
        if state.is_finished:
            return
        last = now
        await asyncio.sleep(0.5)
