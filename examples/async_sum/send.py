"""Program that sends what Go Machinery's example sends, and prints the results.

A worker must run: see README.md.
"""

from __future__ import annotations

from sums import (
    add,
    concat,
    flaky,
    later,
    long_running_task,
    multiply,
    panic_task,
    server,
    split,
    sum_floats,
    sum_ints,
)

from machinery_py import TaskFailed, chain, chord, group

WAIT = 60.0  # seconds for any result


def single_tasks() -> None:
    print("Single task:")
    print("  1 + 1 =", add.send(1, 1).get(WAIT))
    print("  sum of [1, 2, 3] =", sum_ints.send([1, 2, 3]).get(WAIT))
    print("  sum of [1.5, 2.7] =", round(sum_floats.send([1.5, 2.7]).get(WAIT), 6))
    print("  'foo' and 'bar' =", concat.send(["foo", "bar"]).get(WAIT))
    print("  'foobar' split =", split.send("foobar").get(WAIT))
    print("  after a delay of 0.5 s, 1 + 1 =", add.options(delay=0.5).send(1, 1).get(WAIT))


def retries_and_failures() -> None:
    print("Retry:")
    print("  succeeded in try", flaky.send().get(WAIT))
    print(" ", later.send().get(WAIT))
    try:
        panic_task.send().get(WAIT)
    except TaskFailed as failure:
        print("  panic_task:", failure.error)


def workflows() -> None:
    three = group(add.signature(1, 1), add.signature(2, 2), add.signature(5, 6))

    print("Group of parallel tasks:")
    for result in server.send_group(three).results:
        print(f"  {result.name} =", result.get(WAIT))

    print("Chord: the group, and a callback with all its results:")
    print(
        "  (1 + 1) * (2 + 2) * (5 + 6) =",
        server.send_chord(chord(three, multiply.partial())).get(WAIT),
    )

    print("Chain of tasks, each result going to the end of the next one's arguments:")
    steps = chain(add.signature(1, 1), add.partial(5, 5), multiply.partial(4))
    print("  4 * (5 + 5 + (1 + 1)) =", server.send_chain(steps).get(WAIT))


def long_task() -> None:
    print("Long running task:")
    long_running_task.send().get(WAIT)
    print("  done")


if __name__ == "__main__":
    single_tasks()
    retries_and_failures()
    workflows()
    long_task()
