"""Kernels for GPUs: what torch computes. Without a GPU, Triton's interpreter runs them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from tests.wires.definition import Definition
from tests.wires.networks import LINKS, SHAPES, compact, drift, padded, round_of, segments, start
from tests.wires.test_batched import run
from tests.wires.test_kernels import BITS, STRANGE, scales_of_step

from matcha.wires import Modulo, modulo
from matcha.wires.batched import meetings_of
from matcha.wires.coding import Coder, Sent

gpu = pytest.importorskip(
    "matcha.wires.gpu", reason="Triton is not installed", exc_type=ImportError
)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what is meant to be
DEVICE = "cuda" if os.environ["TRITON_INTERPRET"] == "0" else "cpu"


def coder(wire: Modulo, values: torch.Tensor, *, fused: bool) -> Coder:
    made = Coder(wire, values)
    made.kernels = gpu if fused else modulo
    return made


def encoded(wire, values, scales, *, fused, lower) -> tuple[Sent, torch.Tensor, Coder]:
    end = coder(wire, values, fused=fused)
    message = torch.empty(end.message_bytes(len(values)), dtype=torch.uint8, device=DEVICE)
    return end.encode(values, 0, scales, message, lower=lower), message, end


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("number", [1, 2, 5, 9])
@pytest.mark.parametrize("bits", BITS)
def test_messages_are_those_of_torch_where_sums_are_exact(bits, number, lower) -> None:
    wire, random = Modulo(bits=bits), torch.Generator().manual_seed(number)
    values = torch.randint(-99, 100, (number, 256), generator=random).float()
    values[::3] *= 2.0**20  # numbers of up to 30 bits
    values[1::3] *= 2.0**-20
    scales = scales_of_step(wire, torch.ones(number))
    scales *= 2.0 ** torch.randint(-3, 4, (number,), generator=random)
    values, scales = values.to(DEVICE), scales.to(DEVICE)
    ours, message, end = encoded(wire, values, scales, fused=True, lower=lower)
    torchs, expected, twin = encoded(wire, values, scales, fused=False, lower=lower)
    assert ours.checks.equal(torchs.checks)
    assert ours.residues.equal(torchs.residues)
    assert message.equal(expected)
    torch.testing.assert_close(end.finest, twin.finest)


@pytest.mark.parametrize("honest", [True, False], ids=["messages", "any bytes"])
@pytest.mark.parametrize("number", [1, 3, 8])
@pytest.mark.parametrize("bits", BITS)
def test_the_difference_is_torchs(bits, number, honest) -> None:
    wire, random = Modulo(bits=bits), torch.Generator().manual_seed(number)
    values = torch.randn(number, 256, generator=random)
    other = values + 0.3 * torch.randn(number, 256, generator=random)
    scales = (torch.rand(number, generator=random) + 0.3).to(DEVICE)
    values, other = values.to(DEVICE), other.to(DEVICE)
    _, arrived, _ = encoded(wire, other, scales, fused=False, lower=False)
    if not honest:
        arrived.copy_(torch.randint(0, 256, arrived.shape, generator=random))
    for lower in (True, False):
        coded, _, end = encoded(wire, values, scales, fused=True, lower=lower)
        twin = coder(wire, values, fused=False)
        found, expected = torch.zeros(2, number, 256, device=DEVICE)
        end.move(found, coded, arrived, weight=1.0)
        twin.move(expected, coded, arrived, weight=1.0)
        # A root is rounded the right way here, and by torch on a CPU not always.
        torch.testing.assert_close(found, expected, rtol=2.0**-22, atol=0)
        torch.testing.assert_close(end.seen, twin.seen, rtol=2.0**-22, atol=0)
    if honest and bits == 8:
        assert bool(found.any())


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE.keys())
def test_strange_values_stay_in_their_block(strange, both) -> None:
    wire, random = Modulo(bits=4), torch.Generator().manual_seed(4)
    values = torch.randint(-9, 10, (3, 256), generator=random) * 2.0**-6
    other = values + torch.randint(-1, 2, (3, 256), generator=random) * 2.0**-7
    clean = [end.clone().to(DEVICE) for end in (values, other)]
    values[1, 100] = strange
    if both:
        other[1, 7] = strange
    ends = [end.to(DEVICE) for end in (values, other)]
    scales = scales_of_step(wire, torch.full((3,), 2.0**-5)).to(DEVICE)
    moves = []
    for pair in (ends, clean):
        sent = [encoded(wire, end, scales, fused=True, lower=e == 0) for e, end in enumerate(pair)]
        for e in range(2):
            difference = torch.zeros(3, 256, device=DEVICE)
            coded, message, end = sent[e][0], sent[1 - e][1], sent[e][2]
            end.move(difference, coded, message, weight=1.0)
            assert bool(end.finest.isfinite().all())
            moves.append(difference)
    assert moves[0].equal(moves[1])
    assert moves[2].equal(moves[3])
    assert moves[0][[0, 2]].equal(moves[2][[0, 2]])
    assert bool(moves[0].isfinite().all())
    if not np.isfinite(strange):
        assert not moves[0][1].any()


@pytest.mark.parametrize(
    ("bits", "mixing"), [(8, "pairwise"), (4, "laplacian"), (3, "pairwise"), (2, "laplacian")]
)
def test_meetings_of_all_workers_at_once_are_the_definition(bits, mixing) -> None:
    x = start()
    wire = Modulo(bits=bits)
    definition = Definition(wire, SHAPES, x)
    rows = padded(x).to(DEVICE)
    meetings: Any = meetings_of(wire, segments(), rows, LINKS)
    meetings._fused = gpu
    for k in range(4):
        jump = 300.0 if k == 2 else 1.0
        x = definition.mix(round_of(k, mixing), x + drift(k, jump=jump))
        rows += padded(drift(k, jump=jump)).to(DEVICE)
        run(meetings, round_of(k, mixing), rows)
        np.testing.assert_allclose(compact(rows.cpu()), x, rtol=0, atol=1e-10)
    assert padded(compact(rows.cpu())).equal(rows.cpu())  # padding stays zero
