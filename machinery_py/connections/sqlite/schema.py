"""The tables of the SQLite stores, and the version that their file bears.

A moment is an INTEGER: microseconds since 1970, UTC.

A change of a table raises VERSION, and adds to UPGRADES the statements that lead up to it.
"""

from __future__ import annotations

from collections.abc import Mapping

from machinery_py.connections.sqlite.upgrade import CARRIED_OVER
from machinery_py.connections.stored_items import CLAIM_LIFE, REVOKED_LIFE, StoredItem

VERSION = 11
APPLICATION_ID = 0x6D636879  # "mchy": tells our file from another program's

# fmt: off
ITEMS = (
    StoredItem("items", "table",
               "a row per message: waiting (state 0), late (1) or held (2); the id is its place",
               "until settled", "broker"),
    StoredItem("holds", "table",
               "a row per consumer; it is alive while it holds the lock on its file",
               "until it closes or is given up", "consumer"),
    StoredItem("turns", "table",
               "of a fair queue the turn that is served, and the last one of each tenant",
               "until the queue is empty; a tenant's until it is over", "broker"),
    StoredItem("members", "table", "members of chords that have come in", "as the chord",
               "backend"),
    StoredItem("topics", "table", "records of topics; the newest 2,000 of each",
               "until the `ttl` is over and more is sent", "broker"),
    StoredItem("rows", "table",
               "all else, by its kind: tasks (`task`), groups and their chords (`group`, `chord`, "
               "`chord open`, `chord ready`), dead letters (`dead`), queues and which are paused "
               "(`queue`, `closed`), submissions that were carried out (`token`), messages still "
               "to be published in another store's broker (`outbox`), schedules (`record`), unique "
               "tasks (`claim`), revoked tasks (`revoked`), locks and limits; the version of a row "
               "is a fence",
               "`results_expire_in` for finished tasks, "
               f"{CLAIM_LIFE} for unique tasks, {REVOKED_LIFE} for revoked ones, ten minutes for "
               "submissions, `ttl` of a lock; a limit until a minute after it holds nobody back",
               "backend"),
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
# In version 10. version: a fence. expires_at: NULL: never. at: NULL: in no listing.
_ROWS = (
    "CREATE TABLE rows (kind TEXT NOT NULL, id TEXT NOT NULL, version INTEGER NOT NULL, "
    "expires_at INTEGER, at INTEGER, name TEXT, body BLOB NOT NULL, PRIMARY KEY (kind, id)) "
    "WITHOUT ROWID",
    "CREATE INDEX rows_listed ON rows (kind, at, id) WHERE at IS NOT NULL",
    "CREATE INDEX rows_expiring ON rows (expires_at) WHERE expires_at IS NOT NULL",
)
# kept_kind, kept_id: the row that keeps it. sweep_at: when to look whether it is over. A rowid, so
# that rows of one time are in few pages: those of tasks are written again when these end, and ids
# are random.
_NEW_ROWS = (
    "CREATE TABLE rows (kind TEXT NOT NULL, id TEXT NOT NULL, version INTEGER NOT NULL, "
    "expires_at INTEGER, at INTEGER, name TEXT, body BLOB NOT NULL, kept_kind TEXT, kept_id TEXT, "
    "sweep_at INTEGER, UNIQUE (kind, id))",
    "CREATE INDEX rows_listed ON rows (kind, at, id) WHERE at IS NOT NULL",
    "CREATE INDEX rows_expiring ON rows (sweep_at) WHERE sweep_at IS NOT NULL",
)
_ROWS_MOVE = (
    "DROP INDEX rows_listed",
    "DROP INDEX rows_expiring",
    "ALTER TABLE rows RENAME TO rows_10",
    *_NEW_ROWS,
    "INSERT INTO rows (kind, id, version, expires_at, at, name, body, sweep_at) "
    "SELECT kind, id, version, expires_at, at, name, body, expires_at FROM rows_10",
    "DROP TABLE rows_10",
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
TABLES: tuple[str, ...] = (*_ITEMS, *_TURNS, *_TOPICS, *_NEW_ROWS, *_MEMBERS)

#: Statements that turn the tables of a version into those of the next. No program of a version
#: before 11 can go on with the file that it has open.
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
    10: (*_ROWS_MOVE, *_MEMBERS, *_ITEMS, *CARRIED_OVER),
}
