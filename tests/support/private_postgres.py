"""A private PostgreSQL, its replica, and PgBouncer: one port each, trust for all on 127.0.0.1."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from machinery_py.testing.waiting import HANG, wait_until
from tests.support.private import HOST, NotYet, PrivateServer, ServerBroken, ServerMissing

USERS = ("postgres", "nobody")  # whom it runs as where we are root, which it refuses
SSL_REQUEST = b"\0\0\0\x08\x04\xd2\x16\x2f"

_END_OTHERS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'machinery_py'
"""
_TABLES = """
SELECT string_agg(format('machinery.%I', tablename), ', ') FROM pg_tables
WHERE schemaname = 'machinery' AND tablename <> 'schema_version'
"""


class _Unprivileged(PrivateServer):
    """A program that refuses to run as root: then it is somebody else's."""

    def __init__(self, *, port: int | None = None) -> None:
        super().__init__(port=port)
        if os.getuid() == 0:  # a folder that its user reaches
            parent = self.folder.parent
            self.folder.rmdir()
            while not parent.stat().st_mode & 1:
                parent = parent.parent
            prefix = f"{type(self).__name__.lower()}-"
            self.folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            self.log = self.folder / "log"
            self.own(self.folder)

    def own(self, path: Path) -> None:
        """Give a file or folder to the user whom it runs as."""
        if os.getuid() == 0:
            shutil.chown(path, self._user())

    @staticmethod
    def _user() -> str:
        known = Path("/etc/passwd").read_text().splitlines()
        return next(user for user in USERS if any(one.startswith(f"{user}:") for one in known))

    def _as_user(self) -> Sequence[str]:
        if os.getuid() != 0:
            return ()
        # A change of the user clears the signal that ends the server with us: set it again.
        words = (f"--reuid={self._user()}", "--clear-groups", "--pdeathsig=KILL")
        return ("setpriv", *words, "--")


#: Settings of one that is measured: as it is shipped.
AS_SHIPPED = {"fsync": "on", "autovacuum": "on"}


class PostgreSQLServer(_Unprivileged):
    """One PostgreSQL. It does not flush to the disk: tests kill processes, not the machine.

    Args:
        settings: as in postgresql.conf.
        primary: the running server that it is a replica of.
    """

    PROGRAMS: ClassVar[Mapping[str, str]] = {"initdb": "postgresql", "postgres": "postgresql"}

    def __init__(
        self,
        *,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        primary: PostgreSQLServer | None = None,
    ) -> None:
        super().__init__(port=port)
        self._settings = settings or {}
        self._primary = primary
        self._said_before = 0  # bytes of its log, of earlier starts

    @classmethod
    def find(cls, program: str) -> str:
        """Its path; Debian keeps each version's programs in a folder of its own."""
        folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
        path = [*map(str, folders), os.environ.get("PATH", os.defpath)]
        found = shutil.which(program, path=os.pathsep.join(path))
        if found is None:
            raise ServerMissing(program, "postgresql")
        return found

    @property
    def url(self) -> str:
        return f"postgresql://postgres@{HOST}:{self.port}/postgres"

    def new_database(self, name: str) -> str:
        """Return the URL of a new, empty one."""
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        return f"{self.url.rpartition('/')[0]}/{name}"

    def empty(self) -> bool:
        """Delete what our stores have in the first database; False: somebody is in the way."""
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(_END_OTHERS)  # those of killed processes may still be at work
            found = connection.execute(_TABLES).fetchone()
            try:
                if found and found[0]:
                    connection.execute(f"TRUNCATE {found[0]}".encode())
            except psycopg.errors.DeadlockDetected:
                return False
        return True

    def end_clients(self) -> int:
        """End the connections of our stores to the first database; return how many there were."""
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as connection:
            return len(connection.execute(_END_OTHERS).fetchall())

    def stop(self) -> None:
        """End it as its service does: without waiting for its clients."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL of the first process. The others see it, and end; it cannot start before."""
        children: list[str] = []
        if self.is_running:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        super().kill()
        wait_until(lambda: not any(map(_runs, children)), HANG)

    def close(self) -> None:
        self._end(signal.SIGQUIT)  # at once, and it leaves no shared memory behind
        super().close()

    def command(self) -> Sequence[str | Path]:
        settings = {
            "listen_addresses": HOST,
            "unix_socket_directories": "",
            "fsync": "off",
            "max_prepared_transactions": "10",
            "autovacuum": "off",
        } | dict(self._settings)
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        place = ("-D", str(self.folder / "data"), "-p", str(self.port))
        return (*self._as_user(), self.find("postgres"), *place, *words)

    def _before(self) -> None:
        self._said_before = self.log.stat().st_size if self.log.exists() else 0
        if (self.folder / "data").exists():
            return
        data = ("-D", self.folder / "data", "--no-sync")
        words: Sequence[str | Path]
        if self._primary is None:
            words = ("initdb", *data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C")
        else:
            place = ("-h", HOST, "-p", str(self._primary.port), "-U", "postgres")
            words = ("pg_basebackup", *data, *place, "-R", "--checkpoint=fast")
        done = subprocess.run(
            [*self._as_user(), self.find(words[0]), *words[1:]],
            cwd=self.folder,
            env=self.environment(),
            check=False,
            capture_output=True,
            text=True,
            timeout=2 * HANG,
        )
        if done.returncode:
            raise ServerBroken(f"{words[0]} failed: {done.stderr.strip()}")

    def _answers(self) -> bool:
        with socket.create_connection((HOST, self.port), HANG) as connection:
            connection.sendall(SSL_REQUEST)
            if connection.recv(1) not in (b"N", b"S"):
                raise NotYet
        log = self.log.read_bytes()[self._said_before :]
        return b"database system is ready to accept" in log  # … read-only connections: a replica


class PgBouncerServer(_Unprivileged):
    """A PgBouncer before a PostgreSQL.

    Args:
        mode: "transaction" or "session".
        settings: as in the section `pgbouncer` of its file.
    """

    PROGRAMS: ClassVar[Mapping[str, str]] = {"pgbouncer": "pgbouncer"}

    def __init__(
        self, server: PostgreSQLServer, *, mode: str, settings: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        lines = {
            "listen_addr": HOST,
            "listen_port": str(self.port),
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": mode,
        } | dict(settings or {})
        text = "".join(f"{name} = {value}\n" for name, value in lines.items())
        place = f"host={HOST} port={server.port} user=postgres"
        self._file = self.folder / "pgbouncer.ini"
        self._file.write_text(f"[databases]\n* = {place}\n[pgbouncer]\n{text}")
        self.own(self._file)

    def url_of(self, url: str) -> str:
        """Return the URL of a database of its server, by way of it."""
        return f"postgresql://postgres@{HOST}:{self.port}/{url.rpartition('/')[2]}"

    def command(self) -> Sequence[str | Path]:
        return (*self._as_user(), self.find("pgbouncer"), self._file)

    def _answers(self) -> bool:
        with socket.create_connection((HOST, self.port), HANG) as connection:
            connection.sendall(SSL_REQUEST)
            return connection.recv(1) in (b"N", b"S")


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
