"""CrashPoints: what it finds in good tasks, and in those that do not survive."""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
import uuid
from typing import Any

import pytest

from machinery_py import Retry, Server, chain, chord, current_task, group
from machinery_py.testing import CrashPoints
from machinery_py.testing.harness import running_worker


class Shop:
    """A user's application, and the fakes of its tests."""

    def __init__(self, path: str) -> None:
        self.server = Server(f"sqlite:///{path}/never-made.db")
        self.mails: list[tuple[int, str]] = []
        self.payments: dict[str, int] = {}

    def send_mail(self, user: int, kind: str) -> None:
        self.mails.append((user, kind))

    async def send_mail_async(self, user: int, kind: str) -> None:
        self.mails.append((user, kind))

    def charge(self, user: int) -> str:
        key = current_task().step_key
        self.payments[key] = user
        return key

    def run(self, task: Any, *args: Any, **options: Any) -> Any:
        return CrashPoints(self.server).run(task, *args, **options)


@pytest.fixture
def shop(tmp_path: Any) -> Shop:
    return Shop(str(tmp_path))


def test_flow_of_steps_survives_every_crash(shop: Shop) -> None:
    @shop.server.task
    def onboard(user: int) -> None:
        task = current_task()
        task.step("welcome", shop.send_mail, user, "welcome")
        task.sleep(dt.timedelta(days=3))
        task.step("charge", shop.charge, user)

    report = shop.run(
        onboard, 7, effects={"payment": shop.payments}, at_least_once={"mail": shop.mails}
    )

    assert report.points > 20
    assert (report.lost, report.doubled) == ([], [])
    assert report.repeated == ['mail twice: killed between its effect and the checkpoint "welcome"']
    assert str(report) == (
        f"onboard: {report.points} crash points, 0 lost, 0 doubled, 1 repeated\n"
        'mail twice: killed between its effect and the checkpoint "welcome"'
    )


def test_step_without_its_key_is_doubled(shop: Shop) -> None:
    @shop.server.task
    def onboard(user: int) -> None:
        current_task().step("welcome", shop.send_mail, user, "welcome")

    report = shop.run(onboard, 7, effects={"mail": shop.mails})

    assert report.doubled == ['mail twice: killed between its effect and the checkpoint "welcome"']


def test_keys_that_are_new_in_each_try_are_doubled(shop: Shop) -> None:
    @shop.server.task
    def pay(user: int) -> None:
        shop.payments[str(uuid.uuid4())] = user

    report = shop.run(pay, 7, effects={"payment": shop.payments})

    assert report.doubled == [
        "payment twice: killed between its effect and the settlement of pay (SUCCESS)"
    ]


def test_effect_before_the_state_that_skips_it_is_lost(shop: Shop) -> None:
    done: set[int] = set()

    @shop.server.task
    def remind(user: int) -> None:
        if user not in done:
            done.add(user)
            current_task().step("note", str, user)
            shop.send_mail(user, "reminder")

    report = shop.run(remind, 7, effects={"mail": shop.mails}, reset=done.clear)

    assert report.lost[0].startswith('mail never: killed before the checkpoint "note"; after')


def test_task_that_is_sent_outside_of_a_step_is_doubled(shop: Shop) -> None:
    @shop.server.task
    def note(user: int) -> None: ...

    @shop.server.task
    def sign_up(user: int) -> None:
        note.send(user)

    report = shop.run(sign_up, 7)

    assert report.lost == []
    assert report.doubled == [
        "task note twice: killed after the submission of note; "
        "before the settlement of sign_up (SUCCESS)"
    ]
    tolerant = shop.run(sign_up, 7, at_least_once={"task note": shop.mails})
    assert (tolerant.doubled, tolerant.repeated) == ([], report.doubled)


def test_what_ack_early_loses_is_found(shop: Shop) -> None:
    @shop.server.task(ack="early")
    def once(user: int) -> None:
        shop.send_mail(user, "once")

    report = shop.run(once, 7, effects={"mail": shop.mails})

    assert report.doubled == []
    assert any(text.startswith("mail never: killed ") for text in report.lost)
    assert any(text.startswith("once ") for text in report.lost)


def test_workflow_that_a_task_sends_is_run(shop: Shop) -> None:
    @shop.server.task
    def part(number: int) -> int:
        return number

    @shop.server.task
    def total(*numbers: int) -> int:
        shop.payments[f"{sum(numbers)}"] = 1
        return sum(numbers)

    @shop.server.task
    def report_all() -> str:
        def send() -> str:
            members = group(part.signature(number) for number in range(3))
            return chain(members, total.partial()).send().uuid

        return current_task().step("send", send)

    report = shop.run(report_all, effects={"total": shop.payments})

    assert report.lost == []
    assert {text.partition(" twice")[0].partition(" 6 times")[0] for text in report.doubled} == {
        "task part",
        "task total",
    }


def test_retries_and_limits_end_as_without_a_crash(shop: Shop) -> None:
    @shop.server.task(
        retries=2, backoff=[60.0], rate="1/s", max_running=1, unique=True, exclusive="wait"
    )
    def call(user: int) -> None:
        with shop.server.lock("api"):
            current_task().step("mail", shop.send_mail, user, "hello")
        if current_task().attempt == 1:
            raise Retry("not yet")

    report = shop.run(call, 7, at_least_once={"mail": shop.mails})

    assert (report.lost, report.doubled) == ([], [])
    assert report.points > 30


def test_coroutines_are_killed_as_well(shop: Shop) -> None:
    @shop.server.task
    async def onboard(user: int) -> None:
        task = current_task()
        await asyncio.gather(
            task.step_async("one", shop.send_mail_async, user, "one"),
            task.step_async("two", shop.send_mail_async, user, "two"),
        )
        await task.sleep_async(dt.timedelta(days=3))
        await task.step_async("three", shop.send_mail_async, user, "three")

    report = shop.run(onboard, 7, at_least_once={"mail": shop.mails})

    assert (report.lost, report.doubled) == ([], [])
    assert {text.partition(":")[0] for text in report.repeated} == {
        "mail (7, 'one') twice",
        "mail (7, 'two') twice",
        "mail (7, 'three') twice",
    }


def test_dead_worker_writes_nothing_more(shop: Shop) -> None:
    @shop.server.task
    def note(user: int) -> None: ...

    @shop.server.task
    def stubborn(user: int) -> None:
        try:
            current_task().step("one", str, user)
        finally:
            if not shop.payments:
                shop.payments["sent"] = user
                note.options(uuid=f"task_{uuid.UUID(int=user)}").send(user)

    report = shop.run(stubborn, 7, reset=shop.payments.clear)

    assert 'task note never: killed before the checkpoint "one"' in report.lost[0]


def test_flow_that_never_ends_is_told_so(shop: Shop) -> None:
    @shop.server.task
    def again() -> None:
        again.send()

    with pytest.raises(AssertionError, match=r"no end after 5,000 writes; this one is .* again"):
        shop.run(again)


def test_task_that_fails_without_a_crash_is_told_so(shop: Shop) -> None:
    @shop.server.task
    def broken() -> None:
        raise ValueError("out of paper")

    with pytest.raises(AssertionError, match="broken ends with FAILURE .*: out of paper"):
        shop.run(broken)


def test_flow_with_other_writes_in_each_run_is_told_so(shop: Shop) -> None:
    numbers = itertools.count()

    @shop.server.task
    def growing() -> None:
        current_task().step(f"step-{next(numbers)}", str, 1)

    with pytest.raises(AssertionError, match=r"other crash points in each run, .* \"step-0\""):
        shop.run(growing)


def test_server_has_its_own_stores_again(shop: Shop) -> None:
    @shop.server.task
    def plain(user: int) -> int:
        return user

    shop.run(plain.signature(7))

    assert shop.server.config.broker.startswith("sqlite:")
    assert shop.server.app._stores is None
    with running_worker(shop.server):
        assert plain.send(7).get(timeout=30) == 7


def test_error_of_the_library_restores_them_too(shop: Shop) -> None:
    @shop.server.task
    def broken() -> None:
        raise ValueError("out of paper")

    with pytest.raises(AssertionError):
        shop.run(broken)

    assert shop.server.config.broker.startswith("sqlite:")


def test_workflow_is_compared_task_by_task(shop: Shop) -> None:
    @shop.server.task
    def fetch(number: int) -> int:
        if number == 2:
            raise ValueError("gone")
        return number

    @shop.server.task
    def alarm(error: str) -> None:
        shop.mails.append((0, "alarm"))

    members = group(fetch.signature(number) for number in range(3))
    flow = chord(members, fetch.partial().catch(alarm.partial()))

    report = shop.run(flow, at_least_once={"alarm": shop.mails})

    assert (report.name, report.lost, report.doubled) == ("workflow", [], [])
    assert report.repeated == [
        "alarm twice: killed between its effect and the settlement of alarm (SUCCESS)"
    ]


def test_task_gets_the_signals_that_it_waits_for(shop: Shop) -> None:
    @shop.server.task
    def approve(user: int) -> None:
        task = current_task()
        for _ in range(2):
            kind = task.wait_for("approval", timeout=dt.timedelta(days=7))
        task.step("mail", shop.send_mail, user, kind)

    report = shop.run(approve, 7, signals={"approval": "yes"}, at_least_once={"mail": shop.mails})
    assert (report.lost, report.doubled) == ([], [])
    assert report.repeated == ['mail twice: killed between its effect and the checkpoint "mail"']
    assert shop.mails[0] == (7, "yes")


def test_task_that_waits_for_another_is_crashed_with_it(shop: Shop) -> None:
    @shop.server.task
    def render(page: int) -> str:
        return f"page {page}"

    @shop.server.task
    def publish() -> None:
        task = current_task()
        text = task.wait_for(render.signature(7))
        task.step("mail", shop.send_mail, 7, text)

    report = shop.run(publish, at_least_once={"mail": shop.mails})
    assert (report.lost, report.doubled) == ([], [])
    assert shop.mails[0] == (7, "page 7")
    assert report.points > 12


def test_task_that_a_step_sends_is_sent_once(shop: Shop) -> None:
    noted: list[int] = []

    @shop.server.task
    def note(number: int) -> None:
        noted.append(number)

    @shop.server.task
    def flow() -> None:
        current_task().step("notify", note.send, 7)

    report = shop.run(flow, at_least_once={"noted": noted})
    assert (report.lost, report.doubled) == ([], [])


def test_task_that_gets_no_signal_never_ends(shop: Shop) -> None:
    @shop.server.task
    def approve() -> None:
        current_task().wait_for("approval")

    with pytest.raises(AssertionError, match="does not come to an end"):
        shop.run(approve, signals={"other": 1})
