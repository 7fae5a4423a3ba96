"""64 workers × 2,000 iterations still make a page that is small, and small work for a browser."""

from __future__ import annotations

import json

import pytest
from tests.quadratics import write_quadratic_run
from tests.report.browsers import ARTIFACTS, chromium, opened, see_everything

import matcha
from matcha.report import write_report
from matcha.strategies import strategy_with


@pytest.mark.slow
def test_a_large_run_gives_a_small_page(tmp_path):
    topology = matcha.families.erdos_renyi(64, 0.12, seed=1)
    for strategy in ("vanilla", "matcha"):
        plan = matcha.plan(
            topology, 1.0 if strategy == "vanilla" else 0.3, strategy_with(strategy, effort="none")
        )
        write_quadratic_run(tmp_path / strategy, plan, iterations=2_000, traced_iterations=100)
    path = write_report([tmp_path], tmp_path / "report.html")
    assert path.stat().st_size < 5_000_000
    with chromium() as browser, opened(browser, path) as page:
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        page.reload()
        page.wait_for_selector("#chart-time[data-drawn]")
        metrics = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
        wall = page.evaluate("performance.now()") / 1e3
        elements = page.evaluate("document.querySelectorAll('*').length")
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        (ARTIFACTS / "scale.json").write_text(
            json.dumps(
                {
                    "bytes": path.stat().st_size,
                    "busy_seconds": metrics["TaskDuration"],
                    "wall_seconds_at_most": wall,
                    "elements": elements,
                }
            )
        )
        see_everything(page)
        page.screenshot(path=ARTIFACTS / "report-64-workers.png", full_page=True)
        # Counts, not seconds: what the page draws must not grow with iterations times workers.
        assert elements < 20_000
        assert page.complaints == []
