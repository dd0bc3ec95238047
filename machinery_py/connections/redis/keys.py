"""The names of our keys. All of a queue's bear its name as hash tag, so that a cluster keeps them in one slot with its list."""

from __future__ import annotations

import functools


@functools.lru_cache(maxsize=4096)
def queue_keys(queue: str) -> tuple[str, str]:
    """The queue's list (Go's key) and what the names of our keys for it begin with."""
    start = queue.find("{")
    end = queue.find("}", start + 1)
    if start >= 0 and end > start + 1:
        return queue, f"mpy:{queue[start : end + 1]}:{queue}:"  # it has a tag of its own
    return queue, f"mpy:{{{queue}}}:"
