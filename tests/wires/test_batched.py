from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.wires.definition import Definition
from tests.wires.networks import (
    LINKS,
    SHAPES,
    WIRES,
    compact,
    drift,
    padded,
    round_of,
    segments,
    start,
)

from matcha import Round
from matcha.wires import parse_wire
from matcha.wires.batched import meetings_of


def run(meetings, round: Round, x: torch.Tensor) -> None:
    """A round by its matchings, as the simulator does it."""
    base = x.clone() if round.mixing == "laplacian" else x
    meetings.begin()
    for matching in round.matchings:
        partner, move = torch.arange(len(x)), torch.zeros(len(x), dtype=x.dtype)
        for i, j in matching:
            partner[i], partner[j], move[i], move[j] = j, i, round.weight, -round.weight
        meetings.meet(base, x, partner, move)
    meetings.end()


@pytest.mark.parametrize("mixing", ["laplacian", "pairwise"])
@pytest.mark.parametrize("name", WIRES)
def test_meetings_of_all_workers_at_once_are_the_definition(name, mixing) -> None:
    x = start()
    definition = Definition(parse_wire(name), SHAPES, x)
    rows = padded(x)
    meetings = meetings_of(parse_wire(name), segments(), rows, LINKS)
    for k in range(20):
        jump = 300.0 if k in (5, 11) else 1.0
        x = definition.mix(round_of(k, mixing), x + drift(k, jump=jump))
        rows += padded(drift(k, jump=jump))
        run(meetings, round_of(k, mixing), rows)
        np.testing.assert_allclose(compact(rows), x, rtol=0, atol=1e-10)
    assert padded(compact(rows)).equal(rows)  # padding stays zero


@pytest.mark.parametrize("name", ["modulo:4", "lowrank:2"])
def test_a_reset_forgets_everything(name) -> None:
    rows = padded(start("float32"))
    meetings = meetings_of(parse_wire(name), segments(), rows, LINKS)
    state = {**meetings.state, **meetings.link_state}
    fresh = {key: value.clone() for key, value in state.items()}
    run(meetings, round_of(2, "pairwise"), rows + padded(drift(0, "float32")))
    assert any(not value.equal(fresh[key]) for key, value in state.items())
    meetings.reset(rows)
    assert all(value.equal(fresh[key]) for key, value in state.items())
