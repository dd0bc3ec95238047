"""The scripts of the Redis backend. connections/redis/keys.py lists the keys.

Each takes one msgpack array; its file in `lua/` says what is in it (In) and what it returns (Out).
`now` is "" for the server's clock, else microseconds. Changes are as changes.lua says.
`states.advance` says which state may follow which, pair by pair, when this module is loaded.
"""

from __future__ import annotations

from itertools import product

from machinery_py.bounds import AT_ONCE, STEP_BYTES, STEP_ITEMS
from machinery_py.connections.redis.scripts import Folder
from machinery_py.fences import LATEST
from machinery_py.tasks.signature import FIRST_RUN, RunNumber
from machinery_py.tasks.states import State, TaskState, advance

#: Seconds that a state is kept that is not finished, and a chord without an arrival.
CHORD_LIFE = 7 * 86400
PATIENCE = 8  # looks at an incomplete group; from then on their pauses do not grow
LOOKS = 20  # groups that are looked at in one step, for expiry
LEFT = (
    30_000_000  # µs from a chord's first arrival until a worker looks whether Go has completed it
)
NEWS = 4096  # bytes of a document that is sent along with the news that its task has ended
RATES_LIFE = 3700  # seconds that finished tasks are counted by their second


def steps(runs_later: RunNumber) -> str:
    """Return the pairs of states that `advance` lets follow each other so many runs later."""

    def follows(before: State, after: State) -> bool:
        then = TaskState(task_uuid="", state=after, run=runs_later)
        return advance(TaskState(task_uuid="", state=before), then) is not None

    pairs = [f"{one}>{other}" for one, other in product(State, State) if follows(one, other)]
    return f"' {' '.join(pairs)} '"


# Where the values of a change and of a state stand, from their place on; and those of an arrival.
_CHANGE = "KEY MARK EPOCH FORCE FIRES FIRST LAST GROUPS ARRIVALS OUTBOX"
_ARRIVAL = "GROUP MEMBER TOTAL OK CALLBACK"
_STATE = "UUID WORD RUN HEAD CREATED TAIL NAMED LINES WHOLE STICKY QUEUE KEPT"

#: Constants of changes.lua.
CONSTANTS: dict[str, object] = {
    **{name: place for names in (_CHANGE, _STATE) for place, name in enumerate(names.split())},
    **{name: place for place, name in enumerate(_ARRIVAL.split(), 1)},
    "CHANGE": len(_CHANGE.split()),
    "STATE": len(_STATE.split()),
    "SAME": steps(FIRST_RUN),
    "LATER": steps(RunNumber(1)),
    "LONG": CHORD_LIFE,
    "MANY": STEP_ITEMS,
    "RATES": RATES_LIFE,
    "LEFT": LEFT,
    "LATEST": LATEST,
    "NEWS": NEWS,
    "BYTES": STEP_BYTES,
    "AT_ONCE": AT_ONCE,
    "OURS": r"'^%d*\n%d*\n[^\n]*\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n()'",
}

_lua = Folder("backends/redis/lua", CONSTANTS)

APPLY = _lua.script("apply", "writing states")
BEGIN = _lua.script("begin", "beginning deliveries")
STATES = _lua.script("states", "reading states")
MARKS = _lua.script("marks", "reading marks")
READY = _lua.script("ready", "looking for complete groups")
PARTIAL = _lua.script("partial", "looking for incomplete groups", PATIENCE=PATIENCE)
BOXES = _lua.script("boxes", "reading outboxes")
UNSENT = _lua.script("unsent", "looking for outboxes")
CLEAR = _lua.script("clear", "clearing outboxes")
FIND = _lua.script("find", "listing states")
RATES = _lua.script("rates", "counting what has finished")
REVOKE = _lua.script("revoke", "revoking tasks")
REVOKED = _lua.script("revoked", "looking for revoked tasks")
FORGET_TASK = _lua.script("forget", "forgetting a task")
FORGET_GROUP = _lua.script("forget", "forgetting a group")
DELETE = _lua.script("delete", "deleting states")
TEND = _lua.script("tend", "looking for what is over", LOOKS=LOOKS)
KEEP = _lua.script("keep", "keeping checkpoints")
LOOSEN = _lua.script("loosen", "letting results expire")

# The records that the app keeps: its schedules, and the keys of unique tasks.

_records = Folder("backends/redis/lua/records", CONSTANTS)

RECORDS = _records.script("records", "reading schedules")
RELEASE = _records.script("release", "releasing claims")
