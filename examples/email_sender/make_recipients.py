"""Makes recipients.csv: 1,000 people who do not exist, the same ones each time."""

from __future__ import annotations

import csv
import random
from pathlib import Path

COUNT = 1000
FIRST = [
    "Ada",
    "Alan",
    "Barbara",
    "Claude",
    "Donald",
    "Edsger",
    "Émilie",
    "Frances",
    "Grace",
    "Hedy",
    "Jürgen",
    "Katherine",
    "Leslie",
    "Margaret",
    "Niklaus",
    "Radia",
    "Søren",
    "Tony",
    "Vint",
    "Łucja",
]
LAST = [
    "Allen",
    "Hamilton",
    "Hopper",
    "Johnson",
    "Knuth",
    "Lamarr",
    "Lamport",
    "Liskov",
    "Lovelace",
    "Müller",
    "O'Neil",
    "Perlman",
    "Shannon",
    "Smith, Jr.",
    "Turing",
    "Wirth",
]


def main() -> None:
    rng = random.Random(1843)
    path = Path(__file__).with_name("recipients.csv")
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["email", "name"])
        for number in range(1, COUNT + 1):
            writer.writerow(
                [f"reader{number:04d}@example.net", f"{rng.choice(FIRST)} {rng.choice(LAST)}"]
            )


if __name__ == "__main__":
    main()
