from __future__ import annotations

import numpy as np
import pytest

import matcha


def test_the_least_own_weight_is_of_rounds_that_really_happen():
    """Before, matchings of probability 3e-10 made it −0.982."""
    plan = matcha.plan(matcha.families.paper("er8"), 0.5, "matcha")
    seen = min(np.diag(plan.mixing_matrix(k)).min() for k in range(5000))
    assert plan.smallest_self_weight == pytest.approx(seen, abs=1e-9)
    assert f"{seen:.3f}" in plan.notes[-1]
