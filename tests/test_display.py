"""What a notebook, a terminal and pandas show of topologies, plans, sweeps and comparisons."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

import matcha
from matcha._io.tables import Table
from matcha.errors import InputError, PackageError
from matcha.records import Record, Run, RunHeader
from matcha.report import compare

SVG = "{http://www.w3.org/2000/svg}"
ODD = matcha.Topology.from_links([("a<b", "&c"), ("&c", "d"), ("d", "a<b")])


def svg_of(html):
    return ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + len("</svg>")])


@pytest.fixture(scope="module")
def sweep():
    return matcha.sweep("ring:4", [0.5, 1.0], ["vanilla", "periodic", "greedy"])


@pytest.fixture(scope="module")
def comparison():
    runs = []
    for strategy, slope in (("vanilla", 0.1), ("greedy", 0.2)):
        plan = matcha.plan("ring:4", 0.5, strategy)
        header = RunHeader(
            kind="simulation", name=strategy, task="logistic", strategy=strategy, seed=0,
            budget=plan.budget, num_workers=4, clock="simulated", config={},
        )  # fmt: skip
        records = tuple(
            Record(iteration=k, epoch=k, time=k, train_loss=1 - slope * k) for k in range(5)
        )
        runs.append(Run(header=header, plan=plan, records=records))
    return compare(runs)


@pytest.mark.parametrize("topology", [ODD, matcha.families.ring(4), matcha.families.star(70)])
def test_a_topology_is_a_picture_with_every_worker_and_link(topology):
    svg = svg_of(topology._repr_html_())
    titles = [title.text for title in svg.iter(f"{SVG}title")]
    assert titles == [str(label) for label in topology.labels]
    assert len(list(svg.iter(f"{SVG}line"))) == len(topology.links)
    x0, y0, width, height = map(float, svg.get("viewBox").split())
    for circle in svg.iter(f"{SVG}circle"):
        assert x0 < float(circle.get("cx")) < x0 + width
        assert y0 < float(circle.get("cy")) < y0 + height


def test_a_directed_topology_has_arrowheads():
    ring = matcha.Topology.from_links([(0, 1), (1, 2), (2, 0)], directed=True)
    assert len(list(svg_of(ring._repr_html_()).iter(f"{SVG}polygon"))) == 3


def test_a_network_too_large_to_look_at_is_a_sentence():
    assert matcha.families.ring(300)._repr_html_() == "<p>ring:300: 300 workers, 300 links</p>"


def test_a_plan_shows_how_often_links_are_used_and_its_summary():
    plan = matcha.plan("paper:er8", 0.3, "greedy")
    svg = svg_of(plan._repr_html_())
    widths = [float(line.get("stroke-width")) for line in svg.iter(f"{SVG}line")]
    ranked = np.argsort(list(plan.link_activity.values()), kind="stable")
    assert np.all(np.diff(np.array(widths)[ranked]) >= 0)
    assert widths[ranked[-1]] > widths[ranked[0]]
    assert plan.summary().replace("&", "&amp;") in plan._repr_html_()
    staged = matcha.staged_plan("ring:4", {0: 0.5, 9: 0.25})
    assert staged.summary() in staged._repr_html_()


def test_an_animation_holds_the_rounds_and_the_values(tmp_path):
    plan = matcha.plan("ring:4", 0.5, "greedy")
    animation = plan.animate(6, values=[0.0, 1.0, 2.0, 5.0])
    svg = svg_of(animation._repr_html_())
    for link, line in zip(plan.topology.links, svg.iter(f"{SVG}line"), strict=True):
        shown = line.find(f"{SVG}animate").get("values").split(";")
        met = [link in [tuple(sorted(pair)) for pair in plan.round(k).links] for k in range(6)]
        assert [value == "1" for value in shown] == [False, *met]
    x = np.array([[0.0], [1.0], [2.0], [5.0]])
    for k in range(6):
        x = plan.round(k).mix(x)
    assert f"round 6: standard deviation {x.std():.3g} of 1.87" in "".join(svg.itertext())
    animation.save(tmp_path / "rounds.svg")
    assert ElementTree.parse(tmp_path / "rounds.svg").getroot().tag == f"{SVG}svg"


def test_printing_a_sweep_prints_a_table(sweep):
    lines = str(sweep).splitlines()
    assert lines[0] == "ring:4: 4 workers, 4 links"
    assert lines[1].split()[:2] == ["strategy", "budget"]
    assert [line.split()[0] for line in lines[2:-1]] == [p.strategy for p in sweep]
    assert len({len(line) for line in lines[1:-1]}) == 1
    assert "mean over a cycle" in lines[-1]
    assert sweep._repr_html_().count("<tr>") == 1 + len(sweep)
    wired = matcha.sweep("ring:4", 0.5, "greedy", wires=["float32", "modulo:3"])
    assert [line.split()[1] for line in str(wired).splitlines()[2:4]] == ["float32", "modulo:3"]


def test_printing_a_comparison_prints_its_rows_and_verdict(comparison):
    lines = str(comparison).splitlines()
    assert lines[0].startswith("run")
    assert [line.split()[0] for line in lines[1:3]] == ["vanilla", "greedy"]
    assert lines[-1] == comparison.verdict.sentence
    assert comparison._repr_html_().count("<tr>") == 3


def test_tables_become_frames_where_pandas_is(sweep, comparison):
    pytest.importorskip("pandas")
    assert list(sweep.to_frame()["strategy"]) == [point.strategy for point in sweep]
    assert list(comparison.to_frame()["label"]) == [row.label for row in comparison.rows]


def test_without_pandas_or_matplotlib_the_error_says_what_to_install(sweep, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(PackageError, match="pip install pandas"):
        sweep.to_frame()
    monkeypatch.setattr("matcha.errors.is_installed", lambda package: False)
    for value in (sweep, ODD, sweep.plans[0]):
        with pytest.raises(PackageError, match=re.escape('pip install "matcha-sgd[plot]"')):
            value.plot()


def test_plots_go_on_given_axes_or_a_new_figure(sweep, comparison):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot

    for value in (ODD, sweep.plans[-1], sweep, comparison):
        new = value.plot()
        given = pyplot.figure().add_subplot()
        assert value.plot(ax=given) is given
        assert len(given.get_children()) == len(new.get_children())
    pyplot.close("all")
    with pytest.raises(InputError, match="did you mean 'rho'"):
        sweep.plot("roh")
    with pytest.raises(InputError, match="did you mean 'test_accuracy'"):
        comparison.plot("test_accuracies")


def test_a_table_escapes_what_it_is_given():
    assert "<b>" not in Table(["<b>"], [["<b>"]])._repr_html_()


def test_values_of_another_number_of_workers_are_refused():
    with pytest.raises(InputError, match="one number for each worker: 4"):
        matcha.plan("ring:4", 0.5).animate(3, values=[1.0, 2.0])
