"""Keys on Redis. In a cluster the hash tag of the application stands before each: see tags.py.

The end of a task is announced on the channel `mpy:m:{<uuid>}`, with its state if that is short.
"""

from __future__ import annotations

import functools

from machinery_py.connections.stored_items import CLAIM_LIFE, REVOKED_LIFE, StoredItem

DELAYED = "delayed_tasks"  # as the scripts name it
QUEUES = b"mpy:queues"
PARTIAL = b"mpy:partial"
READY = b"mpy:ready"
GROUPS = b"mpy:groups"
REVOKED = b"mpy:revoked"
FENCE = "mpy:fence"
GO_MUTEX = b"TriggerChordMutex"
TOKENS = b"mpy:p:"  # before the token of a submission
STAGED = b"mpy:staged:"  # before it, too
LIMITS = b"mpy:limits"
CLAIM = b"mpy:u:"  # before the name of a claim

# As scripts take them.
OPEN = "mpy:open"
DONE = "mpy:done"
RATE = "mpy:rate:"  # before a second
RECORDS = "mpy:records"
RECORDS_VERSION = "mpy:records:n"

# Sessions have no expiry: maintenance removes one that has stopped beating, and requeues its
# messages.
_SESSION = "until the consumer closes or is given up"
_CHORD = "a week after the last arrival; `results_expire_in` after the callback is sent"

# fmt: off
ITEMS = (
    StoredItem("<queue>", "list", "waiting messages; pushed on the right, taken from the left",
               "until claimed", "broker", shared=True),
    StoredItem("delayed_tasks", "zset", "messages with an ETA, scored by it in nanoseconds",
               "until due", "broker", shared=True),
    StoredItem("<task UUID>", "string", "state of the task, Go's JSON",
               "`results_expire_in` once finished; before, a week after the last change and the "
               "ETA", "backend", shared=True),
    StoredItem("<group UUID>", "string", "members of the group, Go's JSON",
               "a week; `results_expire_in` after its members have ended", "backend", shared=True),
    StoredItem("TriggerChordMutex", "string",
               "Go's lock around the callback of a chord; read here, never written", "8 s", "Go",
               shared=True),
    StoredItem("machinery_lock_<name>", "string",
               "Go's lock of a periodic task: nanoseconds until which it is held", "until then",
               "lock", shared=True),
    StoredItem("mpy:queues", "set",
               "names of all queues that ever held a message or had a consumer", "until forgotten",
               "broker"),
    StoredItem("mpy:{<queue>}:s", "zset",
               "registered sessions, scored by their last beat in µs of the server's clock",
               _SESSION, "consumer"),
    StoredItem("mpy:{<queue>}:b:<session>", "string",
               "identity of the session: worker, host, boot id, PID namespace, pid, its start "
               "time, queues; whether it is stalled", _SESSION, "consumer"),
    StoredItem("mpy:{<queue>}:i:<session>", "list",
               "arrivals: a message that `BLMOVE` has moved to a waiting consumer",
               "until the claim behind it", "consumer"),
    StoredItem("mpy:{<queue>}:f:<session>", "hash",
               "messages in flight: receipt → claim, counts and bytes",
               "until settled or given back", "consumer"),
    StoredItem("mpy:{<queue>}:r:<session>", "set",
               "receipts of redelivered tasks that have begun; they get a strike where the run "
               "table cannot be read", _SESSION, "consumer"),
    StoredItem("mpy:{<queue>}:t", "zset",
               "tombstones of sessions that are over, scored by when they are forgotten", "a day",
               "consumer, maintenance"),
    StoredItem("mpy:{<queue>}:n", "string", "the last receipt and the last number of a dead letter",
               "until the queue is forgotten", "broker"),
    StoredItem("mpy:{<queue>}:l", "zset",
               "priorities above 0 that have waiting messages; `fair` if `p:fair` has some",
               "until empty", "broker"),
    StoredItem("mpy:{<queue>}:p:<level>", "list", "waiting messages of one priority above 0",
               "until claimed", "broker"),
    StoredItem("mpy:{<queue>}:p:fair", "zset",
               "waiting messages of a fair queue, with their counts, scored by their turn",
               "until claimed", "broker"),
    StoredItem("mpy:{<queue>}:x", "zset",
               "of a fair queue the turn that is served, and the last one of each tenant",
               "until the queue is forgotten; a tenant's until it is over", "broker"),
    StoredItem("mpy:{<queue>}:a", "hash",
               "SHA-1 of a waiting message → what its bytes do not say: deliveries, strikes, "
               "parks, task", "until claimed, or nothing waits", "broker"),
    StoredItem("mpy:{<queue>}:z", "zset",
               "parked messages, and delayed bytes that are no signature, with their counts, "
               "scored in µs", "until due", "broker"),
    StoredItem("mpy:{<queue>}:o", "list",
               "marks: place and time of messages that were put, one per 0.25 s; what waits behind "
               "a mark was put within 0.25 s of it",
               "until the queue is empty", "broker"),
    StoredItem("mpy:{<queue>}:c", "string", "number of messages ever put",
               "until the queue is forgotten", "broker"),
    StoredItem("mpy:{<queue>}:d", "hash",
               "dead letters by number; the id of number 17 in queue `mail` is `17@mail`",
               "until replayed or purged", "broker"),
    StoredItem("mpy:{<queue>}:e", "zset", "order of the dead letters", "until replayed or purged",
               "broker"),
    StoredItem("mpy:{<queue>}:v", "set", "connections of idle consumers of the queue",
               "until woken, a minute at most", "consumer"),
    StoredItem("mpy:{<queue>}:w", "set", "those of them that block at another queue",
               "until woken, a minute at most", "consumer"),
    StoredItem("mpy:{<queue>}:u", "set", "the queue is paused", "until resumed", "broker"),
    StoredItem("mpy:m:{<uuid>}", "string",
               "companion of a state, in lines: run, epoch, mark, start, progress, queue, "
               "worker, our other fields", "as the state", "backend"),
    StoredItem("mpy:k:{<uuid>}", "string",
               "state of a task whose UUID has one or two characters: its bare name may be a queue",
               "as a state", "backend"),
    StoredItem("mpy:l:{<uuid>}", "string",
               "seconds that a chord's member is kept once the chord is settled, if it says so",
               "a week", "backend"),
    StoredItem("mpy:g:{<group>}", "hash",
               "total, callback, failed member, whether the callback was sent", _CHORD, "backend"),
    StoredItem("mpy:h:{<group>}", "set", "members that have ended", _CHORD, "backend"),
    StoredItem("mpy:ready", "zset", "chords that are complete and whose callback is not sent",
               "until sent", "backend"),
    StoredItem("mpy:groups", "zset",
               "groups, scored by when a worker looks whether they have expired", "until expired",
               "backend"),
    StoredItem("mpy:revoked", "zset", "revoked tasks, scored by when that is forgotten",
               REVOKED_LIFE, "backend"),
    StoredItem("mpy:topic:{<topic>}", "stream",
               "the newest 2,000 records that were sent to a topic, with their running number; "
               "about a hundred more", "until the `ttl` of its records is over, an hour at most",
               "broker"),
    StoredItem("mpy:lock:{<name>}", "string", "token and fence of a lock that is held",
               "`ttl` of the lock", "lock"),
    StoredItem("mpy:limits", "zset", "tasks and limiters that are limited, by their last use",
               "a day; a changed one until it is reset", "lock"),
    StoredItem("mpy:limits:{<scope>}", "zset",
               "keys that are limited, scored by when that is forgotten", "as they are", "lock"),
    StoredItem("mpy:limits:{<scope>}:<rule and key>", "hash",
               "the order of each that waits for a limited key", "as that key", "lock"),
    StoredItem("mpy:limit:{<scope>}", "string", "limits that were changed at run time",
               "until reset", "lock"),
    StoredItem("mpy:limit:{<scope>}:<rule and key>", "string",
               "a limited key: moment of the next run, slots, who waits",
               "a minute after it holds nobody back", "lock"),
    StoredItem("mpy:{<queue>}:life", "string",
               "beginning of the `run_id` of the server that gave these connections their numbers",
               "a minute", "consumer"),
    StoredItem("mpy:p:<token>", "string", "token of a submission that was carried out",
               "ten minutes", "broker"),
    StoredItem("mpy:staged:<token>", "hash",
               "steps of a large submission by number, and the next one",
               "ten minutes; once committed, until carried out", "broker"),
    StoredItem("mpy:committed", "zset",
               "tokens of committed submissions, scored by their last step",
               "until carried out", "broker"),
    StoredItem("mpy:open", "zset",
               "tasks that are not finished, by their last change; for listings",
               "two weeks after the last change", "backend"),
    StoredItem("mpy:done", "zset", "tasks that are finished, by their last change; for listings",
               "`results_expire_in`", "backend"),
    StoredItem("mpy:rate:<second>", "hash",
               "number of tasks that finished in this second, by state and queue", "an hour",
               "backend"),
    StoredItem("mpy:partial", "zset",
               "chords with members in and not complete, scored by when a worker looks whether "
               "Go has ended the others", "until complete or expired", "backend"),
    StoredItem("mpy:loose", "set",
               "settled groups of more than a thousand members, which are still to expire",
               "until they expire", "backend"),
    StoredItem("mpy:o:{<key>}", "string",
               "outbox: messages still to be published in another store's broker",
               "until published", "backend"),
    StoredItem("mpy:outbox", "zset", "keys of open outboxes, scored by when they were written",
               "until published", "backend"),
    StoredItem("mpy:u:<key>", "string",
               "claim: UUID of the call that holds the key of a unique task", CLAIM_LIFE,
               "backend"),
    StoredItem("mpy:kept:{<uuid>}", "hash", "checkpoints of a task, by the names of its steps",
               "a minute longer than the state; before its end, and of a dead letter, a year",
               "backend"),
    StoredItem("mpy:records", "hash", "schedules by name", "until removed", "backend"),
    StoredItem("mpy:records:n", "string", "number of changes of schedules", "for ever", "backend"),
    StoredItem("mpy:fence", "string", "the last fence of a delivery or a lock", "for ever",
               "consumer, backend, lock"),
)
# fmt: on


@functools.lru_cache(maxsize=4096)
def queue_keys(queue: str) -> tuple[str, str]:
    """Return the queue's list (Go's key) and the prefix of our keys for it."""
    start = queue.find("{")
    end = queue.find("}", start + 1)
    if start >= 0 and end > start + 1:
        return queue, f"mpy:{queue[start : end + 1]}:{queue}:"  # it has a tag of its own
    return queue, f"mpy:{{{queue}}}:"


def document_key(uuid: str) -> bytes:
    """Return the key of a task's or group's document.

    It is Go's key, unless the name is so short that it is rather a queue's.
    """
    key = encoded(uuid)
    return key if len(key) > 2 else b"mpy:k:{%b}" % key


def companion_key(uuid: str) -> bytes:
    """Return the key of the fields of a state that Go does not know.

    A channel of the same name announces the end of the task.
    """
    return b"mpy:m:{%b}" % encoded(uuid)


def quoted(name: str) -> str:
    """Return a name as it stands between the braces of our keys: without braces, and not empty."""
    if "%" in name or "{" in name or "}" in name:
        return name.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
    return name or "%"


def checkpoints_key(uuid: str) -> bytes:
    return b"mpy:kept:{%b}" % encoded(uuid)


def topic_key(topic: str) -> str:
    return f"mpy:topic:{{{topic}}}"


def outbox_key(key: str) -> bytes:
    return b"mpy:o:{%b}" % encoded(key)


def encoded(text: str) -> bytes:
    """Encode a name; what has no UTF-8, half a surrogate pair, is written out."""
    return text.encode("utf-8", "backslashreplace")
