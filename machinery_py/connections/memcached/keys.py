"""Keys on memcached.

A name that memcached refuses as a key is replaced by `sha256:<digest>`, behind `mpy:` or its
prefix.
"""

from __future__ import annotations

from machinery_py.connections.stored_items import StoredItem

OURS = b"mpy:"  # what begins like this is no document of Go's
CALLBACK, ARRIVED, READY = OURS + b"c:", OURS + b"a:", OURS + b"r:"
FIRED, OPEN = OURS + b"f:", OURS + b"l:"

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
    StoredItem("mpy:a:<group UUID>", "item", "members that have ended, 8 bytes of hash each",
               _CHORD, "backend"),
    StoredItem("mpy:r:<group UUID>", "item", "the chord is complete, or the member that failed",
               _CHORD, "backend"),
    StoredItem("mpy:f:<group UUID>", "item", "the callback is sent, with the messages to publish",
               _CHORD, "backend"),
    StoredItem("mpy:l:<n>", "item", "list of open outboxes and complete chords",
               "a week after its last change", "backend"),
)
# fmt: on
