from __future__ import annotations

import pytest

from matcha.errors import InputError
from reproduction.paper import GROUPS, group


def test_groups_start_with_vanilla_and_name_plans_once():
    for entry in GROUPS.values():
        assert entry.trials[0].strategy == "vanilla"
        assert len(set(entry.trials)) == len(entry.trials)
        files = [trial.plan_file for trial in entry.trials if trial.stretch == 1]
        assert len(set(files)) == len(files)
        assert list(entry.rates) == sorted(entry.rates)
    assert group("ptb").num_workers == 8
    with pytest.raises(InputError, match="did you mean 'cifar10'"):
        group("cifar1")
