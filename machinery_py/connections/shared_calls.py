"""Calls of a store that threads share: those that ask at the same moment are carried by one call.

There is no timer and no thread. The first to ask leads: it makes one call for all that wait, and
names the next to lead from those that have come meanwhile. Whoever asks alone asks at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

from machinery_py.connections.forks import ForkLock
from machinery_py.errors import BackendUnavailable

Q = TypeVar("Q")
A = TypeVar("A")
MOST = 32  # questions of one call; 15 ms of Redis where 256 wait behind each key


class SharedCalls(Generic[Q, A]):
    """Questions of the threads of one process, answered together. For any thread.

    A forked child begins anew: those that led and waited are in the parent alone.

    Args:
        call: returns the answers in the order of the questions. It may be repeated, also where it
            has failed.
    """

    def __init__(self, call: Callable[[Sequence[Q]], Sequence[A]]) -> None:
        self._call = call
        self._lock = ForkLock()
        self._pid = os.getpid()
        self._waiting: list[_Asked[Q, A]] = []  # the first of them leads
        self._is_led = False

    def ask(self, question: Q) -> A:
        """Return the answer to this question, or raise what it raises when it is asked alone.

        Where the store is away, all that were asked together learn it from the one call.
        """
        mine = _Asked[Q, A](question)
        try:
            self._line_up(mine)
            while mine.must_lead.get():
                self._lead(mine)
        except BaseException:  # KeyboardInterrupt: the others go on
            self._withdraw(mine)
            raise
        if mine.error is not None:
            raise mine.error
        return mine.answers[0]

    def _line_up(self, mine: _Asked[Q, A]) -> None:
        with self._lock:
            if self._pid != os.getpid():
                self._waiting, self._is_led, self._pid = [], False, os.getpid()
            self._waiting.append(mine)
            if not self._is_led:
                self._name_next()

    def _name_next(self) -> None:
        """Let the first that waits lead. Under the lock."""
        self._is_led = bool(self._waiting)
        if self._waiting:
            self._waiting[0].leads = True
            self._waiting[0].must_lead.put(True)

    def _lead(self, mine: _Asked[Q, A]) -> None:
        batch: list[_Asked[Q, A]] = []
        try:
            with self._lock:
                batch, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
            self._answer(batch)
        finally:
            with self._lock:
                # If this thread was interrupted, another one asks for the rest, once more.
                self._waiting[:0] = [
                    one for one in batch if one is not mine and not one.is_answered
                ]
                self._name_next()  # first, so that the next call is on its way
            for one in batch:
                if one.is_answered:
                    one.must_lead.put(False)

    def _answer(self, batch: Sequence[_Asked[Q, A]]) -> None:
        try:
            answers = self._call([one.question for one in batch])
            for one, answer in zip(batch, answers, strict=True):
                one.answers = [answer]
        except BackendUnavailable as error:
            for one in batch:  # asked alone, each would wait for the whole timeout
                one.error = BackendUnavailable(str(error))
                one.error.__cause__ = error
        except Exception as error:
            if len(batch) == 1:
                batch[0].error = error
                return
            for one in batch:
                self._answer([one])

    def _withdraw(self, mine: _Asked[Q, A]) -> None:
        with self._lock:
            if mine in self._waiting:
                self._waiting.remove(mine)
                if mine.leads:
                    self._name_next()


class _Asked(Generic[Q, A]):
    """A question of one thread. `must_lead`: True, and at last False: it is answered."""

    __slots__ = ("answers", "error", "leads", "must_lead", "question")

    def __init__(self, question: Q) -> None:
        self.question = question
        self.must_lead: SimpleQueue[bool] = SimpleQueue()
        self.leads = False
        self.answers: Sequence[A] = ()
        self.error: Exception | None = None

    @property
    def is_answered(self) -> bool:
        return bool(self.answers) or self.error is not None
