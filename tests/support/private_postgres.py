"""A private PostgreSQL: its own data folder, one port, trust for all who reach 127.0.0.1."""

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

from machinery_py.testing.waiting import HANG
from tests.support.private import HOST, NotYet, PrivateServer, ServerBroken, ServerMissing

USERS = ("postgres", "nobody")  # whom it runs as where we are root, which it refuses
SSL_REQUEST = b"\0\0\0\x08\x04\xd2\x16\x2f"


class PostgreSQLServer(PrivateServer):
    """One PostgreSQL. It does not flush to the disk: tests kill processes, not the machine."""

    PROGRAMS: ClassVar[Mapping[str, str]] = {"initdb": "postgresql", "postgres": "postgresql"}

    def __init__(self, *, port: int | None = None) -> None:
        super().__init__(port=port)
        if os.getuid() == 0:  # a folder that its user reaches
            parent = self.folder.parent
            self.folder.rmdir()
            while not parent.stat().st_mode & 1:
                parent = parent.parent
            self.folder = Path(tempfile.mkdtemp(prefix="postgresqlserver-", dir=parent))
            self.log = self.folder / "log"
            shutil.chown(self.folder, self._user())

    @classmethod
    def find(cls, program: str) -> str:
        """Its path; Debian keeps each version's programs in a folder of its own."""
        folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
        path = [*map(str, folders), os.environ.get("PATH", os.defpath)]
        found = shutil.which(program, path=os.pathsep.join(path))
        if found is None:
            raise ServerMissing(program, cls.PROGRAMS[program])
        return found

    @property
    def url(self) -> str:
        """Of SQLAlchemy, with psycopg."""
        return f"postgresql+psycopg://postgres@{HOST}:{self.port}/postgres"

    def new_database(self, name: str) -> str:
        """Return the URL of a new, empty one."""
        import psycopg

        address = self.url.replace("+psycopg", "")
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        return f"{self.url.rpartition('/')[0]}/{name}"

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
        }
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        place = ("-D", str(self.folder / "data"), "-p", str(self.port))
        return (*self._as_user(), self.find("postgres"), *place, *words)

    def _before(self) -> None:
        if (self.folder / "data").exists():
            return
        words = ("-D", self.folder / "data", "-U", "postgres", "-A", "trust", "--no-sync")
        done = subprocess.run(
            [*self._as_user(), self.find("initdb"), *words, "-E", "UTF8", "--locale=C"],
            cwd=self.folder,
            env=self.environment(),
            check=False,
            capture_output=True,
            text=True,
            timeout=2 * HANG,
        )
        if done.returncode:
            raise ServerBroken(f"initdb failed: {done.stderr.strip()}")

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

    def _answers(self) -> bool:
        with socket.create_connection((HOST, self.port), HANG) as connection:
            connection.sendall(SSL_REQUEST)
            if connection.recv(1) not in (b"N", b"S"):
                raise NotYet
        log = self.log.read_text(errors="replace")
        return "database system is ready to accept connections" in log
