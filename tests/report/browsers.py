"""A real Chromium for the tests: the system's, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ARTIFACTS = Path(__file__).parent.parent.parent / "runs" / "test-artifacts" / "report"


def executable():
    """The browser's path; without one the test is skipped, but never in CI."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        reason = "no Chromium here: `make browser` installs one (apt-get install chromium)"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@contextmanager
def chromium():
    """A headless browser."""
    path = executable()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def opened(browser, path, *, width=1280, height=900, scheme="light"):
    """The page at a path or address, with what it asked of the network and said on the console."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.requests, page.complaints = [], []
    page.on("request", lambda r: page.requests.append(r.url))
    page.on("console", lambda m: page.complaints.append(f"{m.type}: {m.text}"))
    page.on("pageerror", lambda e: page.complaints.append(f"error: {e}"))
    page.goto(path if isinstance(path, str) else path.as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    try:
        yield page
    finally:
        context.close()


def see_everything(page):
    """Scroll through the page, so that every chart is drawn."""
    page.evaluate(
        """async () => {
        const pause = () => new Promise((done) => setTimeout(done, 20));
        const waiting = () => [...document.querySelectorAll(".chart:not([data-drawn])")]
            .filter((chart) => chart.offsetParent);
        for (let tries = 0; waiting().length && tries < 500; tries += 1) {
            waiting()[0].scrollIntoView({ behavior: "instant", block: "center" });
            await pause();
        }
        if (waiting().length) throw new Error(`never drawn: ${waiting().map((c) => c.id)}`);
        scrollTo({ top: 0, behavior: "instant" });
        await pause();
    }"""
    )
