"""Command that prints the completion script of a shell, made from the parsers of the commands.

shtab makes it. It is needed for this command alone; the script needs nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from machinery_py.cli.commands import COMMANDS
from machinery_py.cli.main import add_options, main_parser
from machinery_py.errors import ArgumentError, ConfigError, nearest

SHELLS = ("bash", "zsh", "fish")


def completion(args: argparse.Namespace) -> int:
    """Run `machinery completion`."""
    shell = args.rest[0]
    if shell not in SHELLS:
        known = ", ".join(SHELLS)
        raise ArgumentError(
            f"no completion for shell {shell!r}{nearest(shell, SHELLS)} (known: {known})"
        )
    try:
        import shtab
    except ImportError as error:
        raise ConfigError(
            "machinery completion needs shtab: pip install 'machinery_py[completion]'"
        ) from error
    print(shtab.complete(whole_parser(), shell))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """Return the parser of `machinery` with the options of all commands."""
    parser = main_parser()
    for name, one in _below(parser):
        if name in COMMANDS:
            add_options(one, COMMANDS[name])
    return parser


def _below(
    parser: argparse.ArgumentParser, before: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, one in action.choices.items():
                yield before + name, one
                yield from _below(one, f"{before}{name} ")
