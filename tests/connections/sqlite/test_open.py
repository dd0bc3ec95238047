"""The file of the SQLite stores: its rights, its faults, and what is refused."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from machinery_py.backends.base import Rider
from machinery_py.backends.sqlite.backend import SQLiteBackend
from machinery_py.brokers.base import Message
from machinery_py.brokers.sqlite.broker import SQLiteBroker
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.connections.sqlite.open import network_kind
from machinery_py.errors import ConfigError, PublishRefused, StoreUnusable
from machinery_py.limits.rows import RowsLimits
from machinery_py.rows.sqlite import SQLiteRows
from tests.stores.sqlite.case import driver, integrity, message, path, queues
from tests.support.disks import small_disk
from tests.support.sqlite_versions import make_first_version

__all__ = ["driver", "path"]


def test_nothing_is_opened_before_the_first_use(path: Path) -> None:
    driver = SQLiteDriver(path)
    SQLiteBroker(driver)
    driver.close()

    assert not path.exists()


def test_the_file_is_for_its_owner_alone(driver: SQLiteDriver, path: Path) -> None:
    SQLiteBroker(driver).consume(["q"], worker="w").receive(1, 0.01)

    for name in ("machinery.db", "machinery.db-wal", "machinery.db-shm"):
        assert (path.parent / name).stat().st_mode & 0o777 == 0o600, name
    for name in ("machinery.db-sessions", "machinery.db-bells"):
        assert (path.parent / name).stat().st_mode & 0o777 == 0o700, name


def test_a_newer_schema_is_refused(driver: SQLiteDriver, path: Path) -> None:
    with driver.transaction() as connection:
        connection.execute("PRAGMA user_version = 12")
    driver.close()

    with pytest.raises(StoreUnusable, match=r"newer machinery_py \(schema 12, this one knows 11\)"):
        queues(driver)


def test_a_file_of_the_first_version_is_brought_up_to_date(path: Path) -> None:
    make_first_version(path)
    again = SQLiteDriver(path)
    assert SQLiteBackend(again).claims(["a"]) == [None]
    assert SQLiteBackend(again).amend(Rider(name="a", expected=None, body=b"1"))
    assert SQLiteBackend(again).records().bodies == {"a": b"1"}
    assert SQLiteBackend(again).get_states(["t"]) == {}
    subscription = SQLiteBroker(again).subscribe("t")
    SQLiteBroker(again).broadcast("t", [b"x"], ttl=9.0)
    assert subscription.read(0.0) == [b"x"]
    assert RowsLimits(SQLiteRows(again)).read() == []
    fair = [
        Message(uuid=one, name="n", queue="q", body=b"x", tenant=one[0])
        for one in ("a1", "a2", "b1")
    ]
    SQLiteBroker(again).put(fair, token="")
    assert [one.uuid for one in SQLiteBroker(again).pending("q", 9)] == ["a1", "b1", "a2"]
    again.close()


def test_another_programs_database_is_refused(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE customers (name)")
    connection.close()

    with pytest.raises(StoreUnusable, match="belongs to another program"):
        queues(SQLiteDriver(path))


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    path.write_bytes(b"no database at all" * 100)

    with pytest.raises(StoreUnusable, match="is no SQLite database"):
        queues(SQLiteDriver(path))
    assert path.read_bytes() == b"no database at all" * 100


def test_damage_is_told(driver: SQLiteDriver, path: Path) -> None:
    broker = SQLiteBroker(driver)
    broker.put([message(number, 500) for number in range(1000)], token="")
    driver.close()
    with path.open("r+b") as file:
        file.seek(4096 * 20)
        file.write(b"\xff" * 4096 * 60)

    with pytest.raises(StoreUnusable, match=f"{path.name}.*damaged"):
        broker.pending("q", 1000)
    with pytest.raises(StoreUnusable):
        broker.purge("q")


@pytest.mark.parametrize("name", ["missing/machinery.db", "file/machinery.db", "folder"])
def test_a_place_where_no_file_can_be_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()

    with pytest.raises(StoreUnusable, match=str(tmp_path)) as caught:
        SQLiteBroker(SQLiteDriver(tmp_path / name)).put([message()], token="")
    assert isinstance(caught.value, PublishRefused)


def test_an_unknown_durability_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="synchronous"):
        SQLiteDriver(path, synchronous="OFF; DROP TABLE tasks")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("what", ["file", "folder"])
def test_read_only_file_or_folder_is_reported(tmp_path: Path, what: str) -> None:
    folder = Path("/dev/shm") / f"machinery-{os.getpid()}-{what}"
    folder.mkdir()
    path = folder / "machinery.db"
    try:
        if what == "file":
            SQLiteBroker(SQLiteDriver(path)).put([message()], token="")
            path.chmod(0o444)
        folder.chmod(0o777 if what == "file" else 0o755)
        script = (
            "import sys; sys.path.insert(0, sys.argv[2])\n"
            "from machinery_py.brokers.sqlite.broker import SQLiteBroker, SQLiteDriver\n"
            "from machinery_py.brokers.base import Message\n"
            "from machinery_py.errors import PublishRefused, StoreUnusable\n"
            "import os; os.setuid(65534)\n"
            "one = Message(uuid='', name='', queue='q', body=b'')\n"
            "try: SQLiteBroker(SQLiteDriver(sys.argv[1])).put([one], token='')\n"
            "except StoreUnusable as error: print(isinstance(error, PublishRefused), error)\n"
        )
        root = str(Path(__file__).parents[3])
        command = [sys.executable, "-c", script, str(path), root]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert found.stdout.startswith("True"), found.stderr
        assert "right" in found.stdout
    finally:
        shutil.rmtree(folder)


def test_a_full_disk_refuses_and_harms_nothing(driver: SQLiteDriver, path: Path) -> None:
    broker = SQLiteBroker(driver)
    broker.put([message(0)], token="")
    with driver.transaction() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages + 10}")

    with pytest.raises(StoreUnusable, match="no space is left") as caught:
        broker.put([message(number, 3000) for number in range(1, 500)], token="t")
    assert isinstance(caught.value, PublishRefused)
    assert [one.uuid for one in broker.pending("q", 10)] == ["task_0"]

    with driver.transaction() as connection:
        connection.execute("PRAGMA max_page_count = 1000000")
    assert broker.put([message(number, 3000) for number in range(1, 500)], token="t") is True
    assert len(broker.pending("q", 1000)) == 500
    assert integrity(path) == "ok"


def test_a_full_tmpfs_refuses_and_harms_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        broker = SQLiteBroker(SQLiteDriver(disk / "machinery.db"))
        accepted = 0
        with pytest.raises(PublishRefused, match=r"no space is left|disk does not work") as caught:
            for number in range(2000):
                broker.put([message(number, 3000)], token=f"t{number}")
                accepted += 1
        assert isinstance(caught.value, StoreUnusable)
        assert 0 < accepted < 2000
        assert len(broker.pending("q", 5000)) == accepted
        broker.driver.close()


@pytest.mark.parametrize("is_opened_anew", [False, True])
def test_log_that_filled_a_small_disk_is_cut_when_there_is_room(
    tmp_path: Path, is_opened_anew: bool
) -> None:
    """The log is cut at CHECKPOINT pages, which this disk never holds."""
    with small_disk(tmp_path / "disk", 2) as disk:
        (disk / "ballast").write_bytes(bytes(400_000))
        broker = SQLiteBroker(SQLiteDriver(disk / "machinery.db"))
        accepted = 0
        with pytest.raises(StoreUnusable):
            for number in range(9999):
                broker.put([message(number, 3000)], token=f"t{number}")
                accepted += 1
        if is_opened_anew:  # a process that has not seen how it came
            broker = SQLiteBroker(SQLiteDriver(disk / "machinery.db"))

        (disk / "ballast").unlink()
        refused = 0
        for number in range(300):  # together they write several times as much as there is room
            try:
                broker.put([message(number, 3000)], token="")
                broker.purge("q")
            except StoreUnusable:
                refused += 1

        assert refused <= 1  # it may be refused once, and finds out why
        assert accepted > 10
        assert integrity(disk / "machinery.db") == "ok"
        broker.driver.close()


@pytest.mark.parametrize("what", ["deleted", "replaced"])
def test_a_file_that_is_gone_is_noticed(driver: SQLiteDriver, path: Path, what: str) -> None:
    broker = SQLiteBroker(driver)
    broker.put([message()], token="")
    if what == "replaced":
        shutil.copy(path, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
    else:
        path.unlink()

    for use in (
        broker.tend,
        lambda: broker.put([message()], token=""),
        lambda: broker.pending("q", 1),
    ):
        with pytest.raises(StoreUnusable, match=what):
            use()
    assert path.exists() is (what == "replaced")


def test_a_log_without_its_file_is_not_taken_for_a_new_file(
    driver: SQLiteDriver, path: Path
) -> None:
    SQLiteBroker(driver).put([message()], token="")
    path.rename(path.with_suffix(".away"))

    with pytest.raises(StoreUnusable, match="its log"):
        queues(SQLiteDriver(path))

    assert not path.exists()


def test_network_file_systems_are_known(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/sda / ext4 rw 0 0\n"
        "server:/x /mnt/my\\040share nfs4 rw 0 0\ntmpfs /mnt/my\\040share/local tmpfs rw 0 0\n"
        "//smb/x /data cifs rw 0 0\nbroken\n"
    )
    kinds = {
        name: network_kind(name, str(mounts))
        for name in (
            "/a.db",
            "/mnt/my share/a.db",
            "/mnt/my share/local/a.db",
            "/data/x/a.db",
            "/database/a.db",
        )
    }
    assert kinds == {
        "/a.db": "",
        "/mnt/my share/a.db": "nfs4",
        "/mnt/my share/local/a.db": "",
        "/data/x/a.db": "cifs",
        "/database/a.db": "",
    }
    assert network_kind("/data/a.db", str(tmp_path / "no such list")) == ""
