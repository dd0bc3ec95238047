"""Each page as it looks: what it shows, both colours, a phone, the keyboard, hostile text."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.keys import Keys

from machinery_py.cli.http import serve
from machinery_py.testing.waiting import wait_until
from tests.dashboard.shop import HOSTILE, Shop
from tests.support.browser import DESKTOP, PHONE, Browser

#: Each page: its address, and texts that it shows. {names} are UUIDs of the shop's tasks.
PAGES = {
    "overview": ("#/", ["Overview", "machinery_tasks", "ValueError", "succeeded", "All errors"]),
    "queues": ("#/queues", ["machinery_tasks", "Pause", "Purge …"]),
    "tasks": ("#/tasks", ["billing.charge", "Success", "Failure", "40 of 100", "all of them"]),
    "task": (
        "#/task?uuid={failed}",
        ["order 17 was never paid", "Traceback", "_refund", "Try 2", "Copy as Python"],
    ),
    "tries": ("#/task?uuid={flaky}", ["Try 1", "Try 2", "Try 3", "421 ada@example.com"]),
    "steps": ("#/task?uuid={asleep}", ["Suspended", "sleeps until", "welcome", "queued as", "•••"]),
    "workflow": ("#/task?uuid={member}", ["Group of 6", "after the group", "billing.charge"]),
    "flow": (
        "#/workflow?uuid={flow}",
        ["mail.send, billing.refund ×6", "order 99 was never pa…", "order 99 was never paid"],
    ),
    "running": ("#/task?uuid={running}", ["October", "so far", "40 of 100", "Revoke …"]),
    "errors": ("#/errors", ["billing.refund", "ValueError", "was never paid", "Retry all …"]),
    "dead": ("#/dead", ["mail.lost", "Send again …", "failed"]),
    "schedules": ("#/schedules", ["digest", "0 6 * * *", "in ", "Run now"]),
    "workers": ("#/workers", ["ada", "machinery_tasks"]),
    "worker": ("#/worker?name=ada", ["reports.nightly", "Concurrency", "MiB", "Shut down …"]),
}


@pytest.mark.parametrize("page", PAGES)
def test_page_is_whole_in_light_on_a_phone_and_in_the_dark(
    shop: Shop, browser: Browser, page: str
) -> None:
    route, texts = PAGES[page]
    browser.open(route.format(**shop.uuids))
    browser.see(*texts)
    browser.picture(page)
    assert browser.violations() == []
    try:
        browser.colours("dark")
        browser.resize(PHONE)
        browser.picture(f"{page}-phone-dark")
        assert browser.violations() == []
        assert browser.run("return document.documentElement.scrollWidth") <= PHONE[0]
    finally:
        browser.colours("light")
        browser.resize(DESKTOP)


def test_theme_is_chosen_and_kept(browser: Browser) -> None:
    browser.open()
    light = browser.run("return getComputedStyle(document.body).color")
    browser.press("Theme: system")
    browser.press("Theme: light")
    browser.see("Theme: dark")
    assert browser.run("return getComputedStyle(document.body).color") != light
    browser.driver.refresh()
    browser.see("Theme: dark")
    browser.press("Theme: dark")


@pytest.mark.parametrize("route", ["#/tasks", "#/errors", "#/task?uuid={hostile}", "#/"])
def test_hostile_text_is_shown_and_not_run(shop: Shop, browser: Browser, route: str) -> None:
    """That no script ran is checked after each test, by the fixtures."""
    browser.open(route.format(**shop.uuids))
    browser.see("<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>")
    assert browser.run("return document.querySelectorAll('main img, main script').length") == 0


def test_hostile_address_is_shown_and_not_run(browser: Browser) -> None:
    browser.open("#/tasks?name=%3Cimg%20src=x%20onerror=window.hacked=1%3E&state=%3Cb%3E")
    browser.see("No task matches this filter.")
    browser.open("#/worker?name=%3Cimg%20src=x%20onerror=window.hacked=1%3E")
    browser.see("<img src=x onerror=window.hacked=1>", "no answer")
    browser.open("#/task?uuid=javascript:window.hacked=1")
    browser.see("No such task", "javascript:window.hacked=1")
    browser.open("#/no/such?page")
    browser.see("Overview")


def test_filter_stands_in_the_address(shop: Shop, browser: Browser) -> None:
    browser.open("#/tasks?state=FAILURE")
    browser.see("billing.refund", "mail.lost")
    browser.see_no("mail.send", css="tbody")
    browser.fill("[data-filter]", "NEVER paid")
    wait_until(lambda: "text=NEVER+paid" in browser.driver.current_url)
    browser.see_no(HOSTILE[:20], css="tbody")
    browser.driver.refresh()
    browser.see("billing.refund", "mail.lost")
    browser.see_no(HOSTILE[:20], css="tbody")
    browser.press("Failure")
    browser.press("Success")
    browser.see("No task matches this filter.")
    browser.press("Clear filter")
    browser.see("mail.send")


def test_task_is_found_by_the_start_of_its_id(shop: Shop, browser: Browser) -> None:
    browser.open("#/tasks")
    browser.fill("[data-filter]", shop.uuids["failed"][:20] + Keys.ENTER)
    browser.see("order 17 was never paid", shop.uuids["failed"])


def test_keyboard_reaches_everything(browser: Browser) -> None:
    browser.open()
    browser.see("Queues")
    browser.keys("?")
    browser.see("next and previous row", css="dialog")
    browser.keys(Keys.ESCAPE)
    wait_until(lambda: not browser.run("return document.querySelector('dialog')"))
    browser.keys("g", "t")
    browser.see("all of them")
    browser.keys("/")
    browser.keys("never paid")
    wait_until(lambda: "text=never" in browser.driver.current_url)
    browser.keys(Keys.ESCAPE)
    browser.see_no("mail.send", css="tbody")
    browser.see("was never paid", css="tbody")
    browser.keys("j", "j", "k", "x")
    browser.see("1 selected")
    rows = "return [...document.querySelectorAll('tr[data-row]')]"
    assert browser.run(f"{rows}.map((row) => row.className)")[:3] == ["chosen", "", ""]
    browser.keys("j")
    second = browser.run("return document.activeElement.dataset.row")
    assert second == browser.run(f"{rows}[1].dataset.row")
    browser.keys(Keys.ENTER)
    browser.see(second, "was never paid", css="main")


def test_single_keys_can_be_switched_off(browser: Browser) -> None:
    browser.open()
    browser.keys("?")
    browser.see("Single keys are commands")
    browser.run("document.querySelector('dialog input').click()")
    browser.keys(Keys.ESCAPE)
    browser.keys("g", "q")
    browser.see("Overview", css="h1")


def test_read_only_dashboard_offers_no_change(shop: Shop, browser: Browser) -> None:
    whole = browser.address
    with serve(shop.server.dashboard.wsgi(read_only=True), "127.0.0.1", 0) as address:
        browser.address = address
        try:
            for page in ("queues", "tasks", "task", "running", "dead", "schedules", "worker"):
                route, texts = PAGES[page]
                browser.open(route.format(**shop.uuids))
                browser.see("read-only", texts[0])
                buttons = browser.run(
                    "return [...document.querySelectorAll('main button:not(.chip)')]"
                    ".map((button) => button.innerText)"
                )
                assert set(buttons) <= {"Copy as Python", "Copy id", "mail.lost"}
        finally:
            browser.driver.get("about:blank")
            browser.address = whole
