"""Compiled kernels: what torch computes, by every kind of vector, and an end with them meets one
without.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tests.wires.test_coding import meet

from matcha.wires import Modulo, kernels, library, modulo
from matcha.wires.coding import Coder, Sent

BITS = [8, 4, 3, 2]
NUMBERS = [1, 2, 3, 7, 64, 257]  # of blocks: 256 are one pass of torch's


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The library, compiled anew: what is tested is the source as it is."""
    folder = tmp_path_factory.mktemp("kernels")
    problem = library.compile_kernels(folder)
    if "No such file" in problem:
        pytest.skip(f"no C compiler: {problem}")
    assert not problem
    loaded = library.load(library.path(folder))
    assert loaded is not None
    return loaded


@pytest.fixture(params=[16, 8, 4])
def lanes(request, compiled, monkeypatch):
    """That library in use, with vectors of at most so many numbers."""
    monkeypatch.setattr(library, "load", lambda: compiled)
    compiled.matcha_limit_lanes(request.param)
    yield request.param
    compiled.matcha_limit_lanes(16)


def coder(wire: Modulo, values: torch.Tensor, *, compiled: bool) -> Coder:
    made = Coder(wire, values)
    assert made.kernels is kernels
    if not compiled:
        made.kernels = modulo
    return made


def encoded(wire, values, scales, *, compiled, lower) -> tuple[Sent, torch.Tensor, Coder]:
    end = coder(wire, values, compiled=compiled)
    message = torch.empty(end.message_bytes(len(values)), dtype=torch.uint8)
    return end.encode(values, 0, scales, message, lower=lower), message, end


def scales_of_step(wire: Modulo, steps: torch.Tensor) -> torch.Tensor:
    return steps * (wire.half / wire.clip_range)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("number", NUMBERS)
def test_messages_are_those_of_torch_where_sums_are_exact(lanes, bits, number) -> None:
    """Whole numbers as values: every byte is the same, rounded the short way and the long."""
    wire, random = Modulo(bits=bits), torch.Generator().manual_seed(number)
    values = torch.randint(-99, 100, (number, 256), generator=random).float()
    values[::3] *= 2.0**20  # numbers of up to 30 bits
    values[1::3] *= 2.0**-20
    scales = scales_of_step(wire, torch.ones(number))
    scales *= 2.0 ** torch.randint(-3, 4, (number,), generator=random)
    for lower in (True, False):
        ours, message, end = encoded(wire, values, scales, compiled=True, lower=lower)
        torchs, expected, twin = encoded(wire, values, scales, compiled=False, lower=lower)
        assert ours.checks.equal(torchs.checks)
        assert ours.residues.equal(torchs.residues)
        assert message.equal(expected)
        torch.testing.assert_close(end.finest, twin.finest)


@pytest.mark.parametrize("bits", BITS)
def test_only_what_lies_between_two_points_may_be_rounded_the_other_way(lanes, bits) -> None:
    wire, random = Modulo(bits=bits), torch.Generator().manual_seed(bits)
    values = torch.randn(300, 256, generator=random)
    scales = torch.rand(300, generator=random) + 0.1
    ours, message, _ = encoded(wire, values, scales, compiled=True, lower=False)
    torchs, _, _ = encoded(wire, values, scales, compiled=False, lower=False)
    apart = (ours.residues - torchs.residues).view(torch.int8).to(torch.int32) >> (8 - bits)
    assert int(apart.abs().max()) <= 1
    assert float((apart != 0).float().mean()) < 1e-3
    # The checks are those of the numbers that were sent.
    weights = modulo.weights(256, torch.int32, values.device)[modulo.orders(scales)]
    assert (ours.checks - torchs.checks).equal((apart * weights).sum(-1, dtype=torch.int32))
    packed = torch.empty(300 * 256 * bits // 8, dtype=torch.uint8)
    modulo.pack(ours.residues.view(-1), bits, packed)
    assert message[: len(packed)].equal(packed)


@pytest.mark.parametrize("bits", BITS)
def test_every_kind_of_vector_sends_the_same_bytes(compiled, monkeypatch, bits) -> None:
    monkeypatch.setattr(library, "load", lambda: compiled)
    values = torch.randn(50, 256, generator=torch.Generator().manual_seed(bits))
    sent = []
    for most in (4, 8, 16):
        compiled.matcha_limit_lanes(most)
        wire = Modulo(bits=bits)
        sent.append(encoded(wire, values, torch.full((50,), 0.3), compiled=True, lower=True)[1])
    assert sent[0].equal(sent[1])
    assert sent[1].equal(sent[2])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("honest", [True, False], ids=["messages", "any bytes"])
def test_the_difference_is_torchs_to_the_last_bit(lanes, bits, number, honest) -> None:
    wire, random = Modulo(bits=bits), torch.Generator().manual_seed(number)
    values = torch.randn(number, 256, generator=random)
    other = values + 0.3 * torch.randn(number, 256, generator=random)
    scales = torch.rand(number, generator=random) + 0.3
    _, arrived, _ = encoded(wire, other, scales, compiled=False, lower=False)
    if not honest:
        arrived.random_(0, 256, generator=random)
    for lower in (True, False):
        coded, _, end = encoded(wire, values, scales, compiled=True, lower=lower)
        twin = coder(wire, values, compiled=False)
        found, expected = torch.zeros(2, number, 256)
        end.move(found, coded, arrived, weight=1.0)
        twin.move(expected, coded, arrived, weight=1.0)
        assert found.equal(expected)
        assert end.seen.equal(twin.seen)
        moved, wanted = values.clone(), values.clone()
        end.move(moved, coded, arrived, weight=0.3)
        twin.move(wanted, coded, arrived, weight=0.3)
        torch.testing.assert_close(moved, wanted, rtol=2.0**-22, atol=1e-7)
    if honest and bits == 8:
        assert bool(found.any())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("first", [True, False])
def test_an_end_with_kernels_meets_one_without(lanes, bits, first) -> None:
    wire, random = Modulo(bits=bits), torch.Generator().manual_seed(bits)
    ends = [torch.randn(70, 256, generator=random) for _ in range(2)]
    ends[1] = ends[0] + 1e-2 * ends[1]
    coders = [coder(wire, end, compiled=(e == 0) == first) for e, end in enumerate(ends)]
    average, far = (ends[0] + ends[1]) / 2, float((ends[0] - ends[1]).norm())
    for _ in range(30):
        lower, upper = meet(coders, ends)
        assert lower.equal(upper)
        ends = [ends[0] + 0.5 * lower, ends[1] - 0.5 * upper]
    torch.testing.assert_close((ends[0] + ends[1]) / 2, average, rtol=0, atol=5e-6)
    assert float((ends[0] - ends[1]).norm()) < 0.05 * far


STRANGE = {
    "NaN": torch.nan,
    "infinity": torch.inf,
    "minus infinity": -torch.inf,
    "largest": torch.finfo(torch.float32).max,
    "large": 1e20,  # its square is none
    "denormal": 1e-42,
    "zero": 0.0,
}


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE.keys())
def test_strange_values_stay_in_their_block(lanes, bits, everywhere, strange) -> None:
    """A pair with kernels, one without and a mixed one find the same, and both ends do."""
    wire, random = Modulo(bits=bits), torch.Generator().manual_seed(bits)
    values = torch.randint(-9, 10, (5, 256), generator=random) * 2.0**-6
    other = values + torch.randint(-1, 2, (5, 256), generator=random) * 2.0**-7
    if everywhere:
        values[2] = strange
    else:
        values[2, 100] = strange
    scales = scales_of_step(wire, torch.full((5,), 2.0**-5))
    found = []
    for pair in ((True, True), (False, False), (True, False)):
        sent = [
            encoded(wire, end, scales, compiled=kind, lower=e == 0)
            for e, (end, kind) in enumerate(zip((values, other), pair, strict=True))
        ]
        for e in range(2):
            difference = torch.zeros(5, 256)
            coded, message, end = sent[e][0], sent[1 - e][1], sent[e][2]
            end.move(difference, coded, message, weight=1.0)
            found.append(difference)
    assert all(one.equal(found[0]) for one in found)
    assert bool(found[0].isfinite().all())
    if strange == torch.inf or strange != strange:
        assert not found[0][2].any()  # a partner is not drawn towards what is no number
    others = [0, 1, 3, 4]
    clean = meet_once(wire, values[others], other[others], scales[others])
    assert found[0][others].equal(clean)
    assert bool(clean.any())


def meet_once(wire, lower, upper, scales) -> torch.Tensor:
    coded, _, end = encoded(wire, lower, scales, compiled=False, lower=True)
    _, arrived, _ = encoded(wire, upper, scales, compiled=False, lower=False)
    found = torch.zeros_like(lower)
    end.move(found, coded, arrived, weight=1.0)
    return found


def test_rows_of_a_larger_piece_are_coded_where_they_begin(lanes) -> None:
    wire, values = Modulo(bits=4), torch.arange(20 * 256).float().view(20, 256) / 1000
    scales = torch.linspace(0.1, 2.0, 20)
    bytes_sent = []
    for kind in (True, False):
        end = coder(wire, values, compiled=kind)
        message = torch.empty(end.message_bytes(3), dtype=torch.uint8)
        end.encode(values[7:10], 7, scales, message, lower=True)
        assert (end.finest != 0).nonzero().flatten().tolist() == [7, 8, 9]
        bytes_sent.append(message)
    assert float((bytes_sent[0] != bytes_sent[1]).float().mean()) < 0.01


@pytest.mark.parametrize(
    "blocks",
    [torch.ones(2, 64), torch.ones(2, 256, dtype=torch.float64)],
    ids=["short blocks", "float64"],
)
def test_other_blocks_are_torchs(lanes, blocks) -> None:
    assert Coder(Modulo(bits=4), blocks).kernels is modulo


def test_without_a_library_torch_does_it_and_the_log_says_so(monkeypatch, tmp_path, caplog) -> None:
    missing = tmp_path / "kernels.so"
    load = library.load
    monkeypatch.setattr(library, "load", lambda: load(missing))
    ends = [torch.ones(3, 256), torch.ones(3, 256) + 1e-3]
    with caplog.at_level(logging.INFO, "matcha"):
        coders = [Coder(Modulo(bits=8), end) for end in ends]
    assert all(coder.kernels is modulo for coder in coders)
    first, second = meet(coders, ends)
    assert first.equal(second)
    assert bool(first.any())
    (record,) = caplog.records
    assert "torch alone" in record.message


def test_a_compiler_that_is_missing_or_fails_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "no-such-compiler" in library.compile_kernels(tmp_path)
    monkeypatch.setenv("CC", "false")
    assert library.compile_kernels(tmp_path).startswith("false ")
    assert not list(Path(tmp_path).iterdir())
