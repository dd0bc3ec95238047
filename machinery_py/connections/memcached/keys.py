"""Keys on memcached.

A name that memcached refuses as a key is replaced by `sha256:<digest>`, behind `mpy:` or its
prefix.
"""

from __future__ import annotations

from machinery_py.connections.stored_items import CLAIM_LIFE, REVOKED_LIFE, StoredItem

OURS = b"mpy:"  # what begins like this is no document of Go's
CALLBACK, SHARES, GUESS = OURS + b"c:", OURS + b"b:", OURS + b"n:"
READY, FIRED = OURS + b"r:", OURS + b"f:"
OUTBOX, REVOKED = OURS + b"o:", OURS + b"v:"
ROOTS, SEGMENT = OURS + b"roots", OURS + b"x:"
CLAIM, RECORD, LIST = OURS + b"u:", OURS + b"s:", OURS + b"schedules"

_CHORD = "a week"
_STATE = "`results_expire_in` once finished; before, a week after the last change and the ETA"

# fmt: off
ITEMS = (
    StoredItem("<task UUID>", "item",
               "state of the task, Go's JSON; our fields, outbox and what follows are its last "
               "field", _STATE, "backend", shared=True),
    StoredItem("<group UUID>", "item", "members of the group, Go's JSON", _CHORD, "backend",
               shared=True),
    StoredItem("mpy:c:<group UUID>", "item", "callback and total of a chord", _CHORD, "backend"),
    StoredItem("mpy:b:<n>:<group UUID>", "item",
               "about 256 of the members that have ended, 8 bytes of hash each", _CHORD, "backend"),
    StoredItem("mpy:n:<group UUID>", "item", "estimate of their number, never too low", _CHORD,
               "backend"),
    StoredItem("mpy:r:<group UUID>", "item", "the chord is complete, or the member that failed",
               _CHORD, "backend"),
    StoredItem("mpy:f:<group UUID>", "item", "the callback is sent, with the messages to publish",
               _CHORD, "backend"),
    StoredItem("mpy:o:<key>", "item", "outbox that belongs to no task and no group",
               "until published", "backend"),
    StoredItem("mpy:v:<uuid>", "item", "the task is revoked", REVOKED_LIFE, "backend"),
    StoredItem("mpy:roots", "item", "names of the segments", "for ever", "backend"),
    StoredItem("mpy:x:<segment>", "item", "open outboxes and complete chords of one process",
               "a week after its last sign of life", "backend"),
    StoredItem("mpy:u:<key>", "item",
               "claim of a unique task, with its message until that is published", CLAIM_LIFE,
               "backend"),
    StoredItem("mpy:s:<schedule>", "item",
               "schedule, with the messages of its tick until they are published",
               "until removed, and a day", "backend"),
    StoredItem("mpy:schedules", "item", "names of all schedules", "for ever", "backend"),
)
# fmt: on
