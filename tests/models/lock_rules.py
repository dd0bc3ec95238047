"""The steps of a machine that takes and gives back locks."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from machinery_py.locks import redis as scripts
from tests.models import locks
from tests.models.machine import ScriptMachine

Name = st.sampled_from(["nightly", "a}b"])
Token = st.sampled_from(["aa", "bb"])
Millis = st.sampled_from([100_000, 900_000])


class LockMachine(ScriptMachine):
    @rule(name=Name, token=Token, ms=Millis)
    def acquire(self, name: str, token: str, ms: int) -> None:
        self.run(scripts.ACQUIRE, locks.acquire, name, token, ms)

    @rule(name=Name, token=Token, ms=st.one_of(st.just(0), Millis))
    def renew_or_release(self, name: str, token: str, ms: int) -> None:
        self.run(scripts.RENEW, locks.change, name, token, ms)

    @rule(name=Name)
    def expire(self, name: str) -> None:
        self.beside.both("DEL", f"mpy:lock:{{{name}}}")
