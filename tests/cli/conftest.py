from __future__ import annotations

import pytest

import matcha
from matcha.strategies import staged_plan


@pytest.fixture(scope="session")
def staged_file(tmp_path_factory):
    """A saved plan for a ring of three: all links for four iterations, then every fourth time."""
    staged = staged_plan(matcha.families.ring(3), {0: 1.0, 4: 0.25}, strategy="periodic")
    path = tmp_path_factory.mktemp("staged") / "plan.json"
    staged.save(path)
    return path
