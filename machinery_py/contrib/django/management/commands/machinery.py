"""`manage.py machinery …`: the machinery command line, with the project's Server as its app."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

from machinery_py.cli.commands import COMMANDS
from machinery_py.cli.main import main

APP = "machinery_py.contrib.django.entry"
BACKEND = "DJANGO_MACHINERY_BACKEND"  # as in that module, which must not be imported too early


def with_app(words: Sequence[str], folder: str) -> list[str]:
    """Return the words of a `machinery` command with the project's Server behind its name."""
    for length in (2, 1):
        if " ".join(words[:length]) in COMMANDS:
            return [*words[:length], APP, "--app-dir", folder, *words[length:]]
    return list(words)  # help, version, or an unknown command


class Command(BaseCommand):
    """Hands its words on, and ends with the exit code of `machinery`."""

    help = "Runs a command of machinery with the tasks of this project: worker, send, queues …"
    requires_system_checks: tuple[()] = ()

    def run_from_argv(self, argv: list[str]) -> None:
        # Not Django's parser: it takes none of the options of `machinery`.
        ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for option in ("--settings", "--pythonpath"):  # Django has used them by now
            ours.add_argument(option)
        _, words = ours.parse_known_args(argv[2:])
        try:
            code = self._run(words)
        finally:
            connections.close_all()
        sys.exit(code)

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("words", nargs=argparse.REMAINDER)

    def handle(self, *_: object, words: Sequence[str], **__: object) -> None:
        """Serve `call_command("machinery", "queues")`."""
        if code := self._run(words):
            raise CommandError(f"machinery {' '.join(words)}: exit code {code}", returncode=code)

    def _run(self, words: Sequence[str]) -> int:
        ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        ours.add_argument("--backend", default=os.environ.get(BACKEND, ""))
        given, words = ours.parse_known_args(words)
        os.environ[BACKEND] = given.backend  # for its processes, which import the app anew
        # Where manage.py is; not sys.path[0], since settings may have put another folder there.
        folder = os.path.dirname(os.path.abspath(sys.argv[0]))
        is_known = folder in map(os.path.abspath, sys.path)
        words = with_app(words, folder if is_known else os.getcwd())
        return main(words, program="manage.py machinery")
