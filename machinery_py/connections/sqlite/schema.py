"""The tables of the SQLite stores, and the version that their file bears.

A moment is an INTEGER: microseconds since 1970, UTC.

A change of a table raises VERSION, and adds to UPGRADES the statements that lead up to it.
"""

from __future__ import annotations

from collections.abc import Mapping

from machinery_py.connections.stored_items import CLAIM_LIFE, REVOKED_LIFE, StoredItem

VERSION = 11
APPLICATION_ID = 0x6D636879  # "mchy": tells our file from another program's

# fmt: off
ITEMS = (
    StoredItem("messages", "table",
               "a row per message: waiting (status 0), delayed (1) or held by a session (2); the "
               "id is its place", "until settled", "broker"),
    StoredItem("dead", "table", "dead letters", "until replayed or purged", "broker"),
    StoredItem("sessions", "table",
               "a row per consumer; it is alive while it holds the lock on its file",
               "until it closes or is given up", "consumer"),
    StoredItem("queues", "table", "names of all queues that ever held a message or had a consumer",
               "until forgotten", "broker"),
    StoredItem("paused", "table", "queues from which nothing is claimed", "until resumed",
               "broker"),
    StoredItem("turns", "table",
               "of a fair queue the turn that is served, and the last one of each tenant",
               "until the queue is forgotten; a tenant's until it is over", "broker"),
    StoredItem("tokens", "table", "submissions that were carried out", "ten minutes", "broker"),
    StoredItem("tasks", "table", "a row per task: its state, mark and epoch",
               "`results_expire_in` once finished; before, for ever", "backend"),
    StoredItem("groups", "table", "a row per group; `ready` = 1 until the callback is sent",
               "a week after the last arrival; `results_expire_in` after the callback is sent",
               "backend"),
    StoredItem("group_members", "table", "position and arrival of each member", "as its group",
               "backend"),
    StoredItem("outbox", "table", "messages still to be published in another store's broker",
               "until published", "backend"),
    StoredItem("revoked", "table", "revoked tasks", REVOKED_LIFE, "backend"),
    StoredItem("records", "table", "schedules; a new id after each change", "until removed",
               "backend"),
    StoredItem("claims", "table", "keys of unique tasks", CLAIM_LIFE, "backend"),
    StoredItem("topics", "table", "records of topics; the newest 2,000 of each",
               "until the `ttl` is over and more is sent", "broker"),
    StoredItem("items", "table",
               "a row per message: waiting (state 0), late (1) or held (2); the id is its place",
               "until settled", "broker"),
    StoredItem("holds", "table",
               "a row per consumer; it is alive while it holds the lock on its file",
               "until it closes or is given up", "consumer"),
    StoredItem("members", "table", "members of chords that have come in", "as the chord",
               "backend"),
    StoredItem("rows", "table",
               "a row for each lock that is held; a row for each limited key: moment of the next "
               "run, slots, who waits; the limits that were changed at run time; the version of a "
               "row is a fence",
               "`ttl` of the lock; of a limit until a minute after it holds nobody back; changes "
               "until they are reset", "lock"),
)
# fmt: on

# turn: in a fair queue; 0 in others, so that theirs is the order of the ids; of one that has waited
# for a limit or a lock its due_at - 2^62, which is below 0.
_WAITING = (
    "CREATE INDEX messages_waiting ON messages (queue, status, priority DESC, turn) "
    "WHERE status = 0"
)
# tenant: ':' and its name, with its last turn; '' has the turn that is served.
_TURNS = (
    "CREATE INDEX messages_turnless ON messages (id) "
    "WHERE status = 0 AND turn = 0 AND tenant IS NOT NULL",
    "CREATE TABLE turns (queue TEXT NOT NULL, priority INTEGER NOT NULL, tenant TEXT NOT NULL, "
    "turn INTEGER NOT NULL, PRIMARY KEY (queue, priority, tenant)) WITHOUT ROWID",
    "CREATE INDEX turns_over ON turns (queue, priority, turn)",
)
# id: AUTOINCREMENT, so that no change of a record passes unseen.
_PAUSED = "CREATE TABLE paused (queue TEXT PRIMARY KEY) WITHOUT ROWID"
_RECORDS = (
    "CREATE TABLE records (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, "
    "body BLOB NOT NULL)"
)
_CLAIMS = (
    "CREATE TABLE claims (name TEXT PRIMARY KEY, body BLOB NOT NULL, expires_at INTEGER NOT NULL) "
    "WITHOUT ROWID",
    "CREATE INDEX claims_expiring ON claims (expires_at)",
)
# id: AUTOINCREMENT, so that no reader takes a new record for one that it has read.
_TOPICS = (
    "CREATE TABLE topics (id INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL, "
    "number INTEGER NOT NULL, sent_at INTEGER NOT NULL, until INTEGER NOT NULL, "
    "body BLOB NOT NULL)",
    "CREATE INDEX topics_number ON topics (topic, number)",
    "CREATE INDEX topics_expiring ON topics (until)",
)
# version: a fence. expires_at: NULL: never. at: NULL: in no listing.
_ROWS = (
    "CREATE TABLE rows (kind TEXT NOT NULL, id TEXT NOT NULL, version INTEGER NOT NULL, "
    "expires_at INTEGER, at INTEGER, name TEXT, body BLOB NOT NULL, PRIMARY KEY (kind, id)) "
    "WITHOUT ROWID",
    "CREATE INDEX rows_listed ON rows (kind, at, id) WHERE at IS NOT NULL",
    "CREATE INDEX rows_expiring ON rows (expires_at) WHERE expires_at IS NOT NULL",
)
# kept_kind, kept_id: the row that keeps it. sweep_at: when to look whether it is over.
_KEPT = (
    "ALTER TABLE rows ADD COLUMN kept_kind TEXT",
    "ALTER TABLE rows ADD COLUMN kept_id TEXT",
    "ALTER TABLE rows ADD COLUMN sweep_at INTEGER",
    "UPDATE rows SET sweep_at = expires_at",
    "DROP INDEX rows_expiring",
    "CREATE INDEX rows_expiring ON rows (sweep_at) WHERE sweep_at IS NOT NULL",
)
# Members go with the row that their set is.
_MEMBERS = (
    "CREATE TABLE members (kind TEXT NOT NULL, id TEXT NOT NULL, member TEXT NOT NULL, "
    "PRIMARY KEY (kind, id, member)) WITHOUT ROWID",
    "CREATE TRIGGER rows_deleted AFTER DELETE ON rows BEGIN "
    "DELETE FROM members WHERE kind = OLD.kind AND id = OLD.id; END",
)
# state: 0 waiting, 1 late, 2 held. AUTOINCREMENT: no receipt may mean another message. The id is
# its place. turn: as in _WAITING.
_ITEMS = (
    "CREATE TABLE items (id INTEGER PRIMARY KEY AUTOINCREMENT, queue TEXT NOT NULL, "
    "state INTEGER NOT NULL, priority INTEGER NOT NULL, turn INTEGER NOT NULL, "
    "due INTEGER NOT NULL, put_at INTEGER NOT NULL, tenant TEXT, body BLOB NOT NULL, "
    "count INTEGER NOT NULL DEFAULT 0, strikes INTEGER NOT NULL DEFAULT 0, hold TEXT, "
    "claim INTEGER, runs INTEGER NOT NULL DEFAULT 0)",
    "CREATE INDEX items_waiting ON items (queue, state, priority DESC, turn) WHERE state = 0",
    "CREATE INDEX items_late ON items (due) WHERE state = 1",
    "CREATE INDEX items_held ON items (hold) WHERE state = 2",
    "CREATE INDEX items_turnless ON items (id) WHERE state = 0 AND turn = 0 AND tenant IS NOT NULL",
    "CREATE TABLE holds (id TEXT PRIMARY KEY, body BLOB NOT NULL, pid INTEGER NOT NULL, "
    "place TEXT NOT NULL, beat_at INTEGER NOT NULL, lease INTEGER NOT NULL, "
    "ended INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID",
)
# In versions 8 and 9.
_LIMITS = (
    "CREATE TABLE limits (scope TEXT NOT NULL, key TEXT NOT NULL, body BLOB NOT NULL, "
    "until INTEGER NOT NULL, PRIMARY KEY (scope, key)) WITHOUT ROWID",
)

#: Run in one transaction on an empty file.
TABLES: tuple[str, ...] = (
    # status: 0 waiting, 1 delayed, 2 held. AUTOINCREMENT: no receipt may mean another message.
    """
    CREATE TABLE messages (
        id INTEGER PRIMARY KEY AUTOINCREMENT, queue TEXT NOT NULL, uuid TEXT NOT NULL,
        name TEXT NOT NULL, priority INTEGER NOT NULL, status INTEGER NOT NULL, due_at INTEGER,
        parks INTEGER NOT NULL, sent_at INTEGER NOT NULL,
        fence INTEGER NOT NULL DEFAULT 0, strikes INTEGER NOT NULL DEFAULT 0,
        session INTEGER, claim INTEGER, body BLOB NOT NULL, tenant TEXT,
        turn INTEGER NOT NULL DEFAULT 0)
    """,
    _WAITING,
    *_TURNS,
    "CREATE INDEX messages_delayed ON messages (due_at) WHERE status = 1",
    "CREATE INDEX messages_held ON messages (session, claim) WHERE status = 2",
    """
    CREATE TABLE dead (
        id INTEGER PRIMARY KEY AUTOINCREMENT, uuid TEXT NOT NULL, name TEXT NOT NULL,
        queue TEXT NOT NULL, reason TEXT NOT NULL, error TEXT NOT NULL, strikes INTEGER NOT NULL,
        died_at INTEGER NOT NULL, body BLOB NOT NULL)
    """,
    "CREATE INDEX dead_queue ON dead (queue)",
    """
    CREATE TABLE sessions (
        id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL, worker TEXT NOT NULL,
        host TEXT NOT NULL, pid INTEGER NOT NULL, place TEXT NOT NULL, queues TEXT NOT NULL,
        started_at INTEGER NOT NULL, beat_at INTEGER NOT NULL)
    """,
    "CREATE TABLE queues (name TEXT PRIMARY KEY) WITHOUT ROWID",
    _PAUSED,
    "CREATE TABLE tokens (token TEXT PRIMARY KEY, used_at INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE INDEX tokens_used ON tokens (used_at)",
    """
    CREATE TABLE tasks (
        uuid TEXT PRIMARY KEY, name TEXT NOT NULL, state TEXT, run INTEGER NOT NULL,
        attempt INTEGER NOT NULL, queue TEXT NOT NULL, created_at INTEGER NOT NULL,
        ttl INTEGER NOT NULL, error TEXT, error_type TEXT, traceback TEXT, progress TEXT,
        started_at INTEGER, finished_at INTEGER, eta INTEGER, worker TEXT NOT NULL,
        mark TEXT NOT NULL, epoch INTEGER NOT NULL,
        changed_at INTEGER NOT NULL, expires_at INTEGER, results BLOB, message BLOB,
        notes_json TEXT, keep_for REAL, root TEXT, parent TEXT)
    """,
    "CREATE INDEX tasks_changed ON tasks (changed_at, state, name, queue)",
    "CREATE INDEX tasks_expiring ON tasks (expires_at) WHERE expires_at IS NOT NULL",
    """
    CREATE TABLE groups (
        uuid TEXT PRIMARY KEY, created_at INTEGER NOT NULL, ttl INTEGER NOT NULL,
        locked INTEGER NOT NULL, total INTEGER NOT NULL DEFAULT 0,
        arrived INTEGER NOT NULL DEFAULT 0, failed_member TEXT NOT NULL DEFAULT '',
        fired INTEGER NOT NULL DEFAULT 0, ready INTEGER NOT NULL DEFAULT 0, expires_at INTEGER,
        callback BLOB NOT NULL DEFAULT x'', plan TEXT NOT NULL DEFAULT '')
    """,
    "CREATE INDEX groups_ready ON groups (uuid) WHERE ready = 1",
    "CREATE INDEX groups_expiring ON groups (expires_at) WHERE expires_at IS NOT NULL",
    """
    CREATE TABLE group_members (
        group_uuid TEXT NOT NULL, task_uuid TEXT NOT NULL, position INTEGER,
        arrived INTEGER NOT NULL DEFAULT 0, ok INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (group_uuid, task_uuid)) WITHOUT ROWID
    """,
    "CREATE INDEX group_members_task ON group_members (task_uuid)",
    "CREATE TABLE outbox (key TEXT PRIMARY KEY, kept_at INTEGER NOT NULL, bodies BLOB NOT NULL) "
    "WITHOUT ROWID",
    "CREATE TABLE revoked (uuid TEXT PRIMARY KEY, expires_at INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE INDEX revoked_expiring ON revoked (expires_at)",
    _RECORDS,
    *_CLAIMS,
    *_TOPICS,
    *_ROWS,
    *_KEPT,
    *_MEMBERS,
    *_ITEMS,
)

#: Statements that turn the tables of a version into those of the next. A program of the version
#: before can go on with the file that it has open; one before 10 cannot use locks and limits.
UPGRADES: Mapping[int, tuple[str, ...]] = {
    1: (_PAUSED, _RECORDS),
    2: _CLAIMS,
    3: ("ALTER TABLE tasks ADD COLUMN notes_json TEXT",),
    4: _TOPICS,
    5: ("ALTER TABLE tasks ADD COLUMN keep_for REAL",),
    6: (
        "ALTER TABLE tasks ADD COLUMN root TEXT",
        "ALTER TABLE tasks ADD COLUMN parent TEXT",
        "ALTER TABLE groups ADD COLUMN plan TEXT NOT NULL DEFAULT ''",
    ),
    7: _LIMITS,
    8: (
        "ALTER TABLE messages ADD COLUMN tenant TEXT",
        "ALTER TABLE messages ADD COLUMN turn INTEGER NOT NULL DEFAULT 0",
        "DROP INDEX messages_waiting",
        _WAITING,
        *_TURNS,
    ),
    9: (
        *_ROWS,
        "INSERT INTO rows (kind, id, version, expires_at, body) "
        "SELECT 'lock', name, id, expires_at, CAST(token AS BLOB) FROM locks",
        "INSERT INTO rows (kind, id, version, expires_at, at, name, body) "
        "SELECT 'limit', scope || char(10) || key, 1, until, until, scope, body FROM limits "
        "WHERE key <> ''",
        "INSERT INTO rows (kind, id, version, at, name, body) "
        "SELECT 'limit rules', scope, 1, 0, scope, body FROM limits WHERE key = ''",
        # Fences go on; they were the ids of locks.
        "UPDATE sqlite_sequence SET name = 'fences' WHERE name = 'locks'",
        # An older program that has the file open must not take a lock that is held here.
        "DROP TABLE locks",
        "DROP TABLE limits",
    ),
    10: (*_KEPT, *_MEMBERS, *_ITEMS),
}
