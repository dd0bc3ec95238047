"""Chromium for the tests of the dashboard, driven by selenium, and axe-core, which judges pages.

Chromium and its driver are Debian packages, that `scripts/get-servers` gets. axe-core is fetched
from npm once, into `build/`; it is a tool of the tests alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
from selenium.common.exceptions import (
    ElementClickInterceptedException,
    StaleElementReferenceException,
)
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.expected_conditions import visibility_of_element_located
from selenium.webdriver.support.wait import WebDriverWait

from machinery_py.testing.waiting import wait_until
from tests.support.private import Private

BUILD = Path(__file__).resolve().parents[2] / "build"
PICTURES = BUILD / "dashboard"  # screenshots, to be looked at
AXE = "axe-core-4.14.1"
FETCH = 60.0  # seconds for npm
PATIENCE = 20.0  # seconds until a page shows what it is to show, on a busy machine

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests in a container run as root
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",  # a container has little of it
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
#: Looks now and then inside the page; asking from outside would keep a processor busy.
WATCH = """
    const [css, texts, wanted, limit, done] = arguments;
    const end = Date.now() + limit;
    const look = () => {
      const shown = document.querySelector(css)?.innerText || "";
      const wrong = texts.filter((text) => shown.includes(text) !== wanted);
      if (!wrong.length || Date.now() > end) done([wrong, shown]);
      else setTimeout(look, 30);
    };
    look();
"""
#: The button or link with a name that can be pressed; of an open dialog, if there is one.
NAMED = """
    const root = document.querySelector("dialog[open]") || document;
    return [...root.querySelectorAll("button, a")].find((one) =>
      !one.disabled && one.checkVisibility() &&
      [one.getAttribute("aria-label"), (one.innerText || "").trim()].includes(arguments[0]));
"""
DESKTOP = (1280, 860)
PHONE = (390, 844)


class Browser(Private):
    """One Chromium with an empty profile.

    Attributes:
        address: of the dashboard; `open` adds to it.
    """

    PROGRAMS: ClassVar[Mapping[str, str]] = {
        "chromium": "chromium",
        "chromedriver": "chromium-driver",
    }
    driver: Chrome

    def __init__(self, address: str) -> None:
        self.address = address
        self.folder = Path(tempfile.mkdtemp(prefix="chromium-"))

    def start(self) -> Self:
        options = ChromeOptions()
        options.binary_location = self.find("chromium")
        for flag in (*FLAGS, f"--user-data-dir={self.folder}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = Chrome(options, ChromeService(self.find("chromedriver")))
        self.driver.set_page_load_timeout(PATIENCE)
        self.resize(DESKTOP)
        return self

    def close(self) -> None:
        if hasattr(self, "driver"):
            self.driver.quit()
        shutil.rmtree(self.folder, ignore_errors=True)

    # Look

    def resize(self, size: tuple[int, int]) -> None:
        """Give the page this size in CSS pixels; a window cannot be as narrow as a phone."""
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False},
        )

    def colours(self, scheme: str) -> None:
        """Let the system of the browser be "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def picture(self, name: str) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(PICTURES / f"{name}.png"))

    def run(self, script: str, *values: object) -> Any:
        return self.driver.execute_script(script, *values)

    def text(self, css: str = "body") -> str:
        """Return the text of an element as it is shown; empty if there is none."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText || ''", css))

    def see(self, *texts: str, css: str = "body", timeout: float = PATIENCE) -> None:
        """Wait until all these texts are shown."""
        missing, shown = self._watch(css, texts, wanted=True, timeout=timeout)
        assert not missing, f"no {missing} in {css}: {shown!r}"

    def see_no(self, *texts: str, css: str = "body") -> None:
        """Wait until none of these texts is shown."""
        there, shown = self._watch(css, texts, wanted=False, timeout=PATIENCE)
        assert not there, f"{there} in {css}: {shown!r}"

    def _watch(
        self, css: str, texts: Sequence[str], *, wanted: bool, timeout: float
    ) -> tuple[list[str], str]:
        """Return the texts that were wrong to the end, and what was shown then."""
        self.driver.set_script_timeout(2 * timeout)
        wrong, shown = self.driver.execute_async_script(WATCH, css, texts, wanted, timeout * 1000)
        return wrong, shown

    def problems(self) -> list[str]:
        """Return what the browser complained about since the last call: scripts, CSP, requests."""
        return [
            str(one["message"])
            for one in self.driver.execute("getLog", {"type": "browser"})["value"]
            if one["level"] in ("SEVERE", "WARNING")
        ]

    def violations(self) -> list[str]:
        """Return what axe-core finds wrong with the page as it is shown."""
        if not self.run("return 'axe' in window"):
            self.run(axe_source())
        found = self.driver.execute_async_script(
            "const done = arguments[0]; axe.run(document, {resultTypes: ['violations']})"
            ".then((r) => done(r.violations), (e) => done([{id: String(e), nodes: []}]))"
        )
        return [
            f"{one['id']}: {node['html'][:200]} {node['failureSummary']}"
            for one in found
            for node in one["nodes"] or [{"html": "", "failureSummary": ""}]
        ]

    # Act

    def open(self, route: str = "#/") -> None:
        """Show a page of the dashboard, loaded anew."""
        self.driver.get("about:blank")
        self.driver.get(self.address + route)
        self.driver.execute_script("localStorage.clear()")

    def press(self, name: str) -> None:
        """Click the button or link with this name, as soon as it can be clicked."""

        def click() -> bool:
            found = self.run(NAMED, name)
            try:
                if found is not None:
                    found.click()
            except (StaleElementReferenceException, ElementClickInterceptedException):
                return False
            return found is not None

        wait_until(click, PATIENCE, f"a button {name!r} that can be clicked")

    def keys(self, *keys: str) -> None:
        """Press keys, wherever the focus is."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def point_at(self, css: str) -> None:
        """Move the pointer there."""
        ActionChains(self.driver).move_to_element(self._element(css)).perform()

    def fill(self, css: str, value: str) -> None:
        """Replace what stands in a field."""
        field = self._element(css)
        field.clear()
        field.send_keys(value)

    def _element(self, css: str) -> WebElement:
        return WebDriverWait(self.driver, PATIENCE).until(
            visibility_of_element_located((By.CSS_SELECTOR, css))
        )


@cache
def axe_source() -> str:
    """Return the code of axe-core; without npm and without the file, the test is skipped."""
    archive = BUILD / f"{AXE}.tgz"
    if not archive.exists():
        BUILD.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            wanted = "@".join(AXE.rsplit("-", 1))
            command = ["npm", "pack", "--silent", "--pack-destination", folder, wanted]
            try:
                subprocess.run(command, check=True, timeout=FETCH, capture_output=True)
            except (OSError, subprocess.SubprocessError) as error:
                words = f"{AXE} is not in {BUILD}, and npm did not get it: {error}"
                if os.environ.get("CI"):
                    pytest.fail(words, pytrace=False)
                pytest.skip(words)
            (Path(folder) / archive.name).replace(archive)
    with tarfile.open(archive) as tar:
        source = tar.extractfile("package/axe.min.js")
        assert source is not None
        return source.read().decode()
