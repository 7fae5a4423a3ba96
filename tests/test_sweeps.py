from __future__ import annotations

import pytest

import matcha
from matcha import families
from matcha.errors import InputError


def test_a_sweep_is_the_plans_it_is_made_of():
    calls = []
    points = matcha.sweep(
        families.paper("er8"),
        budgets=[0.5, 0.1],
        strategies=["matcha", "vanilla"],
        matchings=families.paper_matchings("er8"),
        progress=lambda done, total: calls.append((done, total)),
    )
    assert [(p.strategy, p.budget) for p in points] == [
        ("matcha", 0.1),
        ("matcha", 0.5),
        ("vanilla", 1.0),
    ]
    assert calls == [(1, 3), (2, 3), (3, 3)]
    assert [p.rho for p in points.of("matcha")] == pytest.approx([0.9368, 0.6440], abs=5e-4)
    assert [p.rho for p in points] == [plan.rho for plan in points.plans]
    assert points.of("vanilla")[0].consensus_error == pytest.approx(0.60, abs=0.01)


def test_a_sweep_needs_something_to_sweep():
    with pytest.raises(InputError, match="at least one budget"):
        matcha.sweep(families.ring(4), budgets=[], strategies=["matcha"])
