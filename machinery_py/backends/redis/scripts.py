"""The scripts of the Redis backend. The keys are described in docs/explanation/redis-protocol.md.

Each takes one msgpack array; its file in `lua/` says what is in it (In) and what it returns (Out). `now` is "" for the server's
clock, else microseconds. Changes are as changes.lua says. Which state may follow which is asked of `states.advance`, pair by
pair, when this module is loaded.
"""

from __future__ import annotations

from itertools import product

from machinery_py.connections.redis.scripts import Folder
from machinery_py.tasks.states import State, TaskState, advance

#: Seconds that a state is kept that is not finished, and a chord without an arrival.
CHORD_LIFE = 7 * 86400
PATIENCE = 8  # looks at an incomplete group; from then on their pauses do not grow
LOOKS = 20  # groups that are looked at in one step, for expiry
LEFT = 30_000_000  # µs from a chord's first arrival until somebody looks whether members of others have completed it
RATES_LIFE = 3700  # seconds that finished tasks are counted by their second


def steps(runs_later: int) -> str:
    """The pairs of states that `advance` lets follow each other so many runs later, with a space around each."""
    pairs = [
        f"{before}>{after}"
        for before, after in product(State, State)
        if advance(
            TaskState(task_uuid="", state=before),
            TaskState(task_uuid="", state=after, run=runs_later),
        )
        is not None
    ]
    return f"' {' '.join(pairs)} '"


# Where the values of a change and of a state stand, from their place on.
_CHANGE = (
    "KEY",
    "MARK",
    "EPOCH",
    "FORCE",
    "FIRES",
    "FIRST",
    "LAST",
    "GROUPS",
    "ARRIVALS",
    "OUTBOX",
)
_STATE = (
    "UUID",
    "WORD",
    "RUN",
    "HEAD",
    "CREATED",
    "TAIL",
    "NAMED",
    "LINES",
    "WHOLE",
    "STICKY",
    "QUEUE",
    "KEPT",
)

#: What changes.lua names.
CONSTANTS: dict[str, object] = {
    **{name: place for names in (_CHANGE, _STATE) for place, name in enumerate(names)},
    "CHANGE": len(_CHANGE),
    "STATE": len(_STATE),
    "SAME": steps(0),
    "LATER": steps(1),
    "LONG": CHORD_LIFE,
    "RATES": RATES_LIFE,
    "LEFT": LEFT,
    "OURS": r"'^%d*\n%d*\n[^\n]*\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n()'",
}

_lua = Folder("backends/redis/lua", CONSTANTS)

APPLY = _lua.script("apply")
BEGIN = _lua.script("begin")
STATES = _lua.script("states")
MARKS = _lua.script("marks")
READY = _lua.script("ready")
PARTIAL = _lua.script("partial", PATIENCE=PATIENCE)
UNSENT = _lua.script("unsent")
CLEAR = _lua.script("clear")
NEWEST = _lua.script("newest")
FIND = _lua.script("find")
RATES = _lua.script("rates")
REVOKE = _lua.script("revoke")
REVOKED = _lua.script("revoked")
FORGET = _lua.script("forget")
TEND = _lua.script("tend", LOOKS=LOOKS)
