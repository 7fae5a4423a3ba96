from __future__ import annotations

from dataclasses import replace
from typing import Any

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
from matcha.wires.coding import Coder


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


@pytest.mark.parametrize("mixing", ["laplacian", "pairwise"])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_a_simulation_on_a_cpu_moves_as_real_workers_do(bits, mixing) -> None:
    """By compiled kernels, each link in one pass; real workers send bytes."""
    rows, wire = padded(start("float32")), parse_wire(f"modulo:{bits}")
    meetings: Any = meetings_of(wire, segments(), rows, LINKS)
    if meetings._fused is None:
        pytest.skip("no C compiler when the package was installed")
    ends = [Coder(wire, row.view(-1, 256)) for row in rows]
    padding = padded(np.ones_like(start("float32"))) == 0
    for k in range(8):
        rows += padded(drift(k, "float32", jump=300.0 if k == 5 else 1.0))
        if k == 6:
            rows[1, 7] = torch.nan
        if k == 7:
            rows[1, :256] = 0.1
        # From the same values and scales: a last bit may decide which point of a grid is nearest.
        real = rows.clone()
        for end, scales in zip(ends, meetings.state["scales"], strict=True):
            end.scales.copy_(scales)
        round = round_of(k, mixing)
        if mixing == "pairwise":
            round = replace(round, matchings=round.matchings[:1], indices=round.indices[:1])
        run(meetings, round, rows)
        meet_by_messages(ends, round, real)
        real[padding] = 0.0
        torch.testing.assert_close(rows, real, rtol=0, atol=1e-6, equal_nan=True)
        # What NaN leaves of a scale a simulation drops.
        found = torch.stack([end.scales for end in ends])[:, 1:]
        torch.testing.assert_close(meetings.state["scales"][:, 1:], found)
    assert not bool(rows[padding].any())


def meet_by_messages(ends: list[Coder], round: Round, x: torch.Tensor) -> None:
    base = x.clone() if round.mixing == "laplacian" else x
    for end in ends:
        end.begin()
    for matching in round.matchings:
        for i, j in matching:
            common = ends[i].common(ends[j].told())
            sent: list[Any] = []
            for e in (i, j):
                message = torch.empty(ends[e].message_bytes(len(common)), dtype=torch.uint8)
                values = base[e].view(-1, 256)
                sent.append((ends[e].encode(values, 0, common, message, lower=e == i), message))
            for e, (coded, _), (_, arrived) in ((i, *sent), (j, *sent[::-1])):
                weight = round.weight if e == i else -round.weight
                ends[e].move(x[e].view(-1, 256), coded, arrived, weight=weight)
    for e in {worker for link in round.links for worker in link}:
        ends[e].end()
