# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""taskiq: the broker on streams, which acknowledges when the result is saved; orjson; uvloop.

Tasks are coroutines.
"""

from __future__ import annotations

from taskiq.serializers import ORJSONSerializer
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

from benchmarks.peers.driving import URL

backend = RedisAsyncResultBackend(f"{URL}/1", serializer=ORJSONSerializer())
broker = (
    RedisStreamBroker(f"{URL}/0", consumer_id="0", xread_count=1000)
    .with_result_backend(backend)
    .with_serializer(ORJSONSerializer())
)


@broker.task
async def noop(number: int) -> int:
    return number
