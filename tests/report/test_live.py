"""The live page in a real browser: a run that grows, and what the page becomes at its end."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import replace

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect
from tests.report.browsers import ARTIFACTS, chromium, opened, see_everything

import matcha
from matcha.errors import InputError
from matcha.records import Record, RunHeader, RunWriter
from matcha.report.live import HEARTBEAT, LivePage, parse_address

PLAN = matcha.plan(matcha.families.paper("er8"), 0.3, "greedy", wire="modulo:3")
WIDTHS = {"desk": 1280, "phone": 390}


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


class GrowingRun:
    """A run's directory, written a record at a time as training does."""

    def __init__(self, folder) -> None:
        self.folder = folder
        header = RunHeader(
            name="growing",
            kind="training",
            task="digits",
            strategy="greedy",
            budget=0.3,
            seed=0,
            num_workers=8,
            clock="wall",
            wire="modulo:3",
            config={"settings": {"epochs": 12}},
        )
        self.writer = RunWriter(folder, header, PLAN)
        self.epoch = 0

    def at(self, iteration, members=range(8)) -> None:
        told = {"iteration": iteration, "members": list(members)}
        (self.folder / HEARTBEAT).write_text(json.dumps(told))

    def grow(self, epochs=1) -> None:
        for _ in range(epochs):
            self.epoch += 1
            k = self.epoch
            record = Record(
                iteration=20 * k,
                epoch=float(k),
                train_loss=2.0 / k,
                worker_loss=2.1 / k,
                test_accuracy=1 - 0.5 / k,
                consensus_distance=1e-2 / k,
                predicted_consensus=1.2e-2 / k,
                comm_units=20.0 * k,
                megabytes_sent=0.4 * k,
                time=1.5 * k,
            )
            for worker in range(8):
                self.writer.record(replace(record, worker=worker, comm_seconds=0.5))
            self.writer.record(record)


@pytest.fixture
def run(tmp_path):
    with (grown := GrowingRun(tmp_path / "run")).writer:
        yield grown


@pytest.fixture
def live(run):
    with LivePage(run.folder, "0") as served:
        yield served


def follows(page, iteration) -> None:
    page.wait_for_selector(f'html[data-live="{iteration}"]', state="attached")


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
        return answer.read().decode()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", WIDTHS)
def test_it_follows_a_run_and_becomes_its_report(browser, run, live, device, scheme) -> None:
    with opened(browser, live.url, width=WIDTHS[device], scheme=scheme) as page:
        assert page.locator("#curves").is_hidden()  # nothing is recorded yet
        run.grow(2)
        page.wait_for_selector("#curves:visible")
        run.at(44, members=[0, 1, 2, 3, 4, 5, 6])
        follows(page, 44)
        assert page.text_content("#live-epoch") == "2 of 12"
        assert page.text_content("#live-members") == "7 of 8"
        assert page.locator("#live-graph .node.away").count() == 1
        run.grow(4)
        run.at(133)
        expect(page.locator("#live-epoch")).to_have_text("6 of 12")
        met = {link for k in range(133) for link in PLAN.round(k).links}
        page.wait_for_selector("#live-graph .lit", state="attached")
        lit = page.locator("#live-graph .lit").first.get_attribute("data-link")
        assert tuple(map(int, lit.split("-"))) in met
        # Only charts in sight are drawn again: those who train may share the processor.
        points = "document.getElementById('chart-consensus').data.map((line) => line.x.length)"
        assert 6 not in page.evaluate(points)
        page.locator("#chart-consensus").scroll_into_view_if_needed()
        while 6 not in page.evaluate(points):
            page.wait_for_timeout(50)
        page.evaluate("scrollTo(0, 0)")
        # Each link's share of all that was sent: 8 workers, 0.4 MB per record.
        page.locator("details[data-table=traffic] summary").click()
        cells = page.locator("details[data-table=traffic] tbody td:last-child")
        expect(cells).to_have_count(len(PLAN.topology.links))
        total = sum(float(text.replace(",", "")) for text in cells.all_text_contents())
        assert total == pytest.approx(8 * 0.4 * 6, rel=1e-2)
        see_everything(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[device]
        assert [url for url in page.requests if not url.startswith((live.url, "data:"))] == []
        violations = Axe().run(page).response["violations"]
        assert [v["id"] for v in violations if v["impact"] in ("serious", "critical")] == []
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=ARTIFACTS / f"live-{device}-{scheme}.png", full_page=True)
        run.grow(6)
        live.finish()
        page.wait_for_selector("#results:visible")
        assert page.locator("#live").count() == 0
        see_everything(page)
        policy = page.get_attribute("meta[http-equiv=Content-Security-Policy]", "content")
        assert "connect-src" not in policy  # it stands alone now
        assert page.complaints == []


def test_another_run_brings_its_own_charts(browser, tmp_path) -> None:
    """As `matcha simulate` does, which starts one run after another."""
    with LivePage(tmp_path, "0") as live:
        assert "Waiting for the first words" in get(live.url)
        with GrowingRun(tmp_path / "a").writer, opened(browser, live.url) as page:
            grown = GrowingRun(tmp_path / "b")
            with grown.writer:
                grown.grow(2)
                page.wait_for_selector("#legend label")
                assert page.text_content(".headline").startswith("Still running")


def test_only_this_machine_or_the_token_is_answered(run) -> None:
    run.grow()
    with LivePage(run.folder, "0") as live:
        assert "matcha" in get(live.url)
        for url, headers in ((live.url, {"Host": "evil.example"}), (f"{live.url}etc/passwd", {})):
            with pytest.raises(urllib.error.HTTPError, match=r"403|404"):
                get(url, **headers)
        with pytest.raises(InputError, match="choose another port"):
            LivePage(run.folder, live.url.removeprefix("http://").strip("/"))
    with LivePage(run.folder, "0.0.0.0:0") as live:
        bare, _, token = live.url.partition("?token=")
        assert len(token) > 16
        assert json.loads(get(f"{bare}now?token={token}"))["run"] == 0
        for wrong in (bare, f"{bare}?token=x", f"{bare}data?token="):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                get(wrong)


@pytest.mark.parametrize("where", ["", "port", "127.0.0.1", "1:2:x", "70000", "8080/"])
def test_an_address_that_is_none_is_refused(where) -> None:
    with pytest.raises(InputError, match="PORT or HOST:PORT"):
        parse_address(where)
