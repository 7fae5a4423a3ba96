"""The report in a real browser: what a reader sees, points at and types."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect
from tests.report.browsers import ARTIFACTS, chromium, opened, see_everything
from tests.report.runs import run_of

import matcha
from matcha.records import read_run
from matcha.report import write_report
from pictures import photograph

WIDTHS = {"desk": 1280, "phone": 390}


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser, report_page):
    with opened(browser, report_page) as found:
        yield found


def sweep_of(page):
    return json.loads(page.text_content("#matcha-data"))["networks"][0]


def shown_widths(page):
    return page.evaluate(
        """[...document.querySelectorAll("#graph .link")]
            .map((link) => Number(link.getAttribute("stroke-width")))"""
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", WIDTHS)
def test_loads_without_network_or_complaints_and_fits_the_screen(
    browser, report_page, device, scheme
):
    with opened(browser, report_page, width=WIDTHS[device], scheme=scheme) as page:
        see_everything(page)
        assert page.complaints == []
        assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[device]
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        assert page.locator(".chart .main-svg").count() >= 7
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=ARTIFACTS / f"report-{device}-{scheme}.png", full_page=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", WIDTHS)
def test_axe_finds_no_serious_issue(browser, report_page, device, scheme):
    with opened(browser, report_page, width=WIDTHS[device], scheme=scheme) as page:
        see_everything(page)
        # Every kind of table is opened, but not those of thousands of rows: axe reads each cell.
        for table in ("sweep", "links", "loads"):
            page.locator(f"details[data-table={table}] summary").click()
            page.locator(f"details[data-table={table}] tbody tr").first.wait_for()
        page.locator("#again summary").first.click()
        violations = Axe().run(page).response["violations"]
        serious = [
            f"{v['id']}: {v['help']} {[node['html'][:160] for node in v['nodes'][:3]]}"
            for v in violations
            if v["impact"] in ("serious", "critical")
        ]
        assert serious == []


def choose(page, strategy):
    """Click a strategy's button, which lies unseen over its name."""
    button = page.locator(f"#strategy input[value={strategy}]")
    button.click()
    expect(button).to_be_checked()


def test_the_slider_moves_rho_error_time_and_widths_to_the_sweep(page):
    net = sweep_of(page)
    for strategy in ("matcha", "periodic"):
        choose(page, strategy)
        for stop in (0, len(net["budgets"]) // 2, len(net["budgets"]) - 1):
            page.locator("#budget").fill(str(stop))
            point = net["strategies"][strategy][stop]
            assert page.text_content("#budget-value") == f"{net['budgets'][stop]:g}"
            assert float(page.text_content("#rho")) == pytest.approx(point["rho"], abs=6e-5)
            assert float(page.text_content("#comm")) == pytest.approx(point["time"], rel=1e-3)
            assert float(page.text_content("#error")) == pytest.approx(point["error"], rel=1e-3)
            expected = [1 + 7 * activation for activation in point["activation"]]
            assert shown_widths(page) == pytest.approx(expected, abs=1e-3)


def test_the_strategies_stand_side_by_side_at_the_sliders_budget(page):
    net = sweep_of(page)
    page.locator("#budget").fill("2")
    for strategy, points in net["strategies"].items():
        cells = page.locator(f"#side-by-side tr[data-strategy={strategy}] td").all_text_contents()
        point = points[2] if len(points) > 1 else points[0]
        if strategy == "silent":  # never settles
            assert (cells[1], point["error"]) == ("–", None)
            continue
        assert float(cells[0]) == point["budget"]
        assert float(cells[1]) == pytest.approx(point["error"], rel=1e-3)
        rho, over = cells[3].split()
        assert float(rho) == pytest.approx(point["rho"], abs=6e-5)
        assert over in ("step", "cycle")


def test_hover_and_focus_show_a_links_numbers(page):
    net = sweep_of(page)
    choose(page, "vanilla")
    i, j = net["links"][3]
    x, y = page.evaluate(
        """(name) => {
        const line = document.querySelector(`[data-link="${name}"] .hit`);
        line.scrollIntoView({ behavior: "instant", block: "center" });
        const [from, to] = ["1", "2"].map((end) =>
            new DOMPoint(line[`x${end}`].baseVal.value, line[`y${end}`].baseVal.value)
                .matrixTransform(line.getScreenCTM()));
        // A place on the link that no other link crosses.
        for (let t = 0.1; t < 0.9; t += 0.05) {
            const [x, y] = [from.x + t * (to.x - from.x), from.y + t * (to.y - from.y)];
            const there = document.elementFromPoint(x, y).closest("[data-link]");
            if (there && there.dataset.link === name) return [x, y];
        }
        return null;
    }""",
        f"{i}-{j}",
    )
    page.mouse.move(x, y)
    shown = page.text_content("#link-numbers")
    assert f"Link {i} – {j}" in shown
    assert "active in 100 % of iterations" in shown
    assert page.locator("#tip").is_visible()
    page.mouse.move(0, 0)
    assert not page.locator("#tip").is_visible()
    page.locator("#graph [role=option]").first.focus()
    page.keyboard.press("ArrowRight")
    i, j = net["links"][1]
    assert f"Link {i} – {j}" in page.text_content("#link-numbers")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Link")


def test_the_first_screen_holds_the_budget_and_a_chart(browser, report_page):
    for width, height in ((1280, 900), (390, 800)):
        with opened(browser, report_page, width=width, height=height) as page:
            page.wait_for_selector("#chart-time[data-drawn]")
            box = page.locator("#chart-time .nsewdrag").bounding_box()
            assert box["y"] + box["height"] <= height
            budget = page.locator(".facts li", has_text="budget").bounding_box()
            assert budget["y"] < height


def test_the_page_opens_on_the_winner(page):
    data = json.loads(page.text_content("#matcha-data"))
    winner = data["runs"][data["winner"]]
    assert winner["label"] in page.text_content(".headline")
    expect(page.locator(f"#strategy input[value={winner['strategy']}]")).to_be_checked()
    assert page.text_content("#budget-value") == f"{winner['budget']:g}"
    chosen = page.evaluate("document.getElementById('timeline-run').selectedOptions[0].text")
    assert chosen == winner["label"]


def test_the_targets_label_stands_beside_the_curves(page):
    page.wait_for_selector("#chart-time .annotation")
    plot = page.locator("#chart-time .nsewdrag").bounding_box()
    label = page.locator("#chart-time .annotation").bounding_box()
    assert label["x"] >= plot["x"] + plot["width"] - 1


def test_matchings_and_strategies_share_no_colour(page):
    for theme in ("light", "dark"):
        colours = page.evaluate(
            """(theme) => {
            document.documentElement.dataset.theme = theme;
            const of = (letter) => [...Array(letter === "s" ? 12 : 10).keys()].map((i) =>
                getComputedStyle(document.documentElement).getPropertyValue(`--${letter}${i}`).trim());
            return [of("s"), of("m")];
        }""",
            theme,
        )
        assert all(colours[0] + colours[1])
        assert not set(colours[0]) & set(colours[1])


def test_every_chart_has_a_legend(page):
    page.wait_for_selector("html[data-complete]", state="attached")
    for chart in ("chart-error", "chart-rho", "chart-consensus", "chart-loads"):
        figure = page.locator(f"figure[data-chart={chart}]")
        names = {name.strip() for name in figure.locator(".keys li").all_text_contents()}
        assert {"greedy", "matcha"} <= names
    assert page.locator("#legend label").count() == 4
    assert page.locator("#kinds li").count() == 3


def test_a_picture_of_the_whole_page_holds_every_chart_without_scrolling(browser, report_page):
    with opened(browser, report_page) as page:
        page.wait_for_selector("html[data-complete]", state="attached")
        assert page.evaluate("scrollY") == 0
        assert page.locator(".chart:visible:not([data-drawn])").count() == 0
        assert page.locator(".chart .main-svg").count() >= 7


@pytest.mark.parametrize(
    ("button", "name", "begins"),
    [
        ("figure[data-chart=chart-time] >> text=PNG", "matcha-time.png", b"\x89PNG"),
        ("figure[data-chart=chart-time] >> text=SVG", "matcha-time.svg", b"<svg"),
        ("figure[data-chart=chart-time] >> text=CSV", "matcha-time.csv", b"run,seconds,"),
        ("figure[data-drawing=graph] >> text=PNG", "matcha-graph.png", b"\x89PNG"),
        ("figure[data-drawing=graph] >> text=SVG", "matcha-graph.svg", b"<svg"),
        ("#results-csv", "matcha-results.csv", b"run,budget,"),
    ],
)
def test_charts_and_tables_can_be_kept_as_files(page, tmp_path, button, name, begins):
    page.wait_for_selector("html[data-complete]", state="attached")
    with page.expect_download() as download:
        page.locator(button).first.click()
    assert download.value.suggested_filename == name
    download.value.save_as(tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)
    assert page.complaints == []


def test_tables_that_are_too_wide_say_that_they_scroll(browser, report_page):
    with opened(browser, report_page, width=390) as page:
        table = page.locator("#results .scroll")
        expect(table).to_have_class("scroll more-right")
        table.evaluate("(box) => { box.scrollLeft = 1e6; }")
        expect(table).to_have_class("scroll more-left")
    with opened(browser, report_page, width=1280) as page:
        expect(page.locator("#results .scroll")).to_have_class("scroll")


def test_the_keyboard_reaches_every_control(page):
    see_everything(page)
    wanted = page.evaluate(
        """() => {
        const name = (e) => e.id || e.name || e.textContent.trim();
        const seen = [...document.querySelectorAll("button, select, input, summary, .scroll")]
            .filter((e) => e.checkVisibility());
        return [...new Set(seen.map(name))];
    }"""
    )
    reached = set()
    for _ in range(120):
        page.keyboard.press("Tab")
        focused = page.evaluate(
            """() => {
            const e = document.activeElement;
            if (e === document.body) return null;
            const box = e.getBoundingClientRect();
            return [e.id || e.name || e.textContent.trim(), box.width > 0];
        }"""
        )
        if focused is None:
            break
        assert focused[1], f"{focused[0]} has the focus but no place on the page"
        reached.add(focused[0])
    assert set(wanted) <= reached
    page.locator("#budget").focus()
    before = page.text_content("#rho")
    page.keyboard.press("ArrowLeft")
    assert page.text_content("#rho") != before


def test_the_legend_hides_a_run_everywhere(page):
    see_everything(page)

    def names(chart):
        return page.evaluate(f"document.getElementById('{chart}').data.map((t) => t.name)")

    assert "matcha" in names("chart-time")
    page.get_by_label("matcha", exact=True).and_(page.locator("input[type=checkbox]")).uncheck()
    for chart in ("chart-epoch", "chart-time", "chart-consensus", "chart-loads"):
        assert "matcha" not in names(chart)
        assert "vanilla" in names(chart)


def test_charts_answer_to_hover(page):
    page.locator("#chart-time").scroll_into_view_if_needed()
    page.wait_for_selector("#chart-time[data-drawn]")
    box = page.locator("#chart-time .nsewdrag").bounding_box()
    for step in range(10):
        page.mouse.move(box["x"] + 12 + 9 * step, box["y"] + 10 + 14 * step)
        page.wait_for_timeout(60)
        if page.locator("#chart-time .hovertext").count():
            break
    assert "training loss" in page.locator("#chart-time .hovertext").first.text_content()


def test_the_theme_button_turns_the_page_and_its_charts(page):
    ink = "getComputedStyle(document.querySelector('#chart-time .xtitle')).fill"
    page.wait_for_selector("#chart-time .xtitle")
    light = page.evaluate(ink)
    page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate(ink) != light


def test_tables_hold_what_the_charts_show(page):
    net = sweep_of(page)
    page.locator("details[data-table=sweep] summary").click()
    rows = page.locator("details[data-table=sweep] tbody tr")
    rows.first.wait_for()
    assert rows.count() == sum(len(points) for points in net["strategies"].values())
    page.locator("details[data-table=links] summary").click()
    links = page.locator("details[data-table=links] tbody tr")
    links.first.wait_for()
    assert links.count() == len(net["links"])


def test_the_timeline_pages_through_the_rounds(page):
    page.locator("#chart-timeline").scroll_into_view_if_needed()
    page.wait_for_selector("#chart-timeline[data-drawn]")
    before = page.evaluate("document.getElementById('chart-timeline').layout.xaxis.range[0]")
    page.locator("#window").fill("5")
    after = page.evaluate("document.getElementById('chart-timeline').layout.xaxis.range[0]")
    assert after > before
    assert page.text_content("#window-value") == "5"
    page.select_option("#timeline-run", label="vanilla")
    names = page.evaluate("document.getElementById('chart-timeline').data.map((t) => t.name)")
    assert names == ["computing", "talking"]


def test_paper_gets_the_light_theme_and_every_chart(browser, report_page):
    widest = "Math.max(...[...document.querySelectorAll('.main-svg')].map((s) => s.clientWidth))"
    with opened(browser, report_page, scheme="dark") as page:
        see_everything(page)
        on_screen = page.evaluate(widest)
        page.emulate_media(media="print")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        assert page.evaluate(widest) <= 181 / 25.4 * 96  # the printed page is 180 mm wide
        page.emulate_media(media="screen")
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        page.wait_for_timeout(200)
        assert page.evaluate(widest) == on_screen
        page.pdf(path=ARTIFACTS / "report.pdf", format="A4")
        shown = page.locator(".chart:visible").count()  # a chart that has nothing to say is hidden
        assert page.locator(".chart[data-drawn]:visible").count() == shown > 5
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert (ARTIFACTS / "report.pdf").read_bytes().startswith(b"%PDF")


def test_a_page_of_plans_alone_explores_without_complaints(browser, tmp_path):
    plan = matcha.plan(matcha.families.ring(5), 0.5, "matcha")
    path = write_report([], tmp_path / "plans.html", plans=[plan])
    with opened(browser, path) as page:
        see_everything(page)
        assert page.complaints == []
        assert page.locator("h2:visible").all_text_contents() == ["What a budget buys"]
        assert float(page.text_content("#rho")) == pytest.approx(plan.rho, abs=6e-5)


def test_a_strategy_not_planned_at_a_stop_shows_its_nearest_plan(browser, tmp_path):
    ring = matcha.families.ring(5)
    plans = [matcha.plan(ring, b, "periodic") for b in (0.25, 0.5)]
    plans.append(matcha.plan(ring, 0.5, "matcha"))
    path = write_report([], tmp_path / "plans.html", plans=plans)
    with opened(browser, path) as page:
        for stop, budget in enumerate(("0.25", "0.5")):
            page.locator("#budget").fill(str(stop))
            for strategy, shown in (("periodic", budget), ("matcha", "0.5")):
                cells = page.locator(f"#side-by-side tr[data-strategy={strategy}] td")
                assert cells.first.text_content() == shown
        assert page.complaints == []


def test_a_diverged_run_leaves_the_charts_to_the_others(browser, run_folders, tmp_path):
    runs = [read_run(folder) for folder in run_folders]
    ends = [replace(runs[0].records[-1], train_loss=value) for value in (1e12, float("nan"))]
    broken = replace(runs[0], records=(*runs[0].records, *ends))
    path = write_report([broken, *runs[1:]], tmp_path / "diverged.html")
    highest = max(record.train_loss for run in runs[1:] for record in run.records)
    top = "document.getElementById('chart-epoch')._fullLayout.yaxis.range[1]"
    with opened(browser, path) as page:
        see_everything(page)
        assert page.complaints == []
        page.select_option("#metric", "train_loss")
        assert page.evaluate(top) == pytest.approx(math.log10(1.15 * highest), abs=1e-3)
        page.locator("#log").uncheck()
        assert page.evaluate(top) == pytest.approx(1.15 * highest, rel=1e-3)
        assert "run that did not diverge" in page.text_content("#target-note")


def test_runs_that_never_reach_the_target_squash_no_others(browser, tmp_path):
    runs = [
        run_of([4, 1, 0.4, 0.3, 0.2], strategy="greedy", tmp_path=tmp_path),
        run_of([4, *[2.0] * 60], strategy="vanilla", tmp_path=tmp_path),
    ]
    page_file = write_report(runs, tmp_path / "report.html", target_loss=0.5)
    end = "document.getElementById('chart-epoch')._fullLayout.xaxis.range[1]"
    with opened(browser, page_file) as page:
        assert 2 < page.evaluate(end) < 4
        assert "Double-click shows runs to their end" in page.text_content("#curves-note")
        page.locator("#chart-epoch .nsewdrag").dblclick()
        page.wait_for_timeout(500)
        assert page.evaluate(end) >= 60
        picture = tmp_path / "page.png"
        photograph(browser, page_file, picture)
        height, width = picture.read_bytes()[20:24], picture.read_bytes()[16:20]
        assert int.from_bytes(width, "big") == 1280
        assert 500 < int.from_bytes(height, "big") < 900


def test_a_strategy_over_two_wires_has_a_look_for_each(browser, tmp_path):
    ring = matcha.families.ring(6)
    plans = [matcha.plan(ring, 0.5, "greedy", wire=wire) for wire in ("float32", "modulo:4")]
    with opened(browser, write_report([], tmp_path / "plans.html", plans=plans)) as page:
        names = page.locator("#side-by-side tbody tr").evaluate_all(
            "(rows) => rows.map((row) => row.dataset.strategy)"
        )
        assert names == ["greedy", "greedy, modulo:4"]
        looks = page.locator("#side-by-side tbody svg line").evaluate_all(
            "(lines) => lines.map((line) => line.getAttribute('stroke'))"
        )
        assert len(set(looks)) == 2
        # Both at one budget: nothing to draw by budget, and all columns have room.
        assert page.locator("#chart-error").is_hidden()
        assert page.locator("#chart-rho").is_hidden()
        room = "(table) => table.parentElement.clientWidth - table.scrollWidth"
        assert page.locator("#side-by-side").evaluate(room) >= 0
        assert page.complaints == []


def test_no_zero_is_drawn_on_a_logarithmic_axis(browser, tmp_path):
    """All-reduce leaves workers equal, at distance 0: not a fall to the foot of the axis."""
    runs = [
        run_of([4, 1, 0.5], strategy=name, consensus_distance=distance, tmp_path=tmp_path)
        for name, distance in (("allreduce", 0.0), ("greedy", 0.1))
    ]
    with opened(browser, write_report(runs, tmp_path / "report.html")) as page:
        page.wait_for_selector("#chart-consensus[data-drawn]")
        drawn = page.evaluate(
            "document.getElementById('chart-consensus').data.map((t) => [t.name, t.y])"
        )
        assert drawn == [["allreduce", [None] * 3], ["greedy", [0.1] * 3]]
        assert not page.complaints


def test_the_results_fit_the_page_with_several_seeds(browser, tmp_path):
    told = {"test_accuracy": 0.91, "test_accuracy_error": 0.01, "consensus_distance": 0.012345}
    runs = [
        run_of(
            [4, 1.23456, 0.56789], strategy=name, seed=seed, seconds=1 + 0.01 * seed,
            megabytes_sent=123.4, worker_loss=0.4567, comm_seconds=0.123,
            config={"choices": {"seed": seed}}, tmp_path=tmp_path, **told,
        )
        for name in ("vanilla", "allreduce", "greedy") for seed in (0, 1)
    ]  # fmt: skip
    with opened(browser, write_report(runs, tmp_path / "report.html"), width=1280) as page:
        wide, room = page.evaluate(
            "(({ scrollWidth, clientWidth }) => [scrollWidth, clientWidth])"
            "(document.querySelector('table.results').parentElement)"
        )
        assert wide <= room
