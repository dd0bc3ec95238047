"""`machinery`: from the words on the command line to a command and its exit code.

0    done, or as asked
1    the answer is no: a task failed, no worker is alive, something is wrong; a worker: it was cut
     short by a second signal
2    it cannot be done as asked: wrong words, no such app, a wrong setting, no such task
3    the broker or the result backend cannot be used
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NoReturn, cast

from machinery_py.cli.commands import COMMANDS, GROUPS, MODULE_OF, SECTIONS, Command, split_words
from machinery_py.config.urls import redact, redact_words
from machinery_py.connections import streams
from machinery_py.errors import (
    BackendUnavailable,
    BrokerUnavailable,
    MachineryError,
    PublishRefused,
    PublishUnknown,
    StoreUnusable,
    nearest,
)
from machinery_py.version import __version__

PROGRAM = "machinery"
DONE, WRONG, UNUSABLE = 0, 2, 3
INTERRUPTED = 130  # as shells tell of a program that Ctrl+C has ended

NO_APP = "-"  # stands for the app of a command that takes none
SHORTEST_HINTED = 2  # letters of a word; a longer one may be a known one, misspelt

STORE_TROUBLE = (PublishRefused, PublishUnknown, BackendUnavailable, StoreUnusable)

_MAIN_EXAMPLES = (
    "worker tasks               run the tasks of tasks.py",
    "send tasks add 20 22 --wait",
    "queues tasks",
    "worker tasks --help        options and examples of a command",
)
_APP_VARIABLE = (
    "\n  MACHINERY_APP=tasks                  in the environment: stands in for the first argument"
)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all of ours."""

    def error(self, message: str) -> NoReturn:
        _complain(f"machinery: {redact_words(message)} (see: {self.prog} --help)", WRONG)
        raise SystemExit(WRONG)


def main(argv: Sequence[str] | None = None, *, program: str = PROGRAM) -> int:
    """Run a command, and return its exit code.

    Args:
        program: how it was started, for help. One that is not `machinery` has put the app into
            `argv` itself, and its users name none.
    """
    streams.open_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for terminals that lack a character
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(words, program)
        sys.stdout.flush()
        return code
    except MachineryError as error:
        trace = getattr(error, "trace", "")
        return _complain(
            f"{trace}machinery: {error}", UNUSABLE if isinstance(error, STORE_TROUBLE) else WRONG
        )
    except OSError as error:
        # One of a socket is no answer to anything.
        if isinstance(error, BrokenPipeError) and streams.is_unread(streams.OUT):
            return DONE
        if error.errno in streams.CANNOT_WRITE and error.filename is None:
            return _complain(f"machinery: the output cannot be written: {error.strerror}", WRONG)
        raise
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:  # argparse: help and version, or a usage error
        return end.code if isinstance(end.code, int) else DONE
    finally:
        streams.finish()


def _complain(text: str, code: int) -> int:
    """Write the text to stderr, and return the code."""
    with suppress(OSError):  # the code is left
        sys.stdout.flush()
        sys.stderr.write(text.rstrip("\n") + "\n")
    return code


def _run(words: list[str], program: str) -> int:
    command, rest = _command(words)
    if command is None:
        parser = main_parser(program)
        if not words:
            parser.print_help()
            return WRONG
        if name := _unknown_command(words):
            parser.error(name)
        parser.parse_args(words)  # help, version, or a wrong option
        parser.error("no command named")
    parser = command_parser(command, program)
    args, extra = parser.parse_known_intermixed_args(rest)
    if extra:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        parser.error(unknown("option", extra[0].partition("=")[0], flags))
    app, given = os.environ.get("MACHINERY_APP", "").strip(), args.words
    if not command.takes_app:
        app, given = "", [NO_APP, *given]
    try:
        args.app, args.rest = split_words(given, app, least=command.least, most=command.most)
    except ValueError as error:
        # Of a group that is a command itself the misspelt word is taken for the app.
        hint = nearest(args.words[0], members(command.name)) if args.words else ""
        parser.error(f"{error}{hint}")
    args.argv = rest
    try:
        return _call(command, args)
    except (BrokerUnavailable, BackendUnavailable) as error:
        text = str(error)
        doctor = f"{program} doctor" + (f" {args.app}" if program == PROGRAM else "")
        hint = "" if text.endswith(")") else f" (is it running? {doctor})"
        return _complain(f"machinery: {text}{hint}", UNUSABLE)


def _command(words: Sequence[str]) -> tuple[Command | None, list[str]]:
    if list(words[1:2]) == ["list"] and words[0] in GROUPS:
        return COMMANDS[words[0]], list(words[2:])
    for length in (2, 1):
        command = COMMANDS.get(" ".join(words[:length]))
        if command is not None and len(words) >= length:
            return command, list(words[length:])
    return None, []


def _unknown_command(words: Sequence[str]) -> str:
    """Return what is wrong with the words if they begin with no command; else ""."""
    first = words[0]
    return "" if first.startswith("-") else unknown("command", first, COMMANDS)


def members(group: str) -> list[str]:
    """Return the commands of a group, without its name; `list` is the group itself."""
    below = [name.removeprefix(f"{group} ") for name in COMMANDS if name.startswith(f"{group} ")]
    return below and ["list", *below]


def unknown(what: str, word: str, known: Iterable[str]) -> str:
    """Return the error text for a word that is no command, or no option.

    The word is masked if it may be a URL: somebody may have left out the command in front of it.
    """
    is_plain = word.replace("-", "").replace("_", "").isalnum()
    # Any two options of a letter are half the same.
    hint = nearest(word, known) if is_plain and len(word) > SHORTEST_HINTED else ""
    return f"no {what} is called {(word if is_plain else redact(word))!r}{hint}"


class _Sections(argparse.RawDescriptionHelpFormatter):
    """Shows the commands in their sections."""

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, argparse._SubParsersAction):
            return super()._format_action(action)
        shown: dict[str, str] = {}
        self._indent()
        for one in action._choices_actions:
            shown[one.dest] = super()._format_action(one)
        self._dedent()
        sections = (
            f"  {name}:\n{''.join(map(shown.__getitem__, of))}" for name, of in SECTIONS.items()
        )
        return "\n".join(sections)


class _Version(argparse.Action):
    """Prints the versions of the package, Python and the libraries that it needs."""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        import platform  # only who asks pays

        from machinery_py.cli import apps

        python = f"{platform.python_implementation()} {platform.python_version()}"
        print(f"machinery {__version__}\n{python} on {platform.system()} {platform.machine()}")
        for name, version in apps.library_versions().items():
            print(name, version or "is missing")
        raise SystemExit(DONE)


def _call(command: Command, args: argparse.Namespace) -> int:
    # By name, so that no command pays for the imports of another.
    module = importlib.import_module(f"machinery_py.cli.{MODULE_OF[command.name]}")
    function = cast("Callable[..., int]", getattr(module, command.name.replace(" ", "_")))
    if not command.opens_app:
        return function(args)
    from machinery_py.cli import apps, logs

    logs.configure_short()
    return function(apps.load(args.app, args.app_dir, command=command.name), args)


def main_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Return the parser of `machinery` itself: help, version, and errors of unknown commands."""
    parser = _Parser(
        prog=program,
        description="Run background tasks, send them and inspect them.",
        epilog=_examples(_MAIN_EXAMPLES, program) + (_APP_VARIABLE if program == PROGRAM else ""),
        formatter_class=_Sections,
    )
    help = "tell the versions of the package, Python and its libraries"
    parser.add_argument("--version", action=_Version, nargs=0, help=help)
    kinds = parser.add_subparsers(metavar="COMMAND", title="commands")
    groups: dict[str, argparse._SubParsersAction[_Parser]] = {}
    for command in COMMANDS.values():
        group, _, name = command.name.rpartition(" ")
        if not group:
            if name not in GROUPS:  # else it is listed as its group
                kinds.add_parser(name, help=command.help, add_help=False)
            continue
        if group not in groups:
            members = [one for one in COMMANDS.values() if one.name.startswith(f"{group} ")]
            inner = kinds.add_parser(
                group,
                help=GROUPS[group],
                prog=f"{program} {group}",
                formatter_class=argparse.RawDescriptionHelpFormatter,
                epilog=_examples([line for one in members for line in one.example_lines], program),
            )
            groups[group] = inner.add_subparsers(metavar="COMMAND", title="commands", required=True)
        groups[group].add_parser(name, help=command.help, add_help=False)
    return parser


def command_parser(command: Command, program: str = PROGRAM) -> argparse.ArgumentParser:
    """Return the parser of one command."""
    app = "APP" if command.takes_app and program == PROGRAM else ""
    usage = " ".join(filter(None, (program, command.name, app, command.words, "[option …]")))
    parser = _Parser(
        prog=f"{program} {command.name}",
        usage=usage,
        description=command.help,
        epilog=_below(command.name, program) + _examples(command.example_lines, program),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar=app or command.words,
        help="MODULE or MODULE:OBJECT of your Server; MACHINERY_APP stands in for it"
        if app
        else (None if command.words else argparse.SUPPRESS),
    )
    add_options(parser, command)
    return parser


def _below(name: str, program: str) -> str:
    """Return what help says of the commands below one."""
    some = [one for one in COMMANDS.values() if one.name.startswith(f"{name} ")]
    width = max((len(one.name) for one in some), default=0)
    lines = (f"  {program} {one.name:{width}}  {one.help}\n" for one in some)
    return f"more:\n{''.join(lines)}\n" if some else ""


def add_options(parser: argparse.ArgumentParser, command: Command) -> None:
    """Give a parser the options of the command."""
    for flags, settings in command.all_options:
        parser.add_argument(*flags, **settings)


def _examples(lines: Sequence[str], program: str) -> str:
    """Return the examples of the help; they name no app, if the program has one of its own."""
    if program != PROGRAM:
        lines = [re.sub(r"\btasks ?", "", line, count=1) for line in lines if ":server" not in line]
    return "examples:\n" + "\n".join(f"  {program} {line}".rstrip() for line in lines)
