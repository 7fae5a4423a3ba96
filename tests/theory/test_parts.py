from __future__ import annotations

import matcha
from matcha.theory.parts import Parts


def test_every_plan_has_the_parts_that_theory_asks_for():
    plan = matcha.plan(matcha.families.ring(4), 0.5, "periodic")
    asked = [name for name in vars(Parts) if not name.startswith("_")]
    assert "schedule" in asked
    for name in asked:
        getattr(plan, name)
