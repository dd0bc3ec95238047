"""A private MongoDB for tests: `mongod` if installed, else a stand-in with its wire protocol.

    MongoServer      mongod
    NxServer         nx-27017 of PyPI, on SQLite: what it confirmed survives `kill`; no usable
                     transactions
    JavaServer       mongo-java-server: passes the suites, but keeps nothing over a restart, and
                     needs a JDK and Maven. `make platforms` runs the suites on it

pytest's first lines name the kind, so that nobody confuses them. Not used, and why: FerretDB 1.24
reads and writes in two steps, so that two workers claim one message (8 threads made 160 claims of
100 documents). MACHINERY_TEST_MONGODB_URL runs all on any other.
"""

from __future__ import annotations

import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from machinery_py.testing.waiting import HANG
from tests.support.private import HOST, PrivateServer, ServerBroken, ServerMissing

OP_MSG = 2013
#: {"ping": 1, "$db": "admin"} as BSON.
_PING = b"\x10ping\x00\x01\x00\x00\x00\x02$db\x00\x06\x00\x00\x00admin\x00\x00"


class MongoServer(PrivateServer):
    """One mongod, without a replica set."""

    PROGRAMS: ClassVar[Mapping[str, str]] = {"mongod": "mongodb-server"}

    @property
    def url(self) -> str:
        return f"mongodb://{HOST}:{self.port}/"

    def command(self) -> Sequence[str | Path]:
        return [
            self.find("mongod"),
            "--dbpath",
            self.folder,
            "--bind_ip",
            HOST,
            "--port",
            str(self.port),
            "--nounixsocket",
        ]

    def _answers(self) -> bool:
        with (
            socket.create_connection((HOST, self.port), HANG) as connection,
            connection.makefile("rb") as stream,
        ):
            body = b"\0\0\0\0\0" + struct.pack("<i", len(_PING) + 4) + _PING
            connection.sendall(struct.pack("<iiii", 16 + len(body), 1, 0, OP_MSG) + body)
            (length,) = struct.unpack("<i", stream.read(4))
            return b"ok\0" in stream.read(length - 4)


class NxServer(MongoServer):
    """One nx-27017; every database is a SQLite file."""

    PROGRAMS: ClassVar[Mapping[str, str]] = {
        "nx-27017": "nx-27017 of PyPI: pip install -e '.[dev]'"
    }

    @classmethod
    def find(cls, program: str) -> str:
        beside = shutil.which(program, path=str(Path(sys.executable).parent)) or shutil.which(
            program
        )
        if beside is None:
            raise ServerMissing(program, cls.PROGRAMS[program])
        return beside

    def command(self) -> Sequence[str | Path]:
        files = self.folder / "databases"
        files.mkdir(exist_ok=True)
        return [
            self.find("nx-27017"),
            "--host",
            HOST,
            "--port",
            str(self.port),
            "--data-dir",
            files,
            "--pid-file",
            self.folder / "pid",
            "--log-file",
            self.folder / "own-log",
        ]


class JavaServer(MongoServer):
    """One mongo-java-server, its data in memory.

    Attributes:
        jars: the folder of its jars; Maven fetches them when it is empty, from where the user's
            settings.xml says.
    """

    PROGRAMS: ClassVar[Mapping[str, str]] = {"java": "default-jdk-headless", "mvn": "maven"}
    SOURCE = Path(__file__).parent / "mongo_java"

    def __init__(self, jars: Path) -> None:
        super().__init__()
        self.jars = jars.absolute()

    @property
    def version(self) -> str:
        """The version of the jars that are there."""
        prefix = "mongo-java-server-"
        found = [path.stem.removeprefix(prefix) for path in self.jars.glob(f"{prefix}*.jar")]
        return next((name for name in found if name[0].isdigit()), "")

    def command(self) -> Sequence[str | Path]:
        classes = f"{self.jars}/*"
        return [self.find("java"), "-cp", classes, self.SOURCE / "Main.java", str(self.port)]

    def _before(self) -> None:
        if self.version:
            return
        fetch = ["dependency:copy-dependencies", f"-DoutputDirectory={self.jars}"]
        pom = str(self.SOURCE / "pom.xml")
        done = subprocess.run(
            [self.find("mvn"), "--batch-mode", "--quiet", "--file", pom, *fetch],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode or not self.version:
            raise ServerBroken(
                f"Maven did not fetch mongo-java-server into {self.jars} (its mirrors and proxies "
                f"are those of ~/.m2/settings.xml):\n{done.stdout[-2000:]}"
            )


def refusal(code: int, text: str = "not primary") -> Callable[[bytes], bytes]:
    """MongoDB's refusal of a command, for `Proxy.answer_next`; 10107 is NotWritablePrimary."""

    def answer(request: bytes) -> bytes:
        (number,) = struct.unpack_from("<i", request, 4)
        said = text.encode() + b"\0"
        fields = b"\x01ok\0" + struct.pack("<d", 0.0) + b"\x10code\0" + struct.pack("<i", code)
        fields += b"\x02errmsg\0" + struct.pack("<i", len(said)) + said + b"\0"
        body = b"\0\0\0\0\0" + struct.pack("<i", len(fields) + 4) + fields
        return struct.pack("<iiii", 16 + len(body), 1, number, OP_MSG) + body

    return answer


#: The kinds by name, the best first.
KINDS: Mapping[str, type[MongoServer]] = {"mongod": MongoServer, "mongo-nx": NxServer}


def best_kind() -> str:
    """The first kind that is installed; the last one if none is."""
    for name, kind in KINDS.items():
        try:
            kind.check_installed()
        except ServerMissing:
            continue
        return name
    return list(KINDS)[-1]
