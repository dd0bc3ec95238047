"""Which commands there are: what they take, their options, their examples, and the function behind each.

A command's words are not told apart by argparse: with MACHINERY_APP set, the first of them need not be the app (`split_words`).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from machinery_py.errors import ConfigError
from machinery_py.queues import parse_queues

LONGEST = 36_500 * 86_400.0  # seconds; the clocks of most stores end some time
MOST = 1_000_000_000  # of anything

Options = Callable[[argparse.ArgumentParser], None]

_UNITS = {
    "": 1.0,
    "ms": 0.001,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 604800.0,
}
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)(ms|s|min|m|h|d|w|)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command.

    Attributes:
        target: `file:function` under machinery_py.cli; called with the parsed arguments, returns the exit code.
        words: what follows the app, for the usage line.
        least, most: how many words; None is any number.
    """

    name: str
    help: str
    target: str
    examples: Sequence[str]
    words: str = ""
    least: int = 0
    most: int | None = 0
    options: Sequence[Options] = ()


def split_words(
    words: Sequence[str], app: str, *, least: int = 0, most: int | None = 0
) -> tuple[str, list[str]]:
    """(the app, the other words). `app`: what MACHINERY_APP says, or "".

    With MACHINERY_APP set the first word is the app only if there is one word more than the command takes, or, where it takes
    any number, if it is the same app.

    Raises:
        ValueError: there are too few or too many.
    """
    rest = list(words)
    if app:
        given = len(rest) > most if most is not None else len(rest) > least and rest[0] == app
        if given:
            app = rest.pop(0)
    elif rest:
        app = rest.pop(0)
    if not app:
        raise ValueError("which application? name the module of your Server, or set MACHINERY_APP")
    if len(rest) < least:
        raise ValueError("too few words")
    if most is not None and len(rest) > most:
        raise ValueError(f"too many words: {' '.join(rest[most:])}")
    return app, rest


def seconds(text: str) -> float:
    """A length of time: `90`, `1.5s`, `10m`, `1h`, `2d`."""
    found = _LENGTH.fullmatch(text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no length of time (expected for instance 90, 500ms, 10m, 1h, 2d)"
        )
    length = float(found[1]) * _UNITS[found[2]]
    if length > LONGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is too long (expected at most 36500d)")
    return length


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if (
            not text.isascii()
            or not text.isdigit()
            or len(text) > len(str(MOST))
            or not least <= int(text) <= MOST
        ):
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {MOST}")
        return int(text)

    return read


def _queues(text: str) -> tuple[str, ...] | dict[str, float]:
    try:
        return parse_queues(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 <= int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is no port (expected 0 to 65535)")
    return int(text)


# Options, in groups that commands share


def _app(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--app-dir",
        default="",
        metavar="DIR",
        help="folder to import the app from; default: the working directory",
    )


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _yes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")


def _limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit", type=_whole(1), default=50, metavar="N", help="at most so many; default: 50"
    )


def _filter(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default="", help="only tasks of this name")
    parser.add_argument(
        "--since",
        type=seconds,
        default=None,
        metavar="TIME",
        help="only tasks that changed in this time: 90 (seconds), 10m, 1h, 2d",
    )
    parser.add_argument("--queue", default="", help="only tasks of this queue")


def _word(text: str) -> str:
    from machinery_py.tasks.states import state_named  # only who names a state pays for it

    try:
        return state_named(text).value
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _state(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state",
        type=_word,
        default=None,
        metavar="STATE",
        help="pending, received, started, retry, success or failure",
    )


def _failure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state",
        type=_word,
        default="FAILURE",
        metavar="STATE",
        choices=("FAILURE",),
        help="failure: there is nothing else to retry",
    )


def _wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wait", action="store_true", help="wait for the result and print it")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=None,
        metavar="TIME",
        help="wait no longer than that: 90 (seconds), 10m; default: as long as it takes",
    )


def _send(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kw",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="an argument by name; may be repeated",
    )
    parser.add_argument("--queue", default="", help="instead of the task's own queue")
    parser.add_argument(
        "--delay", type=seconds, default=None, metavar="TIME", help="run it that much later"
    )


def _dead(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--queue", default="", help="only letters from this queue")


def _all(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--all", action="store_true", help="all dead letters, or with --queue all of that queue"
    )


def _worker(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "-c",
        "--concurrency",
        type=_whole(0),
        default=None,
        metavar="N",
        help="tasks at a time in each process; default: as configured, else two for each processor",
    )
    add(
        "-p",
        "--processes",
        type=_whole(1),
        default=1,
        metavar="N",
        help="worker processes; default: 1",
    )
    add(
        "-Q",
        "--queues",
        type=_queues,
        default=(),
        metavar="A,B",
        help="queues: strictly in this order, or A:6,B:1 by weights; default: as configured",
    )
    add(
        "-n",
        "--name",
        default="",
        metavar="NAME",
        help="name of the worker; default: host and process",
    )
    add(
        "--burst",
        action="store_true",
        help="end when the queues are empty; paused ones are not waited for",
    )
    add(
        "--reload",
        action="store_true",
        help="start again when a .py file changes (for development)",
    )
    add(
        "--no-scheduler",
        action="store_true",
        help="send nothing that schedules say; other workers do",
    )
    add(
        "--shutdown-timeout",
        type=seconds,
        default=None,
        metavar="TIME",
        help="how long running tasks may go on at the end; default: as configured, 30 s",
    )
    add(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="default: info",
    )
    add("--log-format", default="text", choices=("text", "json"), help="default: text")
    add("--no-banner", action="store_true", help="print nothing but logs")
    add(
        "--heartbeat-file",
        default="",
        metavar="FILE",
        help="where `machinery health` finds that this worker lives",
    )
    add(
        "--health-port",
        type=_port,
        default=None,
        metavar="PORT",
        help="answer HTTP at /live and /ready",
    )
    add(
        "--health-host",
        default="127.0.0.1",
        metavar="HOST",
        help="address for --health-port; default: 127.0.0.1",
    )
    # Between our own processes: see processes.py.
    add("--child", default="", help=argparse.SUPPRESS)
    add("--reloaded", type=int, default=None, help=argparse.SUPPRESS)


def _change(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--spec", default=None, help="when it is due: '0 6 * * MON-FRI', @daily, '@every 30s'")
    add("--tz", default=None, metavar="ZONE", help="zone of its times, for instance Europe/Berlin")
    add(
        "--catch-up",
        default=None,
        choices=("skip", "latest", "all"),
        help="what becomes of ticks that nobody was there for",
    )
    add(
        "--window",
        type=seconds,
        default=None,
        metavar="TIME",
        help="how far back latest and all look",
    )
    add(
        "--overlap",
        default=None,
        choices=("allow", "skip", "queue"),
        help="a tick while the run before it is not over",
    )


def _health(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--max-age",
        type=seconds,
        default=15.0,
        metavar="TIME",
        help="a heartbeat older than that is none; default: 15 s",
    )
    add(
        "--ready", action="store_true", help="also ask whether the broker answered at the last beat"
    )
    add(
        "--heartbeat-file", default="", metavar="FILE", help="the file that was given to the worker"
    )


COMMANDS: Mapping[str, Command] = {
    command.name: command
    for command in (
        Command(
            name="worker",
            target="work:worker",
            options=(_worker, _app),
            help="run tasks",
            examples=(
                "machinery worker tasks                      a module with one Server in it",
                "machinery worker shop.tasks:server          which one, if there are several",
                "machinery worker tasks -c 20                20 threads",
                "machinery worker tasks -p 4 -c 10           4 processes of 10 threads",
                "machinery worker tasks -Q high,default,low  strictly in this order",
                "machinery worker tasks -Q high:6,low:1      by weights: six claims in seven begin with high",
                "machinery worker tasks --reload             restart when a file changes (development)",
                "machinery worker tasks --burst              until the queues are empty",
            ),
        ),
        Command(
            name="send",
            target="act:send",
            words="TASK [ARGUMENT …]",
            least=1,
            most=None,
            options=(_wait, _send, _json, _app),
            help="send a task; arguments are JSON, or else strings",
            examples=(
                "machinery send tasks add 20 22 --wait",
                "machinery send tasks send_welcome ada@example.com --kw lang='\"fr\"' --delay 10m",
            ),
        ),
        Command(
            name="result",
            target="act:result",
            words="UUID",
            least=1,
            most=1,
            options=(_wait, _json, _app),
            help="the result of a task that was sent",
            examples=(
                "machinery result tasks task_0f6c",
                "machinery result tasks task_0f6c --wait --timeout 10s",
            ),
        ),
        Command(
            name="queues",
            target="look:queues",
            options=(_json, _app),
            help="queues, and how full they are",
            examples=("machinery queues tasks", "machinery queues tasks --json"),
        ),
        Command(
            name="tasks",
            target="look:tasks",
            options=(_state, _filter, _limit, _json, _app),
            help="tasks, the newest first",
            examples=(
                "machinery tasks tasks",
                "machinery tasks tasks --state failure --name charge --since 1h",
            ),
        ),
        Command(
            name="show",
            target="look:show",
            words="UUID",
            least=1,
            most=1,
            options=(_json, _app),
            help="all that is known of a task; the start of a UUID is enough",
            examples=("machinery show tasks task_0f6c",),
        ),
        Command(
            name="workers",
            target="look:workers",
            options=(_json, _app),
            help="the workers that live",
            examples=("machinery workers tasks",),
        ),
        Command(
            name="retry",
            target="act:retry",
            words="[UUID …]",
            most=None,
            options=(_failure, _filter, _yes, _json, _app),
            help="send failed tasks again",
            examples=(
                "machinery retry tasks task_0f6c",
                "machinery retry tasks --state failure --name charge --since 1h",
            ),
        ),
        Command(
            name="revoke",
            target="act:revoke",
            words="UUID …",
            least=1,
            most=None,
            options=(_yes, _json, _app),
            help="never start these tasks; ask those that run to stop",
            examples=("machinery revoke tasks task_0f6c",),
        ),
        Command(
            name="purge",
            target="act:purge",
            words="QUEUE",
            least=1,
            most=1,
            options=(_yes, _json, _app),
            help="delete what waits in a queue, delayed tasks too",
            examples=("machinery purge tasks mail",),
        ),
        Command(
            name="declare",
            target="act:declare",
            words="[QUEUE …]",
            most=None,
            options=(_json, _app),
            help="make what queues need on the server, when an application is deployed",
            examples=("machinery declare tasks", "machinery declare tasks machinery_tasks mail"),
        ),
        Command(
            name="pause",
            target="act:pause",
            words="QUEUE …",
            least=1,
            most=None,
            options=(_json, _app),
            help="take nothing from these queues until they are resumed; what runs goes on",
            examples=("machinery pause tasks mail", "machinery pause tasks mail reports"),
        ),
        Command(
            name="resume",
            target="act:resume",
            words="QUEUE …",
            least=1,
            most=None,
            options=(_json, _app),
            help="take from these queues again",
            examples=("machinery resume tasks mail",),
        ),
        Command(
            name="dead list",
            target="act:dead_list",
            options=(_dead, _limit, _json, _app),
            help="messages that nobody could deal with",
            examples=("machinery dead list tasks",),
        ),
        Command(
            name="dead show",
            target="act:dead_show",
            words="ID",
            least=1,
            most=1,
            options=(_json, _app),
            help="one dead letter, with its message",
            examples=("machinery dead show tasks 17",),
        ),
        Command(
            name="dead replay",
            target="act:dead_replay",
            words="[ID …]",
            most=None,
            options=(_all, _dead, _yes, _json, _app),
            help="put dead letters back into their queues",
            examples=(
                "machinery dead replay tasks 17",
                "machinery dead replay tasks --all --queue mail",
            ),
        ),
        Command(
            name="dead delete",
            target="act:dead_delete",
            words="[ID …]",
            most=None,
            options=(_all, _dead, _yes, _json, _app),
            help="delete dead letters",
            examples=("machinery dead delete tasks 17", "machinery dead delete tasks --all --yes"),
        ),
        Command(
            name="periodic",
            target="schedules:periodic",
            options=(_json, _app),
            help="schedules, with their last and next runs",
            examples=("machinery periodic tasks", "machinery periodic pause tasks digest"),
        ),
        Command(
            name="periodic pause",
            target="schedules:pause",
            words="NAME …",
            least=1,
            most=None,
            options=(_yes, _json, _app),
            help="send nothing until it is resumed, also after a restart",
            examples=("machinery periodic pause tasks digest",),
        ),
        Command(
            name="periodic resume",
            target="schedules:resume",
            words="NAME …",
            least=1,
            most=None,
            options=(_yes, _json, _app),
            help="send again, from now on",
            examples=("machinery periodic resume tasks digest",),
        ),
        Command(
            name="periodic run",
            target="schedules:run",
            words="NAME …",
            least=1,
            most=None,
            options=(_yes, _json, _app),
            help="send it once, now; its times stay",
            examples=("machinery periodic run tasks digest",),
        ),
        Command(
            name="periodic change",
            target="schedules:change",
            words="NAME",
            least=1,
            most=1,
            options=(_change, _json, _app),
            help="change a schedule, until the code that declares it changes",
            examples=(
                "machinery periodic change tasks digest --spec '30 6 * * *' --tz Europe/Berlin",
            ),
        ),
        Command(
            name="periodic remove",
            target="schedules:remove",
            words="NAME …",
            least=1,
            most=None,
            options=(_yes, _json, _app),
            help="forget a schedule that no code declares any more",
            examples=("machinery periodic remove tasks digest",),
        ),
        Command(
            name="config",
            target="look:config",
            options=(_json, _app),
            help="every setting, and where it comes from",
            examples=("machinery config tasks",),
        ),
        Command(
            name="doctor",
            target="doctor:doctor",
            options=(_json, _app),
            help="reachable? writable? clocks? versions?",
            examples=("machinery doctor tasks",),
        ),
        Command(
            name="health",
            target="health:health",
            options=(_health, _json, _app),
            help="whether a worker lives here, for probes; imports nothing of yours",
            examples=("machinery health tasks", "machinery health tasks --ready --max-age 30s"),
        ),
    )
}

GROUPS: Mapping[str, str] = {
    "dead": "dead letters: messages that nobody could deal with",
    "periodic": "schedules, with their last and next runs; pause, resume, run, change, remove",
}
