"""What strategies share: notes, own weights, and what is more than the budget."""

from __future__ import annotations

import pytest

import matcha
from matcha import families
from matcha.errors import InputError
from matcha.schedules import Cycle
from matcha.strategies.parts import assemble_plan, check_affordable, check_probabilities
from matcha.strategies.strategy import Request
from matcha.timing import Units


def request(**options):
    return Request(
        **{
            "topology": families.ring(4),
            "budget": 0.5,
            "strategy": "mine",
            "seed": 0,
            "mixing": "pairwise",
            "timing": Units(),
            **options,
        }
    )


def test_notes_warn_of_negative_weights_and_of_better_alternatives():
    ring = matcha.plan(families.ring(8), 0.5, "matcha")
    assert any("below zero" in note for note in ring.notes)
    assert any("periodic" in note for note in ring.notes)
    assert ring.smallest_self_weight < 0
    assert "below zero" in ring.summary()
    assert matcha.plan(families.path(2), 0.5, "matcha").notes == ()


def test_own_matchings_are_the_full_exchange():
    own = (((0, 1),), ((2, 3),), ((1, 2), (0, 3)))
    assert request(matchings=own).colors == own
    assert len(request().colors) == 2


def test_the_users_weight_takes_the_place_of_the_strategys():
    parts = {
        "schedule": Cycle(cycle=((0,), (1,)), num_matchings=2),
        "alpha": 0.5,
        "notes": ("found.",),
    }
    assert assemble_plan(request(), **parts).alpha == 0.5
    own = assemble_plan(request(alpha=0.25), **parts)
    assert own.alpha == 0.25
    assert own.notes == ("found.", "the mixing weight 0.25 is yours; 0.5 was found best.")


def test_what_is_beyond_the_budget_names_the_budget_that_would_do():
    check_affordable(request(), 1.0, 1.0, "the rounds")
    with pytest.raises(InputError, match=r"the rounds take 0\.75 .* give budget=0\.75"):
        check_affordable(request(), 1.5, 1.0, "the rounds")
    with pytest.raises(InputError, match="use less"):
        check_affordable(request(), 3.0, 1.0, "the rounds")


def test_probabilities_are_one_per_matching():
    matchings = request().colors
    assert check_probabilities([0.5, 0.25], matchings) == (0.5, 0.25)
    with pytest.raises(InputError, match="2 probabilities were given for 1 matchings"):
        check_probabilities((0.5, 0.25), matchings[:1])
