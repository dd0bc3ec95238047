"""Parts of a worker: started in the order of what they come after, stopped in reverse.

The worker's own parts are in Worker; an app adds its own with `Server.worker_part`.
"""

from __future__ import annotations

import graphlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from machinery_py.errors import ConfigError, MachineryError
from machinery_py.registry.hooks import AddedPart, WorkerPart
from machinery_py.texts import get_logger, quoted
from machinery_py.worker.running.hooks import WorkerHooks, text_of, type_name_of

logger = get_logger(__name__)

CONSUMER = "consumer"  # claims tasks, so what they need comes before it


@dataclass(frozen=True, slots=True)
class Part:
    """A part with its two ends. `stop` is called although `start` has failed."""

    name: str
    after: Sequence[str] = ()
    start: Callable[[], object] = lambda: None
    stop: Callable[[], object] = lambda: None
    is_added: bool = False


class RunningParts:
    """The parts of one run of a worker.

    Raises:
        ConfigError: a name is there twice or unknown, or parts come after each other in a circle.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = in_order(parts)
        self._started: list[Part] = []

    def start(self, is_over: Callable[[], bool]) -> None:
        """Start them, as long as it is not over; after a failure stop those that were started."""
        for part in self._parts:
            if is_over():
                return
            self._started.append(part)
            try:
                part.start()
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Stop what was started. What one raises is logged, and the others are stopped, too.

        A KeyboardInterrupt comes out when all are stopped.
        """
        if self._started:
            part = self._started.pop()
            try:
                part.stop()
            except (Exception, SystemExit):  # of user code, or of a store that is gone
                logger.exception("part %s of the worker failed at its end", part.name)
            finally:
                self.stop()


def added(given: AddedPart, worker: Any, hooks: WorkerHooks) -> Part:
    """Return a part that an app or a worker was given; its coroutines run on the worker's loop."""
    made: list[WorkerPart] = []

    def start() -> None:
        try:
            part = given.make()
            found = part.start(worker)
            if inspect.iscoroutine(found):
                hooks.run_coroutine(found)
        except (Exception, SystemExit) as error:  # user code
            what = f"{type_name_of(error)}: {text_of(error)}"
            raise MachineryError(f"part {given.name} of the worker cannot start: {what}") from error
        made.append(part)

    def stop() -> None:
        if made:
            found = made.pop().stop(worker)
            if inspect.iscoroutine(found):
                hooks.run_coroutine(found)

    # Not before the lifespans: their end is the end of its loop.
    return Part(given.name, given.after or ("lifespan",), start, stop, is_added=True)


def in_order(parts: Sequence[Part]) -> list[Part]:
    """Return the parts, each behind those it comes after, else as they were given.

    Added parts come before the consumer, unless they are to come after it.

    Raises:
        ConfigError: see RunningParts.
    """
    by_name = {part.name: part for part in parts}
    if len(by_name) < len(parts):
        names = [part.name for part in parts]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"a worker has two parts named {quoted(twice)} (rename one)")
    for part in parts:
        for name in part.after:
            if name not in by_name:
                raise ConfigError(
                    f"part {part.name} comes after {quoted(name)}, which is no part of the worker "
                    f"(known: {', '.join(by_name)})"
                )
    if CONSUMER in by_name:
        later = set(_behind(CONSUMER, parts))
        first = [one.name for one in parts if one.is_added and one.name not in later]
        consumer = by_name[CONSUMER]
        by_name[CONSUMER] = replace(consumer, after=(*consumer.after, *first))
    sorter = graphlib.TopologicalSorter({one.name: one.after for one in by_name.values()})
    try:
        return [by_name[name] for name in sorter.static_order()]
    except graphlib.CycleError as error:
        circle = " after ".join(reversed(error.args[1]))
        raise ConfigError(f"parts of a worker come after each other: {circle}") from None


def _behind(name: str, parts: Sequence[Part]) -> Iterator[str]:
    """Yield the names of the parts that come after this one, directly or not."""
    found, left = {name}, list(parts)
    while more := [one for one in left if found & {*one.after} and one.name not in found]:
        found |= {one.name for one in more}
        yield from (one.name for one in more)


def drawn(parts: Sequence[Part]) -> str:
    """Return the parts as text, in their order, each with what it comes directly after."""
    ordered = in_order(parts)
    width = max(len(part.name) for part in ordered)
    lines = []
    for number, part in enumerate(ordered, 1):
        after = f"after {', '.join(part.after)}" if part.after else ""
        lines.append(f"{number:>2}  {part.name:<{width}}  {after}".rstrip())
    return "\n".join(lines)
