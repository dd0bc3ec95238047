"""Putting messages while the caller does something else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from machinery_py.brokers.base import Message


class Putting(ABC):
    """Messages on their way to the broker. Belongs to one thread, which closes it in any case.

    with broker.begin_put(messages, token=token) as putting:
        …
        putting.wait()
    """

    @abstractmethod
    def wait(self) -> None:
        """Return when all are stored. Raises as Broker.put."""

    @abstractmethod
    def close(self) -> None:
        """Take no more notice of what was not waited for, which may be stored or not."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class PutsAhead(ABC):
    """A broker that stores messages while its caller goes on."""

    @abstractmethod
    def begin_put(self, messages: Sequence[Message], *, token: str) -> Putting:
        """Begin what Broker.put does.

        Raises:
            PublishRefused: nothing was stored, or is on its way.
        """
