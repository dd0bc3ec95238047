"""Run the tests on other Pythons and servers, in minimal Debian roots: `make platforms`.

    python -m tests.platforms                 all of them, half an hour on two cores
    python -m tests.platforms python3.15      one
    python -m tests.platforms lowest newest mongo-java
                                              without a root: this Python, other packages
    python -m tests.platforms --tests tests/worker/test_executors.py

Debootstrap makes a root once (two minutes) in `.platforms/`, or where MACHINERY_PLATFORMS says, and
later runs use it again; each copies the checkout into it and installs it anew. The tests run there
with their own processes and mounts, which end with them. Needs root's rights and debootstrap, and
takes packages from the mirror that this machine's apt uses. The platforms "lowest" and "newest" are
virtual environments of this Python: with the lowest versions of the packages that setup.cfg allows,
and with the newest that there are. "mongo-java" is one too, with the lowest pymongo: it runs
MongoDB's tests on mongo-java-server, which needs a JDK and Maven.
The table of docs/reference/platforms.md is written by a run of everything.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.private import ServerMissing
from tests.support.private_mongo import JavaServer

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "platforms.md"
ROOTS = Path(os.environ.get("MACHINERY_PLATFORMS", ROOT / ".platforms"))
BEGIN, END = "<!-- measured: platforms -->", "<!-- end -->"
HEAD = (
    "platform",
    "Python",
    "Redis",
    "RabbitMQ",
    "memcached",
    "PostgreSQL",
    "MongoDB",
    "tests",
    "passed",
    "failed",
    "left out",
)

FAST = (
    "tests/config",
    "tests/contrib",
    "tests/control",
    "tests/inspection",
    "tests/limits",
    "tests/models",
    "tests/registry",
    "tests/results",
    "tests/schedules",
    "tests/tasks",
    "tests/values",
    "tests/wire",
    "tests/worker",
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/test_*.py")),
    # Of its page `make test` alone: Chromium would double a root.
    "tests/dashboard",
    "--ignore-glob=tests/dashboard/test_pages*",
)
SYSTEM = ("tests/cli", "tests/system", "tests/testing")
STORES = ("tests/backends", "tests/brokers", "tests/connections", "tests/locks", "tests/stores")
REDIS = (*STORES, "-k", "redis or cluster")

#: Linters look at the text, which is the same on every Python; tests run ruff, too.
LINTERS = frozenset(("mypy", "pyright", "types-PyYAML"))
#: The stand-in for MongoDB works on Pythons that its metadata does not name yet.
UNNAMED = "nx-27017"

THIS = f"python{sys.version_info.major}.{sys.version_info.minor}"

PACKAGES = (
    "ca-certificates",
    "gcc",
    "libc6-dev",
    "make",
    "openssl",
    "procps",
    "redis-server",
    "rabbitmq-server",
    "memcached",
    "nginx-light",
    "postgresql",
    "pgbouncer",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """One Python with the servers of one Debian release, or of this machine.

    Attributes:
        suite: of Debian; platforms of one suite share a root. "": of this machine.
        redis: the program that serves as Redis.
        mongo_java: whether the tests get a mongo-java-server as their MongoDB.
        selections: what pytest runs, a run each.
        without: packages of the extra `dev` that cannot be installed there.
    """

    name: str
    suite: str
    python: str
    selections: Sequence[Sequence[str]]
    redis: str = "redis-server"
    mongo_java: bool = False
    without: frozenset[str] = frozenset()

    @property
    def packages(self) -> list[str]:
        return [*PACKAGES, self.python, f"{self.python}-venv", f"{self.python}-dev"]


PLATFORMS = (
    Platform(
        name="python3.13", suite="trixie", python="python3.13", selections=(FAST + SYSTEM + STORES,)
    ),
    Platform(
        name="valkey",
        suite="trixie",
        python="python3.13",
        redis="valkey-server",
        selections=(REDIS,),
    ),
    Platform(name="python3.14", suite="sid", python="python3.14", selections=(FAST + SYSTEM,)),
    Platform(
        name="valkey9",
        suite="sid",
        python="python3.14",
        redis="valkey-server",
        selections=(REDIS,),
    ),
    Platform(
        name="python3.15",
        suite="sid",
        python="python3.15",
        selections=(FAST + SYSTEM,),
        without=frozenset({"moto"}),  # a dependency of it wants a compiler there
    ),
    Platform(name="lowest", suite="", python=THIS, selections=(FAST + SYSTEM + STORES,)),
    Platform(name="newest", suite="", python=THIS, selections=(FAST + STORES,)),
    Platform(
        name="mongo-java",
        suite="",
        python=THIS,
        selections=(("--store=mongodb", "tests"),),
        mongo_java=True,
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.platforms",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names",
        nargs="*",
        help=f"of {', '.join(one.name for one in PLATFORMS)}; all if none is named",
    )
    parser.add_argument(
        "--tests", nargs=argparse.REMAINDER, help="run these instead, and leave the page as it is"
    )
    options = parser.parse_args(arguments)
    unknown = set(options.names) - {one.name for one in PLATFORMS}
    if unknown:
        parser.error(
            f"unknown platform {sorted(unknown)[0]!r} "
            f"(known: {', '.join(one.name for one in PLATFORMS)})"
        )
    chosen = [one for one in PLATFORMS if not options.names or one.name in options.names]
    in_roots = any(one.suite for one in chosen)
    if in_roots and os.geteuid() != 0:
        parser.error(
            "making and entering a Debian root asks for root's rights: sudo make platforms"
        )
    if in_roots and shutil.which("debootstrap") is None:
        parser.error("debootstrap is missing: apt-get install debootstrap")
    if any(one.mongo_java for one in chosen):
        try:
            JavaServer.check_installed()
        except ServerMissing as missing:
            parser.error(f"mongo-java: {missing}")

    rows: list[list[str]] = []
    for platform in chosen:
        selections = [options.tests] if options.tests else platform.selections
        rows.append(try_platform(platform, selections))
        print("\n| " + " | ".join(HEAD) + " |\n| " + " | ".join(rows[-1]) + " |\n", flush=True)
    if not options.tests:
        PAGE.write_text(with_rows(PAGE.read_text(), rows))
    failed = sum(int(row[HEAD.index("failed")]) for row in rows)
    print(f"{len(rows)} platforms, {failed} tests failed")
    return 1 if failed or not all(int(row[HEAD.index("passed")]) for row in rows) else 0


def try_platform(platform: Platform, selections: Sequence[Sequence[str]]) -> list[str]:
    """Make what is missing, run the tests, and return a row of the table."""
    print(f"=== {platform.name}", flush=True)
    root = make_root(platform) if platform.suite else ROOTS / platform.name
    copy_checkout(root)
    install(root, platform)
    counts = [0, 0, 0]
    with contextlib.ExitStack() as stack:
        given, mongodb = "", ""
        if platform.mongo_java:
            server = stack.enter_context(JavaServer(root / "jars"))
            given, mongodb = server.url, f"mongo-java-server {server.version}"
        for selection in selections:
            for place, count in enumerate(run_tests(root, platform, selection, mongodb=given)):
                counts[place] += count
    words = [word for one in selections for word in one if not word.startswith("--ignore")]
    said = " ".join(dict.fromkeys(words)).replace("tests/", "")
    found = versions(root, platform)
    return [platform.name, *found, mongodb or stand_in(root, platform), said, *map(str, counts)]


def make_root(platform: Platform) -> Path:
    """Return the platform's root, with its packages."""
    root = ROOTS / platform.suite
    if not (root / "etc" / "debian_version").exists():
        ROOTS.mkdir(parents=True, exist_ok=True)
        half_made = ROOTS / f"{platform.suite}.new"
        shutil.rmtree(half_made, ignore_errors=True)
        subprocess.run(
            ["debootstrap", "--variant=minbase", platform.suite, half_made, mirror()], check=True
        )
        # The mirror's rolling release may be some weeks old, and its date says so.
        (half_made / "etc/apt/apt.conf.d/90platforms").write_text(
            'Acquire::Check-Valid-Until "false";\n'
        )
        policy = half_made / "usr/sbin/policy-rc.d"  # no service is started by its package
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
        half_made.rename(root)
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    packages = [*platform.packages, platform.redis]
    enter(
        root,
        "export DEBIAN_FRONTEND=noninteractive; dpkg -s $0 $@ >/dev/null 2>&1 ||"
        " { apt-get -q update && apt-get -q -y install --no-install-recommends $0 $@; }",
        *packages,
    )
    if (
        certificates.exists()
    ):  # the package index may be behind an authority that only this machine knows
        shutil.copy(certificates, root / certificates.relative_to("/"))
    return root


def mirror() -> str:
    """Return the address from which this machine takes Debian's own packages."""
    done = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Origin: Debian"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return next(line for line in done.stdout.splitlines() if "security" not in line)


def copy_checkout(root: Path) -> None:
    """Copy what git knows and does not ignore to /src/machinery; shared data beside it."""
    target = root / "src" / "machinery"
    shutil.rmtree(target.parent, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    shared = ROOT.parent / "shared"
    if shared.is_dir():
        shutil.copytree(shared, target.parent / "shared")


def install(root: Path, platform: Platform) -> None:
    """Make venv-<python> in the root, with the checkout and what its tests need."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    wanted = [
        line.strip() for line in setup["options.extras_require"]["dev"].splitlines() if line.strip()
    ]
    left_out = LINTERS | platform.without
    wanted = [line for line in wanted if _name_in(line) not in left_out]
    unnamed = [line for line in wanted if line.startswith(UNNAMED)]
    base = "" if platform.suite else str(root.absolute())
    python = platform.python if platform.suite else sys.executable
    venv = f"{base}/venv-{platform.python}"
    enter(root, f"test -d {venv} || {python} -m venv {venv}")
    pip = f"cd {base}/src/machinery && {venv}/bin/python -m pip install -q"
    enter(root, f"{pip} --upgrade pip setuptools")
    enter(root, f'{pip} --editable . "$0" "$@"', *(line for line in wanted if line not in unnamed))
    enter(root, f'{pip} --ignore-requires-python "$0" "$@"', *unnamed)
    if not platform.suite:
        enter(root, f'{pip} --upgrade "$0" "$@"', *clients(setup, platform.name))


def clients(setup: configparser.ConfigParser, which: str) -> list[str]:
    """Return the packages that the package itself needs, in the lowest version or the newest."""
    needed = [line for line in setup["options"]["install_requires"].split("\n") if ">=" in line]
    if which == "newest":
        return [_name_in(line) for line in needed]
    if which == "mongo-java":
        needed = [line for line in needed if line.startswith("pymongo")]
    return [line.partition(",")[0].replace(">=", "==") for line in needed]


def _name_in(requirement: str) -> str:
    return re.split(r"[\[<>=; ]", requirement, maxsplit=1)[0]


def run_tests(
    root: Path, platform: Platform, selection: Sequence[str], *, mongodb: str
) -> tuple[int, int, int]:
    """Run pytest in the root; return how many passed, failed and were left out.

    Args:
        mongodb: the URL of the server for its tests; "": they start one.
    """
    report = root / "src" / "report.xml"
    # The platform's server gets the names that the tests look for, so that they run it as Redis.
    if platform.suite:
        link = 'mkdir -p /redis && ln -sf "$(command -v "$0")" /redis/redis-server'
        enter(root, link, platform.redis)
    base = "" if platform.suite else str(root.absolute())
    venv = f"{base}/venv-{platform.python}"
    enter(
        root,
        f"cd {base}/src/machinery && export MACHINERY_TEST_MONGODB_URL={mongodb} && "
        f"CI=true PATH={base}/redis:{venv}/bin:$PATH "
        f"{venv}/bin/python -m pytest -q -n 2 --dist worksteal "
        # Bash stays: as process 1 of the root it reaps what the tests leave behind.
        f'--junitxml {base}/src/report.xml "$0" "$@"; exit $?',
        *selection,
        check=False,
    )
    if not report.exists():
        return 0, 1, 0
    [suite] = ElementTree.parse(report).getroot().iter("testsuite")
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped = int(suite.get("skipped", 0))
    return int(suite.get("tests", 0)) - failed - skipped, failed, skipped


def versions(root: Path, platform: Platform) -> list[str]:
    """Return the versions of Python, Redis, RabbitMQ, memcached and PostgreSQL in the root."""
    asked = enter(
        root,
        f"""
        {platform.python} -c 'import platform; print(platform.python_version())'
        {platform.redis} --version | sed 's/^\\(Redis\\|Valkey\\) server v=\\([0-9.]*\\).*/\\1 \\2/'
        for one in rabbitmq-server memcached; do
            dpkg-query -W -f '${{Version}}\\n' $one | sed 's/-.*//'
        done
        for newest in /usr/lib/postgresql/*/bin/postgres; do :; done
        $newest --version | awk '{{print $3}}'
    """,
        capture=True,
    )
    return asked.splitlines()


def stand_in(root: Path, platform: Platform) -> str:
    """Return the name and version of what serves as MongoDB in the root."""
    base = "" if platform.suite else str(root.absolute())
    program = (
        "from importlib.metadata import version; import sys; print(*sys.argv[1:],"
        " version(sys.argv[1]))"
    )
    python = f"{base}/venv-{platform.python}/bin/python"
    return enter(root, f'{python} -c "$0" {UNNAMED}', program, capture=True).strip()


def enter(root: Path, script: str, *words: str, check: bool = True, capture: bool = False) -> str:
    """Run a script in the root, with its own mounts and processes; return what it printed.

    Of what is no root it is run as any other program.
    """
    inner = (
        'mount --rbind /dev "$0/dev" && mount -t proc proc "$0/proc" && '
        'mount -t tmpfs tmp "$0/tmp" && exec chroot "$@"'
    )
    clean = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
    # All of it ends with this process, however that ends.
    alone = [
        "setpriv",
        "--pdeathsig",
        "KILL",
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
    ]
    entered = [*alone, "sh", "-c", inner, root, root] if (root / "etc").exists() else []
    done = subprocess.run(
        [*entered, "bash", "-c", script, *words],
        check=check,
        text=True,
        stdout=subprocess.PIPE if capture else None,
        env=(clean if entered else dict(os.environ)) | proxies(),
    )
    return done.stdout if capture else ""


def proxies() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.lower() in ("http_proxy", "https_proxy", "no_proxy")
    }


def with_rows(page: str, rows: Sequence[Sequence[str]]) -> str:
    """Return the page with these rows in its table; rows of platforms that were not tried stay."""
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    known = {row[0]: row for row in map(cells, table.splitlines()) if len(row) == len(HEAD)}
    known |= {row[0]: list(row) for row in rows}
    lines = [known[one.name] for one in PLATFORMS if one.name in known]
    drawn = [
        "| " + " | ".join(HEAD) + " |",
        "|---" * len(HEAD) + "|",
        *("| " + " | ".join(line) + " |" for line in lines),
    ]
    return before + BEGIN + "\n" + "\n".join(drawn) + "\n" + END + after


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


if __name__ == "__main__":
    sys.exit(main())
