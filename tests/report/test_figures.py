from __future__ import annotations

import pytest
from matplotlib.colors import to_hex

import matcha
from matcha import families
from matcha.errors import InputError, WriteError
from matcha.report import figures
from matcha.report.explorer import network
from matcha.strategies import Matcha


def test_width_and_colour_say_matching_and_probability(tmp_path):
    plan = matcha.plan(families.paper("er8"), 0.3, Matcha(effort="none"))
    figure = figures.draw_plan(plan)
    lines = figure.axes[0].collections[0]
    widths = dict(zip(plan.topology.links, lines.get_linewidths(), strict=True))
    colors = dict(zip(plan.topology.links, map(tuple, lines.get_colors()), strict=True))
    activity = plan.link_activity
    ranked = sorted(plan.topology.links, key=activity.get)
    assert [widths[e] for e in ranked] == sorted(widths.values())
    for matching in plan.matchings:
        assert len({colors[link] for link in matching}) == 1
    assert len(set(colors.values())) == len(plan.matchings)


def test_a_sweep_draws_a_line_for_each_strategy(tmp_path):
    sweep = matcha.sweep(
        families.ring(4), budgets=[0.5, 1.0], strategies=[Matcha(effort="none"), "periodic"]
    )
    figure = figures.draw_sweep(sweep)
    axes = figure.axes[0]
    assert [line.get_label() for line in axes.get_lines()] == ["matcha", "periodic"]
    drawn = list(axes.get_lines()[1].get_ydata())
    assert drawn == [p.consensus_error for p in sweep.of("periodic")]
    figures.save_figure(figure, tmp_path / "new" / "sweep.pdf")
    assert (tmp_path / "new" / "sweep.pdf").read_bytes().startswith(b"%PDF")


def test_unknown_formats_are_refused():
    with pytest.raises(InputError, match=r"\.png, \.svg, \.pdf"):
        figures.check_format("figure.gif")


def test_a_figure_is_written_whole_or_not_at_all(tmp_path, no_room):
    figure = figures.draw_plan(matcha.plan(families.ring(4), 0.5, "matcha"))
    with no_room, pytest.raises(WriteError, match="cannot write"):
        figures.save_figure(figure, tmp_path / "plan.PNG")
    assert not list(tmp_path.iterdir())
    figures.save_figure(figure, tmp_path / "plan.PNG")
    assert (tmp_path / "plan.PNG").read_bytes().startswith(b"\x89PNG")


def test_a_link_of_no_matching_is_drawn_as_unused():
    """A one-way cycle leaves the chord out: its colour was looked up and missed."""
    chord = matcha.Topology.from_links([(0, 1), (1, 2), (2, 0), (0, 2)], directed=True)
    plan = matcha.plan(chord, 0.5, "greedy")
    colors = figures.draw_plan(plan).axes[0].collections[0].get_colors()
    unused = [plan.link_activity[link] == 0 for link in plan.topology.links]
    assert unused.count(True) == 1
    assert [to_hex(color) == "#bbbbbb" for color in colors] == unused


@pytest.mark.parametrize("strategy", ["local", "allreduce"])
def test_an_average_over_all_workers_is_not_drawn_on_links(strategy):
    plan = matcha.plan(families.ring(4), 0.5, strategy)
    assert not any(plan.link_activity.values())
    legend = figures.draw_plan(plan).axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["not used by this plan"]
    stop = network(plan.topology, [plan])["strategies"][strategy][0]
    assert stop["averages"]
    assert stop["matching"] is None
    assert stop["activation"] == [0, 0, 0, 0]
