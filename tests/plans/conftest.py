from __future__ import annotations

import pytest

import matcha
from matcha.strategies import strategy_with


@pytest.fixture(scope="session", params=["matcha", "vanilla", "periodic", "single", "greedy"])
def plan(request):
    """A plan of each strategy for the paper's graph of eight."""
    return matcha.plan(
        matcha.families.paper("er8"), 0.4, strategy_with(request.param, effort="none"), seed=3
    )
