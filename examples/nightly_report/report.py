"""A report over all customers: a task each, then one that merges them, then a mail.

Orders are a JSON file, the report is another, and the mail is a text file.
"""

import json
import os
from pathlib import Path

from machinery_py import Server, chain, group

FOLDER = Path(os.environ.get("REPORT_FOLDER", "."))

server = Server(f"sqlite:///{FOLDER}/report.db")


def orders() -> dict[str, list[float]]:
    found: dict[str, list[float]] = json.loads((FOLDER / "orders.json").read_text())
    return found


@server.task(retries=1, backoff=[0.1])
def customer(name: str) -> tuple[str, float]:
    """Sum up a customer's orders. Fails for one whose orders are no numbers."""
    return name, round(sum(orders()[name]), 2)


@server.task
def merge(*found: str | float) -> float:
    """Write the report; each customer has given a name and a sum."""
    sums = {str(name): float(each) for name, each in zip(found[::2], found[1::2], strict=True)}
    (FOLDER / "report.json").write_text(json.dumps(sums, indent=2))
    return round(sum(sums.values()), 2)


@server.task
def mail(total: float) -> str:
    text = f"{len(orders())} customers, {total:.2f} in all\n"
    (FOLDER / "mail.txt").write_text(text)
    return text


@server.task
def alarm(error: str) -> None:
    with open(FOLDER / "alarm.txt", "a") as file:
        file.write(f"{error}\n")


def send() -> str:
    """Send the report; return the UUID of the workflow."""
    customers = group(customer.signature(name) for name in orders())
    work = chain(customers, merge.partial().catch(alarm.partial()), mail.partial())
    return work.send().workflow


if __name__ == "__main__":
    print(send())
