"""Send a mail to every address in a CSV file (columns: email, name), with a progress bar."""

from __future__ import annotations

import argparse
import csv
import threading
from collections.abc import Callable
from pathlib import Path

from progress import Progress
from tasks import bulk, server

from machinery_py import ChordResult, State

LOOK = 0.1  # seconds between two polls of the states
RECIPIENTS = Path(__file__).with_name("recipients.csv")
TEXT = "Hello {name},\n\nthis week: background tasks that start with nothing.\n"


def read_recipients(path: Path = RECIPIENTS) -> list[tuple[str, str]]:
    """Return (address, name) of each line."""
    with path.open(encoding="utf-8", newline="") as file:
        return [(row["email"], row["name"]) for row in csv.DictReader(file)]


def follow(result: ChordResult[str], each_look: Callable[[int], object] = lambda done: None) -> str:
    """Show a progress bar until all mails are done; return the report.

    Args:
        each_look: called with the number of mails that are through.
    """
    waiting = [one.uuid for one in result.group.results]
    total = len(waiting)
    pause = threading.Event()
    with Progress(total, "mails") as bar:
        while waiting:
            states = server.backend.get_states(waiting)
            retrying = sum(state.state is State.RETRY for state in states.values())
            waiting = [
                uuid for uuid in waiting if uuid not in states or not states[uuid].is_finished
            ]
            done = total - len(waiting)
            bar.show(done, f"({retrying:,} to be tried again)" if retrying else "")
            each_look(done)
            if waiting:
                pause.wait(LOOK)
    return result.get(timeout=60.0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Sends a mail to everybody in a CSV file.")
    parser.add_argument(
        "file", type=Path, nargs="?", default=RECIPIENTS, help="columns: email, name"
    )
    parser.add_argument("--subject", default="This week")
    options = parser.parse_args()
    print(follow(bulk(options.subject, read_recipients(options.file), TEXT)))


if __name__ == "__main__":
    main()
