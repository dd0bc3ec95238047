"""Opening the file of the SQLite stores: refusals, creation, and settings of its connections.

Limits: network file systems are known by their type in /proc/mounts, so on Linux only.
"""

from __future__ import annotations

import os
import random
import sqlite3
import time

from machinery_py.connections.forks import ForkLock
from machinery_py.connections.sqlite.errors import busy, is_busy, refuse_open, translate, unusable
from machinery_py.connections.sqlite.schema import APPLICATION_ID, TABLES, UPGRADES, VERSION
from machinery_py.connections.sqlite.upgrade import add_functions
from machinery_py.errors import BrokerUnavailable
from machinery_py.texts import get_logger

logger = get_logger(__name__)

CHECKPOINT = 4000  # pages of 4 KB in the log before they are copied into the file
SMALL_LOG = 64  # the same on a small or full disk: a log that fills it cannot be copied any more
LOG_LIMIT = 64 << 20  # bytes that the log keeps on disk when it is idle
PATIENCE = 5.0  # seconds that opening waits at least for those who open the file just now

OLDEST = (3, 32, 0)  # with UPSERT, iif, and room for 32,766 parameters

NETWORK = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb",
        "smb2",
        "smb3",
        "smbfs",
        "fuse.sshfs",
        "9p",
        "afs",
        "ceph",
        "fuse.ceph",
        "glusterfs",
        "fuse.glusterfs",
        "lustre",
        "fuse.s3fs",
        "davfs",
        "fuse.davfs2",
    }
)

OLDER = "perhaps it carries over the file of an older machinery_py: wait until it has"
RETRY = 0.001, 0.01  # seconds between two tries while another process makes the file


_opening = ForkLock()  # between our creating a file and closing it, nobody of us may lock it


def open_writer(path: str, *, synchronous: str, busy_timeout: float) -> sqlite3.Connection:
    """Return a connection that writes, after creating the file and its tables if there is none.

    Raises:
        StoreUnusable: the text says why.
        BrokerUnavailable: another process keeps it locked.
    """
    if sqlite3.sqlite_version_info < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise unusable(
            path, f"this Python has SQLite {sqlite3.sqlite_version} (expected {oldest} or newer)"
        )
    kind = network_kind(path)
    if kind:
        raise unusable(
            path, f"it is on a network file system ({kind}) without sound locks (name a local file)"
        )
    deadline = time.monotonic() + max(PATIENCE, busy_timeout)
    with _opening:
        _create(path)
        connection = _connect(path, 0.0)
        try:
            while not _prepare(connection, path):
                if time.monotonic() > deadline:
                    why = OLDER if _is_older(connection) else ""
                    raise busy(path, max(PATIENCE, busy_timeout), BrokerUnavailable, why=why)
                time.sleep(random.uniform(*RETRY))
            connection.executescript(f"PRAGMA synchronous = {synchronous}")
        except BaseException:
            connection.close()
            raise
        return connection


def open_reader(path: str, *, busy_timeout: float) -> sqlite3.Connection:
    """Return a connection that only reads."""
    connection = _connect(path, max(1.0, busy_timeout))
    try:
        connection.executescript(
            "PRAGMA query_only = 1; PRAGMA temp_store = MEMORY; PRAGMA cache_size = -2000"
        )
    except sqlite3.Error as error:
        connection.close()
        raise translate(error, path) from error
    return connection


def _connect(path: str, timeout: float) -> sqlite3.Connection:
    try:
        return sqlite3.connect(
            path,
            timeout=timeout,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
    except sqlite3.Error as error:
        raise translate(error, path) from error


def identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _create(path: str) -> None:
    """Create an empty file with mode 0600.

    An existing file is not opened: closing it would drop SQLite's locks on it in this process.
    """
    # The log first: another process that makes both in between has made the file before it.
    if os.path.exists(path + "-wal") and not os.path.exists(path):
        raise unusable(
            path,
            f"it is gone, but its log {path + '-wal'!r} is there (put it back, or remove the log)",
        )
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        pass
    except OSError as error:
        raise refuse_open(error, path) from error


def _prepare(connection: sqlite3.Connection, path: str) -> bool:
    """Set the pragmas, and create the tables if there are none.

    Returns False if another process holds the file.
    """
    try:
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise unusable(
                path,
                f"its journal mode stays {mode!r} (expected 'wal'; is the disk a special one?)",
            )
        connection.executescript(
            f"PRAGMA wal_autocheckpoint = {_checkpoint(path)};"
            f"PRAGMA journal_size_limit = {LOG_LIMIT};"
            "PRAGMA temp_store = MEMORY; PRAGMA cache_size = -16000; PRAGMA secure_delete = OFF"
        )
        # One read transaction: another process may be making the tables between two looks.
        connection.execute("BEGIN")
        current = _version(connection, path) == VERSION
        connection.execute("COMMIT")
        if not current:
            connection.execute("BEGIN IMMEDIATE")
            version, begun_at = _version(connection, path), time.monotonic()
            what = f"SQLite file {path!r}, from schema {version} to {VERSION}"
            if version != VERSION:
                if version:
                    logger.info("%s: it is carried over; all others wait", what)
                add_functions(connection)
                for statement in steps_from(version):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {VERSION}")
            connection.execute("COMMIT")
            if 0 < version < VERSION:
                logger.info("%s: done in %.1f s", what, time.monotonic() - begun_at)
    except sqlite3.Error as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if is_busy(error):
            return False
        raise translate(error, path) from error
    return True


def _is_older(connection: sqlite3.Connection) -> bool:
    try:
        return 0 < int(connection.execute("PRAGMA user_version").fetchone()[0]) < VERSION
    except sqlite3.Error:
        return False  # nothing is known of it


def steps_from(version: int) -> list[str]:
    """Return the statements that upgrade a file of this version; 0 is an empty file."""
    if version == 0:
        return list(TABLES)
    return [statement for step in range(version, VERSION) for statement in UPGRADES[step]]


def _checkpoint(path: str) -> int:
    """Return the pages of the log before they are copied: less where the disk has little room."""
    try:
        room = os.statvfs(os.path.dirname(path) or ".")
    except OSError:
        return CHECKPOINT
    has_room = room.f_bavail * room.f_frsize > 10 * CHECKPOINT * 4096
    return CHECKPOINT if has_room else SMALL_LOG


def _version(connection: sqlite3.Connection, path: str) -> int:
    """Return the version of the tables; 0 for an empty file."""
    owner = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if owner != APPLICATION_ID:
        if version or connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise unusable(path, "it belongs to another program (name a file of its own)")
        return 0
    if version > VERSION:
        raise unusable(
            path,
            f"it was written by a newer machinery_py (schema {version}, this one knows {VERSION}); "
            "upgrade this one",
        )
    return int(version)


def network_kind(path: str, mounts: str = "/proc/mounts") -> str:
    """Return the type of the network file system that holds the path, or "". Linux only."""
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as lines:
            entries = [entry for line in lines if len(entry := line.split()) > 2]
    except OSError:
        return ""
    folder = os.path.realpath(os.path.dirname(path))
    best, kind = "", ""
    for entry in entries:
        point = entry[1].replace("\\040", " ")
        inside = folder == point or folder.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, entry[2]
    return kind if kind in NETWORK else ""
