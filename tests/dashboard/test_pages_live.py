"""The dashboard over time: live figures, 10,000 tasks, two windows, a store that is away."""

from __future__ import annotations

from machinery_py import group
from machinery_py.cli.http import serve
from machinery_py.testing.waiting import HANG, wait_until
from tests.dashboard.shop import Shop
from tests.support.browser import Browser

MANY = 10_000
ROW = "return document.querySelector(arguments[0]).dataset.row"


def test_overview_follows_the_queues(shop: Shop, browser: Browser) -> None:
    browser.open()
    browser.see("live", css=".connection")
    for _ in range(7):
        shop.charge.options(queue="idle").send(1, 1.0)
    browser.see("idle", css="table")
    wait_until(lambda: "7" in browser.text("tr[data-row=idle]"))


def test_row_under_the_pointer_does_not_move(shop: Shop, browser: Browser) -> None:
    browser.open("#/tasks")
    browser.see("all of them")
    second = "tr[data-row]:nth-child(2)"
    browser.point_at(second)
    row = browser.run(ROW, second)
    shop.charge.send(4711, 1.0).get(timeout=HANG)
    browser.see("Show 1 newer")
    assert browser.run(ROW, second) == row
    browser.press("Show 1 newer")
    browser.see("4711", css="tbody tr")

    browser.point_at("h1")
    shop.charge.send(4712, 1.0).get(timeout=HANG)
    browser.see("4712", css="tbody tr")


def test_10_000_tasks_are_shown_and_deleted(shop: Shop, browser: Browser) -> None:
    body = shop.charge.options(queue="bulk")
    group(*(body.signature(number, 1.0) for number in range(MANY))).send()
    browser.open("#/tasks?queue=bulk")
    browser.see("100 tasks so far")
    for count in ("200", "300", "400"):
        browser.run("scrollTo(0, document.body.scrollHeight)")
        browser.see(f"{count} tasks so far")
    assert browser.run("return document.querySelectorAll('tr[data-row]').length") < 120
    browser.press("Revoke …")
    browser.see("10,000 tasks that match: queue bulk", css="dialog", timeout=HANG)
    browser.press("Revoke 10,000 tasks")
    browser.see("10,000 tasks revoked", css="dialog", timeout=HANG)
    browser.press("Close")


def test_two_windows_show_the_same(shop: Shop, browser: Browser) -> None:
    browser.open("#/queues")
    browser.see("machinery_tasks")
    first = browser.driver.current_window_handle
    browser.driver.switch_to.new_window("window")
    try:
        browser.open("#/queues")
        browser.press("Pause machinery_tasks")
        browser.see("paused", css="tbody")
        browser.driver.switch_to.window(first)
        browser.see("paused", css="tbody")
        browser.press("Resume machinery_tasks")
        browser.see_no("paused", css="tbody")
    finally:
        browser.driver.switch_to.window(browser.driver.window_handles[-1])
        browser.driver.close()
        browser.driver.switch_to.window(first)


def test_store_that_is_away_is_named_and_waited_for(shop: Shop, browser: Browser) -> None:
    browser.open()
    browser.see("live", css=".connection")
    shop.redis.kill()
    try:
        browser.see("The store is away", "It is asked again until it answers.", css=".trouble")
        browser.see("store away", css=".connection")
        browser.see("machinery_tasks", css="table")
        browser.picture("store-away")
    finally:
        shop.redis.start()
    browser.see_no("The store is away", css=".trouble")
    browser.see("live", css=".connection")
    browser.problems()  # of requests that failed meanwhile


def test_bulk_action_waits_for_a_store_that_is_away(shop: Shop, browser: Browser) -> None:
    browser.open("#/tasks?state=FAILURE&name=mail.lost")
    browser.see("3 tasks: all of them")
    shop.redis.kill()
    try:
        browser.press("Retry …")
        browser.see("connection refused", "trying again", css="dialog")
    finally:
        shop.redis.start()
    browser.see("3 tasks that match: Failure, name mail.lost.", css="dialog")
    browser.press("Retry 3 tasks")
    browser.see("3 tasks sent again", css="dialog")
    browser.press("Close")
    browser.problems()  # of requests that failed meanwhile


def test_page_opened_while_the_store_is_away_fills_later(shop: Shop, browser: Browser) -> None:
    whole = browser.address
    with serve(shop.server.dashboard.wsgi(), "127.0.0.1", 0) as address:
        browser.address = address
        shop.redis.kill()
        try:
            browser.open()
            browser.see("Not shown: ", "connection refused", css="main")
            assert "No queue yet" not in browser.text()
        finally:
            shop.redis.start()
        try:
            browser.see("Waiting", "machinery_tasks", css="main")
            browser.see("live", css=".connection")
        finally:
            browser.driver.get("about:blank")
            browser.address = whole
    browser.problems()
