"""A Server with tasks of every kind, and text that would run if a page took it for HTML."""

from __future__ import annotations

import datetime as dt
import threading

from machinery_py import Config, Context, Server, TaskFailed, chord, current_task, group
from machinery_py.testing.waiting import HANG, wait_until
from tests.support.servers import RedisServer

#: As an element, in an attribute, as an address, in a template, and with text that turns around.
HOSTILE = (
    "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"
    "\"'onmouseover=window.hacked=1 javascript:window.hacked=1 ${window.hacked=1}\u202etxt"
)


class Shop:
    """A Server on a Redis, and the UUIDs of tasks that it sent, by what they show."""

    def __init__(self, redis: RedisServer) -> None:
        self.redis = redis
        self.server = Server(Config(broker=redis.url, result_backend=redis.url))
        self.gate = threading.Event()
        self.uuids: dict[str, str] = {}
        task = self.server.task
        self.charge = task("billing.charge")(_charge)
        self.refund = task("billing.refund", retries=1, backoff=[0.0])(_refund)
        self.lost = task("mail.lost", on_failure="dead_letter")(_refund)
        self.send_mail = task("mail.send")(_send_mail)
        self.bulk = task("mail.bulk", rate="5/s")(_send_mail)
        self.flaky = task("mail.flaky", retries=2, backoff=[0.0])(_Flaky().__call__)
        self.onboard = task("mail.onboard")(_onboard)
        self.wait = task("reports.nightly")(self._wait)
        self.hostile = task(HOSTILE)(_fail)
        self.server.periodic("0 6 * * *", name="digest")(_digest)

    def _wait(self, context: Context, month: str) -> str:
        context.progress(40, 100)
        context.note(month=month)
        self.gate.wait(5 * HANG)
        return month

    def fill(self) -> None:
        """Send a task of each kind, and wait until those that can end have ended."""
        mails = [self.send_mail.signature(f"user{i}@example.com", "Welcome") for i in range(5)]
        paid = [self.charge.send(number, 9.99) for number in range(20)]
        flaky = self.flaky.send("ada@example.com")
        failed = self.refund.send(17)
        dead = [self.lost.send(number) for number in range(3)]
        hostile = self.hostile.send(HOSTILE)
        whole = chord(
            group(*mails, self.refund.signature(99)), self.charge.signature(99, 1.0)
        ).send()
        asleep = self.onboard.send("ada@example.com")
        for one in [*paid, flaky]:
            one.get(timeout=HANG)
        for one in [failed, *dead, hostile, whole]:
            with_failure(one)
        running = self.wait.send("October")
        wait_until(lambda: running.get_state().progress, HANG, "a running task")
        wait_until(lambda: asleep.get_state().error, HANG, "a task that sleeps")
        self.send_mail.options(delay=3600.0).send("later@example.com", "Bye")
        refunds = self.server.inspect.tasks(name="billing.refund")
        self.uuids = {
            "paid": paid[0].uuid,
            "flaky": flaky.uuid,
            "failed": failed.uuid,
            "hostile": hostile.uuid,
            "asleep": asleep.uuid,
            "running": running.uuid,
            "flow": whole.workflow,
            "member": next(one.task_uuid for one in refunds if one.task_uuid != failed.uuid),
        }


def with_failure(result: object) -> None:
    try:
        result.get(timeout=HANG)  # type: ignore[attr-defined]
    except TaskFailed:
        return
    raise AssertionError("it did not fail")


def _charge(order: int, amount: float) -> dict[str, object]:
    return {"order": order, "paid": amount}


def _refund(order: int) -> None:
    raise ValueError(f"order {order} was never paid")


def _send_mail(to: str, subject: str) -> str:
    return f"queued as {abs(hash(to)) % 1000:03x}"


def _onboard(to: str) -> None:
    task = current_task()
    task.step("welcome", _send_mail, to, "Welcome")
    task.step("token", str, "hidden")
    task.sleep(dt.timedelta(days=3))


def _digest() -> None:
    pass


def _fail(text: str) -> None:
    raise RuntimeError(text)


class _Flaky:
    """Fails twice."""

    def __init__(self) -> None:
        self.tries = 0

    def __call__(self, to: str) -> str:
        self.tries += 1
        if self.tries < 3:
            raise ConnectionError(f"421 {to}: try again")
        return "sent"
