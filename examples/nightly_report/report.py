"""A report over all customers, each night: a task for each, one that merges their results, a mail.

    report      2:00 in Berlin; gives way to the workflow, over the customers of that night
    customer    one customer's sum; tried twice
    merge       writes the report; of what is missing it gets a Failure instead of a result
    mail        tells how much it was
    alarm       is called instead of the mail, when the report has failed

Orders are a JSON file, the report is another, and the mail is a text file.
"""

import json
import os
import sys
from pathlib import Path

from machinery_py import Chain, Failure, Replace, Server, chain, chord

FOLDER = Path(os.environ.get("REPORT_FOLDER", "."))

server = Server(f"sqlite:///{FOLDER}/report.db")


def orders() -> dict[str, list[float]]:
    found: dict[str, list[float]] = json.loads((FOLDER / "orders.json").read_text())
    return found


@server.task(retries=1, backoff=[0.1])
def customer(name: str) -> dict[str, float]:
    """Sum up a customer's orders. Fails for one whose orders are no numbers."""
    try:
        return {name: round(sum(orders()[name]), 2)}
    except TypeError as error:
        raise ValueError(f"orders of {name}: {error}") from error


@server.task
def merge(found: list[dict[str, float] | Failure]) -> str:
    """Write the report; return its summary."""
    missing = [one.error for one in found if isinstance(one, Failure)]
    sums = {name: each for one in found if isinstance(one, dict) for name, each in one.items()}
    (FOLDER / "report.json").write_text(json.dumps(sums, indent=2))
    lines = [f"{len(sums)} customers, {sum(sums.values()):.2f} in all"]
    return "\n".join([*lines, *(f"missing: {error}" for error in missing)])


@server.task
def mail(text: str) -> None:
    (FOLDER / "mail.txt").write_text(f"{text}\n")


@server.task
def alarm(error: str) -> None:
    with open(FOLDER / "alarm.txt", "a") as file:
        file.write(f"{error}\n")


@server.periodic("0 2 * * *", tz="Europe/Berlin", catch_up=True)
@server.task
def report() -> None:
    """Give way to the workflow. It is sent when this task ends, in one step: never twice."""
    raise Replace(flow())


def flow(*, partial: bool = False) -> Chain[None]:
    """Return the workflow.

    Args:
        partial: a report without some customers is better than none.
    """
    each = customer.map(sorted(orders()))
    merged = merge.partial().catch(alarm.partial())
    whole = chord(each, merged, collect=True, on_failure="collect" if partial else "abort")
    return chain(whole, mail.partial())


if __name__ == "__main__":
    print(flow(partial="--partial" in sys.argv).send().workflow)
