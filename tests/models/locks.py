"""What each script of locks/redis.py does."""

from __future__ import annotations

from tests.models.redis import Redis


def acquire(redis: Redis, name: str, token: str, ms: int) -> int | None:
    key = f"mpy:lock:{{{name}}}"
    held = redis.get(key)
    if held is not None:
        owner, fence = held.split()
        return int(fence) if owner == token else None
    number = redis.count("mpy:fence")
    redis.keep(key, f"{token} {number}", seconds=ms / 1000)
    return number


def change(redis: Redis, name: str, token: str, ms: int) -> int:
    key = f"mpy:lock:{{{name}}}"
    held = redis.get(key)
    if held is None or held.split()[0] != token:
        return 0
    if ms > 0:
        redis.expire(key, ms / 1000)
    else:
        redis.delete(key)
    return 1
