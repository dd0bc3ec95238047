"""The scripts of the Redis broker. connections/redis/keys.py lists the keys.

Each takes one msgpack array; its file in `lua/` says what is in it (In) and what it returns (Out).
`now` is "" for the server's clock, else microseconds. Queues and messages are as putting.lua says.
"""

from __future__ import annotations

from machinery_py.bounds import AT_ONCE, STEP_BYTES, TOKEN_LIFE
from machinery_py.brokers.redis.messages import FAIR, PACKED
from machinery_py.brokers.topics import TOPIC_LENGTH
from machinery_py.connections.redis.keys import DELAYED
from machinery_py.connections.redis.scripts import Folder
from machinery_py.errors import BrokerUnavailable
from machinery_py.fences import LATEST

TOMBSTONE = 86_400_000_000  # µs that a condemned session is looked at
CLOSED = 60_000_000  # µs that a closed one is
MARK_EVERY = 250_000  # µs between two notes of when a place of a queue was filled
MARKS = 4096  # of these notes
MOVE_PATIENCE = 10_000_000  # µs; what has been due for so long is moved to a long list as well
SOON = 1_100_000  # µs; who blocks may sleep longer: it is told of what is due before
IDLE_LIFE = 60  # seconds that idle clients are remembered; each says so again every second

#: Constants of putting.lua, messages.lua and waking.lua.
CONSTANTS: dict[str, object] = {
    **{name: place for place, name in enumerate(PACKED.split(), 1)},
    "DELAYED": DELAYED,
    "EVERY": MARK_EVERY,
    "MARKS": MARKS,
    "FAIR": FAIR,
    "BYTES": STEP_BYTES,
    "AT_ONCE": AT_ONCE,
    "SOON": SOON,
    "IDLE_LIFE": IDLE_LIFE,
    "LATEST": LATEST,
}

_lua = Folder("brokers/redis/lua", CONSTANTS, away=BrokerUnavailable)

PUT = _lua.script("put", "publishing", TOKEN_LIFE=TOKEN_LIFE)
REGISTER = _lua.script("register", "registering a worker")
BEAT = _lua.script("beat", "beating")
CLAIM = _lua.script("claim", "claiming messages")
DISPOSE = _lua.script("dispose", "ending deliveries")
BEGIN = _lua.script("begin", "beginning a task that came back")
HOLDS = _lua.script("holds", "looking at deliveries")
CONDEMN = _lua.script("condemn", "giving messages back")
GIVE_BACK = _lua.script("give_back", "giving messages back")
LOOK = _lua.script("look", "looking after queues")
DUE = _lua.script("due", "moving due messages", PATIENCE=MOVE_PATIENCE)
MOVE = _lua.script("move", "moving due messages")
BURY_DELAYED = _lua.script("bury_delayed", "burying a delayed message")
BROADCAST = _lua.script("broadcast", "sending to a topic", LENGTH=TOPIC_LENGTH)

_inspect = Folder("brokers/redis/lua/inspect", CONSTANTS, away=BrokerUnavailable)

WAITING = _inspect.script("waiting", "counting messages")
PENDING = _inspect.script("pending", "listing a queue")
LATE = _inspect.script("late", "listing delayed messages")
STATS = _inspect.script("stats", "counting messages")
LATE_NAMES = _inspect.script("late_names", "counting delayed messages")
WORKERS = _inspect.script("workers", "listing workers")
PURGE = _inspect.script("purge", "purging a queue")
REMOVE = _inspect.script("remove", "purging a queue")
UNPARK = _inspect.script("unpark", "purging a queue")
FORGET = _inspect.script("forget", "forgetting a queue")
PAUSE = _inspect.script("pause", "pausing a queue")
RESUME = _inspect.script("resume", "resuming a queue")
DEAD = _inspect.script("dead", "listing dead letters")
LETTERS = _inspect.script("letters", "listing dead letters")
BURY = _inspect.script("bury", "burying a message")
TAKE_DEAD = _inspect.script("take_dead", "taking dead letters")
