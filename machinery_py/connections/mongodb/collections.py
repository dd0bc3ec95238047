"""Collections in MongoDB. The database of a URL without a path is Go's, `machinery`."""

from __future__ import annotations

from machinery_py.connections.stored_items import CLAIM_LIFE, REVOKED_LIFE, StoredItem

# fmt: off
ITEMS = (
    StoredItem("tasks", "collection",
               "task UUID → `state`, `task_name`, `created_at`, `results`, `error`; ours: `run`, "
               "`mark`, `epoch`, `version`, `ours`, `deed`, `outbox`, times",
               "`results_expire_in` once finished; before, for ever", "backend", shared=True),
    StoredItem("group_metas", "collection",
               "group UUID → `task_uuids`, `chord_triggered`, `lock`, `created_at`; ours: "
               "`by_python`", "until its members have expired", "backend", shared=True),
    StoredItem("machinery_messages", "collection",
               "token and number → a message: `queue`, `body`, `priority`, `order`, `status`, "
               "`due_at`, `lease`, `session`, `fence`, `strikes`, `begun`, `parks`, `deed`, and "
               "`tenant` in a fair queue",
               "until settled; dead letters until replayed or purged", "broker"),
    StoredItem("machinery_tokens", "collection",
               "token → a submission that was accepted; its `deed` until all of it is stored",
               "ten minutes", "broker"),
    StoredItem("machinery_parts", "collection",
               "token and place → `part` of the `deed` of a submission that is larger than 4 MB",
               "until all of it is stored", "broker"),
    StoredItem("machinery_sessions", "collection",
               "session → identity of the consumer, `beats`, `stalled`",
               "until it closes or is given up", "consumer"),
    StoredItem("machinery_queues", "collection", "name of a queue → `paused`",
               "until forgotten", "broker"),
    StoredItem("machinery_chords", "collection",
               "group UUID → `total`, `arrived`, `doubts`, `callback`, `failed`, `ready`, "
               "`fired`, `deed`; `look_at`: when a worker looks whether Go has ended the missing "
               "members",
               "a week after the last arrival; `results_expire_in` after the callback is sent",
               "backend"),
    StoredItem("machinery_arrivals", "collection", "group and task → a member that has ended",
               "as its chord", "backend"),
    StoredItem("machinery_revoked", "collection", "task UUID → until when its revocation is kept",
               REVOKED_LIFE, "backend"),
    StoredItem("machinery_records", "collection",
               "schedule → `kept`, `body`, `stamp`, `deed`, `send`",
               "until removed, and a day with `kept` 0", "backend"),
    StoredItem("machinery_claims", "collection",
               "key of a [unique task](unique.md) → the same, and `expires_at`", CLAIM_LIFE,
               "backend"),
    StoredItem("machinery_checkpoints", "collection",
               "task UUID → `fence`, `rows`, `expires_at`: checkpoints of the task",
               "a minute longer than the state; before its end, and of a dead letter, a year",
               "backend"),
    StoredItem("machinery_outboxes", "collection",
               "tick or sending → messages of a schedule or a unique task for another store's "
               "broker", "until published", "backend"),
    StoredItem("machinery_topics", "collection",
               "topic → `born`, `number`, `until`; topic and place → a record: `topic`, `place`, "
               "`number`, `at`, `until`, `body`; the newest 2,000 of each topic, and up to a "
               "hundred more", "until the `ttl` is over and more is sent", "broker"),
    StoredItem("machinery_fences", "collection", "`last` → the last fence of a delivery",
               "for ever", "broker"),
    StoredItem("machinery_locks", "collection", "name → `token`, `fence`, `expires_at`",
               "a day after it was free", "lock"),
    StoredItem("machinery_limits", "collection",
               "scope, rule and key → `version`, `until`, `body`: moment of the next run, slots, "
               "who waits; scope alone → the limits that were changed at run time",
               "a minute after it holds nobody back; changes until they are reset", "lock"),
)
# fmt: on
