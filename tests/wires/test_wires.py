from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.wires.definition import (
    Definition,
    Scales,
    modulo_difference,
    order_of,
    rotate,
    unrotate,
)
from tests.wires.networks import SHAPES, WIRES, drift, round_of, start

from matcha import Round
from matcha.wires import Modulo, parse_wire
from matcha.wires.modulo import check_weights

PAIR = {"matchings": (((0, 1),),), "indices": (0,), "mixing": "pairwise", "weight": 0.5}


def test_a_rotation_keeps_lengths_and_is_undone() -> None:
    x = np.random.default_rng(0).normal(size=(3, 256))
    np.testing.assert_allclose(np.linalg.norm(rotate(x), axis=1), np.linalg.norm(x, axis=1))
    np.testing.assert_allclose(unrotate(rotate(x)), x, atol=1e-14)
    spike = np.zeros((1, 256))
    spike[0, 7] = 16.0
    np.testing.assert_allclose(np.abs(rotate(spike)), 1.0)  # no value stands out


@pytest.mark.parametrize("mixing", ["laplacian", "pairwise"])
@pytest.mark.parametrize("name", WIRES)
def test_every_wire_keeps_the_sum_also_when_values_wrap(name, mixing) -> None:
    x = start()
    definition = Definition(parse_wire(name), SHAPES, x)
    for k in range(12):
        x = x + drift(k, jump=1000.0 if k in (3, 7) else 1.0)  # far beyond any scale
        mixed = definition.mix(round_of(k, mixing), x)
        assert np.abs(mixed.sum(0) - x.sum(0)).max() <= 1e-12 * np.abs(x).sum(0).max()
        x = mixed


@pytest.mark.parametrize(
    ("name", "left"), [("modulo:8", 0.01), ("modulo:4", 0.15), ("modulo:3", 0.4)]
)
def test_a_meeting_leaves_little_of_a_difference(name, left) -> None:
    x = start()
    definition = Definition(parse_wire(name), SHAPES, x)
    shares = []
    for k in range(60):
        x = x + drift(k)
        mixed = definition.mix(round_of(0, "pairwise"), x)
        shares.append(((mixed[0] - mixed[1]) ** 2).sum() / ((x[0] - x[1]) ** 2).sum())
        x = mixed
    assert np.mean(shares[30:]) < left


@pytest.mark.parametrize("bits", [8, 4, 3])
def test_a_failed_check_says_how_wide_the_window_must_be(bits) -> None:
    """A jump of a thousand windows costs a few meetings; widening alone took one a factor of 1.5.

    In training the first tenth of all meetings over 3 bits was lost so.
    """
    wire, random = parse_wire(f"modulo:{bits}"), np.random.default_rng(bits)
    pair = Round(**PAIR)
    x = np.repeat(random.normal(size=(1, 2560)), 2, 0)
    definition = Definition(wire, [(2560,)], x)
    x[1] += 1000 * definition.scales[0][0].held.mean() * random.normal(size=2560)
    before = np.square(x[1] - x[0]).sum()
    for _ in range(6):
        x = definition.mix(pair, x)
    assert np.square(x[1] - x[0]).sum() < {8: 0.01, 4: 0.3, 3: 0.7}[bits] * before


def test_low_rank_finds_a_difference_of_low_rank() -> None:
    x = start()
    definition = Definition(parse_wire("lowrank:2"), SHAPES, x)
    random = np.random.default_rng(4)
    ends = random.normal(size=(40, 2)), random.normal(size=(2, 30))
    for _ in range(12):
        x[0, :1200] += 0.05 * (ends[0] @ ends[1]).ravel()
        before = x[0] - x[1]
        x = definition.mix(round_of(0, "pairwise"), x)
    assert ((x[0] - x[1]) ** 2).sum() < 0.01 * (before**2).sum()


@settings(max_examples=50)
@given(bits=st.sampled_from([2, 3, 4, 8]), seed=st.integers(0, 10**6), jump=st.floats(0, 50))
def test_a_check_fails_at_both_ends_or_at_neither(bits, seed, jump) -> None:
    """The lower end's view of a link is the upper end's: one number, one verdict."""
    random = np.random.default_rng(seed)
    lower = random.normal(size=(3, 256))
    upper = lower + jump * 0.01 * random.normal(size=(3, 256))
    wire = Modulo(bits=bits)
    scales = Scales(lower, wire), Scales(upper, wire)
    found = modulo_difference(wire, lower, upper, scales)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(scales[0].seen, scales[1].seen)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_two_values_that_wrap_in_opposite_directions_are_noticed(bits) -> None:
    """A plain sum misses them at every scale: the workers would never meet there again."""
    wire = Modulo(bits=bits)
    lower = np.random.default_rng(1).normal(size=(1, 256))
    scales = Scales(lower, wire), Scales(lower, wire)
    step = scales[0].sent[0] * wire.clip_range / wire.half
    apart = np.zeros((1, 256))
    apart[0, [3, 200]] = 2 * wire.half * step, -2 * wire.half * step
    modulo_difference(wire, lower, lower + unrotate(apart), scales)
    assert scales[0].seen[0] > scales[0].held[0]  # left alone, and wider next time


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_four_values_whose_weights_cancel_are_noticed_soon(bits) -> None:
    """One order of weights misses them at every scale; in training, blocks stayed apart so."""
    wire, pair = Modulo(bits=bits), Round(**PAIR)
    orders = check_weights(256)
    x = np.repeat(np.random.default_rng(1).normal(size=(1, 256)), 2, 0)
    definition = Definition(wire, [(256,)], x)
    (scales,) = definition.scales[0]
    order = order_of(scales.sent)[0]
    step = scales.sent[0] * wire.clip_range / wire.half
    apart = np.zeros((1, 256))
    places = _cancelling(orders[order])
    apart[0, list(places)] = np.array([1, 1, -1, -1]) * 50 * 2 * wire.half * step
    x[1] += unrotate(apart)[0]
    before = np.square(x[1] - x[0]).sum()
    for _ in range(40):
        x = definition.mix(pair, x)
    assert np.square(x[1] - x[0]).sum() < 0.05 * before


def _cancelling(weights: np.ndarray) -> tuple[int, int, int, int]:
    """Places a, b, c, d with w_a + w_b = w_c + w_d."""
    place = {int(weight): k for k, weight in enumerate(weights)}
    return place[3], place[101], place[5], place[99]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_difference_much_finer_than_the_grid_is_not_made_larger(bits) -> None:
    """What rounding adds was moved by as well: 4 times such a difference was left after it."""
    wire, random = Modulo(bits=bits), np.random.default_rng(bits)
    lower = random.normal(size=(400, 256))
    scales = Scales(lower, wire), Scales(lower, wire)
    step = scales[0].sent * wire.clip_range / wire.half
    difference = 0.15 * step[:, None] * random.normal(size=lower.shape)
    found = modulo_difference(wire, lower, lower + difference, scales)
    left = np.square(difference - found).sum() / np.square(difference).sum()
    assert left < 1.3


def test_equal_workers_are_left_alone() -> None:
    x = start()
    for name in ("modulo:8", "modulo:4", "modulo:3", "lowrank:2"):
        mixed = Definition(parse_wire(name), SHAPES, x).mix(round_of(2, "pairwise"), x)
        np.testing.assert_array_equal(mixed, x)


@pytest.mark.parametrize("name", ["modulo:8", "modulo:3"])
def test_what_is_not_finite_stays_where_it_is(name) -> None:
    x = start()
    definition = Definition(parse_wire(name), SHAPES, x)
    x[0, 5], x[2, 1300] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        mixed = definition.mix(round_of(0, "pairwise"), x + drift(0))
    assert np.isfinite(mixed[[1, 3, 4]]).all()
    assert (~np.isfinite(mixed)).sum() == 2
