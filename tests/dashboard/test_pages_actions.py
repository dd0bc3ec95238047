"""Each button of the dashboard does what it says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from machinery_py import current_task, group
from machinery_py.cli.http import serve
from machinery_py.dashboard.web import DashboardWSGI
from machinery_py.tasks.states import State
from machinery_py.testing.waiting import HANG, wait_until
from tests.dashboard.shop import Shop, with_failure
from tests.support.browser import Browser

PREFIX = "/ops/machinery"


def queue_named(shop: Shop, name: str) -> object:
    return next(one for one in shop.server.inspect.queues() if one.queue == name)


class Below:
    """A dashboard that is mounted below a prefix."""

    def __init__(self, application: DashboardWSGI) -> None:
        self.application = application
        self.close = application.close

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        environ["SCRIPT_NAME"] = PREFIX
        environ["PATH_INFO"] = environ["PATH_INFO"].removeprefix(PREFIX)
        return self.application(environ, start_response)


def test_dashboard_works_below_a_prefix(shop: Shop, browser: Browser) -> None:
    whole = browser.address
    application: Any = Below(shop.server.dashboard.wsgi())
    with serve(application, "127.0.0.1", 0) as address:
        browser.address = address + PREFIX[1:] + "/"
        try:
            browser.open("#/queues")
            browser.see("live", css=".connection")
            browser.press("Pause machinery_tasks")
            browser.see("Paused machinery_tasks.")
            browser.press("Resume machinery_tasks")
            browser.see("Resumed machinery_tasks.")
        finally:
            browser.driver.get("about:blank")
            browser.address = whole


def test_password_may_stand_in_the_address(shop: Shop, browser: Browser) -> None:
    """A page whose address has one may make no request to such an address."""
    whole = browser.address
    with serve(shop.server.dashboard.wsgi(auth="grace:secret"), "127.0.0.1", 0) as address:
        browser.address = address.replace("//", "//grace:secret@")
        try:
            browser.open("#/queues")
            browser.see("grace", css=".user")
            browser.see("live", css=".connection")
            browser.press("Pause machinery_tasks")
            browser.press("Resume machinery_tasks")
            browser.see("Resumed machinery_tasks.")
        finally:
            browser.driver.get("about:blank")
            browser.address = whole


def test_limit_is_changed_and_reset(shop: Shop, browser: Browser) -> None:
    def changed() -> dict[str, Any]:
        found = {one.name: {**one.changed} for one in shop.server.inspect.limits()}
        return found["mail.bulk"]

    browser.open("#/queues")
    browser.see("rate=5/s")
    browser.press("Change rate of mail.bulk")
    browser.fill("dialog input", "1/s")
    browser.press("Change")
    browser.see("mail.bulk: rate=1/s, from now on.")
    assert changed() == {"rate": "1/s"}
    browser.press("Reset mail.bulk")
    browser.see("The limits of the code count again for mail.bulk.")
    assert changed() == {}


def test_queue_is_paused_resumed_and_purged(shop: Shop, browser: Browser) -> None:
    def later(count: int) -> None:
        for _ in range(count):
            shop.charge.options(queue="slow").send(1, 1.0)

    later(3)
    browser.open("#/queues")
    browser.press("Pause slow")
    browser.see("Paused slow.")
    wait_until(lambda: queue_named(shop, "slow").paused)  # type: ignore[attr-defined]
    browser.press("Resume slow")
    browser.see("Resumed slow.")
    wait_until(lambda: not queue_named(shop, "slow").paused)  # type: ignore[attr-defined]

    browser.press("Purge slow")
    browser.see("3 messages", css="dialog")
    later(20)
    browser.press("Delete 3 messages")
    browser.see("The queue has grown meanwhile. 23 messages", css="dialog")
    browser.press("Delete 23 messages")
    browser.see("Deleted 23 messages of slow.")
    assert queue_named(shop, "slow").waiting == 0  # type: ignore[attr-defined]


def test_failed_task_is_retried_copied_and_deleted(shop: Shop, browser: Browser) -> None:
    browser.open(f"#/task?uuid={shop.uuids['failed']}")
    browser.press("Copy as Python")
    browser.see("Copied the call.")
    before = shop.server.backend.get_state(shop.uuids["failed"]).finished_at
    browser.press("Retry")
    browser.see("Sent again.")
    wait_until(lambda: shop.server.backend.get_state(shop.uuids["failed"]).finished_at != before)
    # Anew: while it waited, the page had "Revoke …" at this place.
    browser.open(f"#/task?uuid={shop.uuids['failed']}")
    browser.see("Failure", css=".title")
    browser.press("Delete …")
    browser.press("Delete 1 task")
    browser.see("1 task deleted", css="dialog")
    browser.press("Close")
    browser.see("No such task")


def test_running_task_is_revoked(shop: Shop, browser: Browser) -> None:
    waiting = shop.wait.options(delay=3600.0).send("November")
    browser.open(f"#/task?uuid={waiting.uuid}")
    browser.press("Revoke …")
    browser.press("Revoke 1 task")
    browser.see("1 task revoked", css="dialog")
    browser.press("Close")
    browser.see("revoked")


def test_selected_tasks_are_retried(shop: Shop, browser: Browser) -> None:
    browser.open("#/tasks?state=FAILURE&name=mail.lost")
    browser.see("3 tasks: all of them")
    browser.see("mail.lost", css="tbody")  # rows come a moment later
    browser.run("document.querySelector('tbody input').click()")
    browser.see("1 selected:")
    browser.press("Retry …")
    browser.see("1 task selected.", css="dialog")
    browser.press("Retry 1 task")
    browser.see("1 task sent again", css="dialog")
    browser.press("Close")
    browser.see("All that match:")


def test_errors_of_one_kind_are_retried(shop: Shop, browser: Browser) -> None:
    browser.open("#/errors")
    browser.press("Retry all mail.lost, ValueError")
    browser.see("3 tasks", css="dialog")
    browser.press("Retry 3 tasks")
    browser.see("3 tasks sent again", css="dialog")
    browser.press("Close")


def test_dead_letters_are_read_sent_again_and_deleted(shop: Shop, browser: Browser) -> None:
    wait_until(lambda: len(shop.server.inspect.dead()) >= 3, HANG)
    browser.open("#/dead")
    browser.press("mail.lost")
    browser.see("was never paid", "Message", '"mail.lost"', css="dialog")
    browser.press("Close")
    browser.run("document.querySelector('tbody input').click()")
    browser.see("1 selected:")
    browser.press("Send again …")
    browser.press("Send again 1 letter")
    browser.see("1 letter sent again", css="dialog")
    browser.press("Close")
    browser.see("shown:")
    browser.press("Delete …")
    browser.press(browser.run("return document.querySelector('dialog .danger').innerText"))
    browser.see("deleted", css="dialog .result")
    browser.press("Close")


def test_schedule_is_paused_resumed_and_run(shop: Shop, browser: Browser) -> None:
    browser.open("#/schedules")
    browser.press("Pause digest")
    browser.see("paused", css="tbody")
    browser.press("Resume digest")
    browser.see_no("paused", css="tbody")
    browser.press("Run now: digest")
    browser.see("Sent digest.")
    wait_until(lambda: shop.server.inspect.tasks(name="_digest"))


def test_worker_is_changed_and_shut_down(shop: Shop, browser: Browser) -> None:
    with shop.server.new_worker("bob", 1, queues=["other"]) as bob:
        browser.open("#/workers")
        browser.press("bob")
        browser.see("0 of 1")
        browser.fill("input[type=number]", "3")
        browser.press("Set")
        browser.see("0 of 3")
        browser.press("Shut down …")
        browser.press("Shut down")
        browser.see("bob shuts down.")
        wait_until(lambda: not [w for w in shop.server.inspect.workers() if w.name == "bob"])
        del bob
    browser.see_no("bob", css="tbody")
    assert shop.server.backend.get_state(shop.uuids["paid"]).state is State.SUCCESS


def test_task_that_waits_gets_its_signals(shop: Shop, browser: Browser) -> None:
    def approve() -> list[Any]:
        return [current_task().wait_for("approval") for _ in range(2)]

    sent = shop.server.task("order.approve")(approve).send()
    browser.open(f"#/task?uuid={sent.uuid}")
    browser.see("Waits for approval", "it waits for signal 'approval'", "machinery signal")
    browser.fill(".title ~ section input", '{"by": "ada"}')
    browser.press("Send signal")
    browser.see("Signal sent.", "wait for approval")
    wait_until(lambda: shop.server.inspect.task(sent.uuid).waits_for)
    browser.see("Waits for approval")
    browser.fill(".title ~ section input", "no JSON")
    browser.press("Send signal")
    assert sent.get(timeout=HANG) == [{"by": "ada"}, "no JSON"]
    browser.see("Success", css=".title")
    browser.see_no("Waits for approval")


def test_workflow_is_retried_and_cancelled(shop: Shop, browser: Browser) -> None:
    broken = {"on"}

    def fragile(part: str) -> str:
        if broken and part == "b":
            raise ConnectionError("refused")
        return part

    part = shop.server.task("report.part")(fragile)
    whole = shop.server.task("report.whole")(lambda *parts: "".join(parts))
    night = (group(part.signature(one) for one in "abc") | whole.partial()).send()
    with_failure(night)
    browser.open("#/workflows")
    browser.press("report.part ×3 | report.whole")
    browser.see("2 Success", "1 Failure", "ConnectionError", "refused", "4 of 4")
    broken.clear()
    browser.press("Retry what failed")
    browser.see("1 task sent again.")
    wait_until(lambda: shop.server.workflow(night.workflow).state is State.SUCCESS, HANG)
    browser.see("Success", css=".title")

    later = (part.options(delay=3600).signature("a") | whole.partial()).send()
    browser.open(f"#/task?uuid={later.steps[0].uuid}")
    browser.press(later.workflow.removeprefix("group_flow_")[:8])
    browser.see("Pending", css=".title")
    browser.press("Cancel …")
    browser.press("Cancel it")
    browser.see("Cancelled: 2 tasks.")
    browser.see("cancelled", css=".title")
    assert shop.server.workflow(later.workflow).is_cancelled
