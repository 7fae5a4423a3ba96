from __future__ import annotations

from pathlib import Path

import pytest

import matcha
from matcha import families
from matcha.errors import InputError
from matcha.strategies import Greedy, Vanilla


def test_a_sweep_is_the_plans_it_is_made_of():
    calls = []
    points = matcha.sweep(
        families.paper("er8"),
        budgets=[0.5, 0.1],
        strategies=["matcha", "vanilla"],
        matchings=families.paper_matchings("er8"),
        alpha="rho",
        progress=lambda *news: calls.append(news),
    )
    assert [(p.strategy, p.budget) for p in points] == [
        ("matcha", 0.1),
        ("matcha", 0.5),
        ("vanilla", 1.0),
    ]
    assert calls == [(1, 3, "plans"), (2, 3, "plans"), (3, 3, "plans")]
    assert [p.rho for p in points.of("matcha")] == pytest.approx([0.9368, 0.6440], abs=5e-4)
    assert [p.rho for p in points] == [plan.rho for plan in points.plans]
    assert points.of("vanilla")[0].consensus_error == pytest.approx(0.60, abs=0.01)


def test_every_strategy_has_the_weight_that_is_best_for_what_is_compared():
    names = ["vanilla", "periodic", "matcha", "single"]
    fair = matcha.sweep("paper:er8", 0.1, names)
    paper = matcha.sweep("paper:er8", 0.1, names, alpha="rho")
    for one, other in zip(fair, paper, strict=True):
        assert one.consensus_error < other.consensus_error
        assert one.rho > other.rho - 1e-12
    # No weight nearby is better, for any of them.
    for plan in fair.plans:
        for factor in (0.99, 1.01):
            nearby = plan.with_process(alpha=factor * plan.alpha)
            assert nearby.consensus_error > plan.consensus_error
    own = matcha.sweep("paper:er8", 0.1, [Vanilla(alpha=0.2), Vanilla(weights="metropolis")])
    assert own.points[0].alpha == 0.2
    assert matcha.plan("paper:er8", 0.1, "vanilla").alpha == paper.points[0].alpha
    with pytest.raises(InputError, match="no weight that is best for rho"):
        Greedy(alpha="rho")
    assert Greedy(alpha="error").alpha == "error"
    assert matcha.plan("ring:4", 0.3, Greedy(alpha="error")) == matcha.plan("ring:4", 0.3, Greedy())


def test_pages_have_the_figures_of_the_tool():
    fair = matcha.sweep("paper:er8", 0.1, ["vanilla", "periodic", "matcha", "greedy"])
    errors = {point.strategy: point.consensus_error for point in fair}
    why, greedy = (Path("docs", name).read_text() for name in ("why.md", "greedy.md"))
    cells = [f"{errors[name]:.2f}" for name in ("periodic", "matcha", "greedy")]
    assert f"| er8 | 0.1 | 0.5 | {' | '.join(cells)} |" in why
    assert f"| er8 | 1 (vanilla) | 5 | {errors['vanilla']:.2f} |" in why
    (row,) = (
        line for line in greedy.splitlines() if line.startswith("| er8 | 0.1 | ") and "±" in line
    )
    assert row.split(" | ")[2] == f"{errors['matcha']:.3g}"
    assert row.split(" | ")[5] == f"{errors['greedy']:.3g}"


def test_a_sweep_needs_something_to_sweep():
    with pytest.raises(InputError, match="at least one budget"):
        matcha.sweep(families.ring(4), budgets=[], strategies=["matcha"])


def test_a_budget_buys_more_rounds_over_a_smaller_wire():
    points = matcha.sweep(
        families.paper("er8"), [0.05, 0.3, 0.6, 1.0],
        [Greedy(effort="none"), "vanilla", "allreduce"], wires=["float32", "modulo:4"],
    )  # fmt: skip
    # All of vanilla's rounds fit into 0.13 of its time: one budget above that is enough.
    assert [p.budget for p in points.of("greedy", "modulo:4")] == [0.05, 0.3]
    assert len(points.of("greedy", "float32")) == 4
    assert points.of("greedy", "modulo:4")[0].consensus_error < (
        0.5 * points.of("greedy", "float32")[0].consensus_error
    )
    assert [p.wire for p in points.of("vanilla")] == ["float32", "modulo:4"]
    assert [p.wire for p in points.of("allreduce")] == ["float32"]
    assert points.wires == ("float32", "modulo:4")
    assert [plan.wire.name for plan in points.plans] == [p.wire for p in points]


def test_one_budget_strategy_and_wire_need_no_list():
    ring = matcha.families.ring(4)
    one = matcha.sweep(ring, 0.5, "periodic", wires="float32")
    assert one.points == matcha.sweep(ring, [0.5], ["periodic"], wires=["float32"]).points
    tuned = matcha.tune(
        ring, compute_time=0.1, link_time=0.1, strategies="periodic", budgets=0.5, wires="float32"
    )
    assert [(p.strategy, p.budget, p.wire) for p in tuned.points] == [("periodic", 0.5, "float32")]


@pytest.mark.parametrize("given", [{"budgets": None}, {"wires": None}, {"strategies": 3j}])
def test_neither_one_value_nor_several_is_refused(given):
    with pytest.raises(InputError, match="one value or a list of several"):
        matcha.sweep("ring:4", **{"budgets": 0.5, "strategies": "vanilla", **given})
