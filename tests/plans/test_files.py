"""Plans of either kind: read as what they are, and offering all that engines ask of one."""

from __future__ import annotations

import pytest

import matcha
from matcha import families
from matcha.errors import PlanError
from matcha.plans import PlanLike, StagedPlan, load_plan
from matcha.strategies import staged_plan


@pytest.fixture(scope="module")
def staged():
    return staged_plan(families.ring(4), {0: 0.5, 40: 0.25}, "periodic")


def test_a_file_is_read_as_the_kind_of_plan_that_it_holds(staged, tmp_path):
    path = tmp_path / "staged.json"
    staged.save(path)
    again = load_plan(path)
    assert isinstance(again, StagedPlan)
    assert (again, again.digest) == (staged, staged.digest)
    assert StagedPlan.load(path) == staged
    staged.levels[0].save(tmp_path / "plain.json")
    plain = load_plan(tmp_path / "plain.json")
    assert isinstance(plain, matcha.Plan)
    assert plain == staged.levels[0]
    with pytest.raises(PlanError, match="not a staged"):
        StagedPlan.load(tmp_path / "plain.json")


def test_a_file_that_was_changed_is_refused(staged, tmp_path):
    path = tmp_path / "staged.json"
    staged.save(path)
    path.write_text(path.read_text().replace("40", "30"))
    with pytest.raises(PlanError, match="checksum"):
        load_plan(path)


def test_either_kind_has_all_that_engines_ask_for(staged):
    asked = [name for name in vars(PlanLike) if not name.startswith("_")]
    assert {"rounds", "level_at", "digest"} <= set(asked)
    for plan in (staged, staged.levels[0]):
        assert [name for name in asked if not hasattr(plan, name)] == []
