"""The sending half of a Server for coroutines: the same code, in a thread, so that the loop goes on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from machinery_py.results import AsyncResult, ChainResult, ChordResult, GroupResult
from machinery_py.signature import Chain, Signature, Step
from machinery_py.workflow import Group

P = ParamSpec("P")
R = TypeVar("R")


class SendingAsync(ABC):
    """Twins of the sending methods."""

    @abstractmethod
    def send(self, step: Step[Any]) -> Any: ...
    @abstractmethod
    def send_task(self, signature: Signature[R]) -> AsyncResult[R]: ...
    @abstractmethod
    def send_chain(self, chain: Chain[R]) -> ChainResult[R]: ...
    @abstractmethod
    def send_group(self, group: Group[R], send_concurrency: int = 0) -> GroupResult[R]: ...
    @abstractmethod
    def send_chord(self, chord: Chain[R], send_concurrency: int = 0) -> ChordResult[R]: ...

    async def send_async(self, step: Step[Any]) -> Any:
        """`send` for coroutines."""
        return await _in_thread(self.send, step)

    async def send_task_async(self, signature: Signature[R]) -> AsyncResult[R]:
        """`send_task` for coroutines."""
        return await _in_thread(self.send_task, signature)

    async def send_chain_async(self, chain: Chain[R]) -> ChainResult[R]:
        """`send_chain` for coroutines."""
        return await _in_thread(self.send_chain, chain)

    async def send_group_async(self, group: Group[R], send_concurrency: int = 0) -> GroupResult[R]:
        """`send_group` for coroutines."""
        return await _in_thread(self.send_group, group, send_concurrency)

    async def send_chord_async(self, chord: Chain[R], send_concurrency: int = 0) -> ChordResult[R]:
        """`send_chord` for coroutines."""
        return await _in_thread(self.send_chord, chord, send_concurrency)


async def _in_thread(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    import asyncio  # loaded by now: we are in a coroutine

    return await asyncio.to_thread(function, *args, **kwargs)
