"""The pictures of docs/images, of a shop on the memory store that has had a busy hour.

python -m tests.dashboard.pictures
"""

from __future__ import annotations

import contextlib
import math
import threading
from pathlib import Path

from machinery_py import Config, Context, Server, chord, group
from machinery_py.cli.http import serve
from machinery_py.testing import Harness, ManualClock
from machinery_py.testing.waiting import HANG, wait_until
from tests.support import browser
from tests.support.browser import Browser

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
SIZE = (1200, 800)
MINUTES = 60
NO_FOLDERS = """
    const traceback = document.querySelector("pre");
    traceback.innerText = traceback.innerText.replaceAll(arguments[0], "/srv");
"""


class BusyShop:
    """Tasks that let the time of a manual clock pass."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.server = Server(Config(broker="memory://"), clock=self.clock)
        self.gate = threading.Event()
        self.calls = 0
        task = self.server.task
        self.mail = task("mail.send", queue="mail", retries=2, backoff=[2.0])(self._mail)
        self.charge = task("billing.charge", queue="billing")(self._charge)
        self.receipt = task("billing.receipt", queue="billing")(self._charge)
        self.report = task("reports.nightly", queue="reports")(self._report)

    def _mail(self, to: str, subject: str) -> str:
        self.calls += 1
        self.clock.advance(0.4)
        if to.startswith("busy") or self.calls % 61 == 0:
            raise ConnectionRefusedError(f"smtp.example.com:25 refused the mail to {to}")
        return f"250 queued as {self.calls:05x}"

    def _charge(self, order: int, amount: float) -> dict[str, object]:
        self.clock.advance(0.1)
        if order % 83 == 0:
            raise ValueError(f"order {order} was paid already")
        return {"order": order, "paid": amount}

    def _report(self, context: Context, month: str) -> None:
        context.progress(64, 100)
        self.gate.wait(HANG)

    def have_an_hour(self) -> None:
        harness = Harness(self.server)
        for minute in range(MINUTES):
            self.clock.advance(60 - self.clock.monotonic() % 60)
            wave = 1.4 + math.sin(minute / 7) + 0.3 * math.sin(minute * 2.3)
            for number in range(int(11 * wave)):
                self.charge.send(minute * 40 + number, 9.99)
                if number % 2:
                    self.mail.send(f"user{number}@example.com", "Your order")
            if minute == MINUTES - 1:
                mails = [self.mail.signature(f"user{n}@example.com", "News") for n in range(3)]
                mails.append(self.mail.signature("busy@example.com", "News"))
                chord(group(*mails), self.receipt.signature(4711, 9.99)).send()
            for _ in range(3):  # with the retries of what has failed
                harness.drain(raise_failures=False)
                self.clock.advance(2.5)


def main() -> None:
    shop = BusyShop()
    shop.have_an_hour()
    server = shop.server
    for number in range(37):
        shop.mail.send(f"reader{number}@example.com", "News")
    server.inspect.pause("mail")
    shop.clock.advance(12.5)
    with contextlib.ExitStack() as stack:
        for name in ("ada-1", "ada-2"):
            stack.enter_context(server.new_worker(name, 2, queues=["mail", "billing", "reports"]))
        stack.callback(shop.gate.set)
        running = [shop.report.send(month) for month in ("August", "September", "October")]
        wait_until(lambda: all(one.get_state().progress for one in running), HANG)
        [failed, *_] = server.inspect.search(state="failure", name="mail.send", text="busy@").tasks
        web = server.dashboard.wsgi()
        address = stack.enter_context(serve(web, "127.0.0.1", 0))
        shown = stack.enter_context(Browser(address))
        shown.resize(SIZE)
        IMAGES.mkdir(exist_ok=True)
        browser.PICTURES = IMAGES
        shown.open("#/")
        shown.see("reports", "ValueError")
        wait_until(lambda: shown.run("return document.querySelector('canvas')"))
        shown.see("live", css=".connection")
        shown.picture("dashboard-overview")
        shown.open(f"#/task?uuid={failed.task_uuid}")
        shown.see("Try 3", "Group of 4", "billing.receipt")
        shown.run(NO_FOLDERS, str(IMAGES.parents[1]))
        shown.picture("dashboard-task")


if __name__ == "__main__":
    main()
