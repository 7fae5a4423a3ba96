from __future__ import annotations

import pytest

from matcha.errors import InputError
from matcha.wires import WIRES, Float, LowRank, parse_wire


@pytest.mark.parametrize("name", WIRES)
def test_a_wire_is_known_by_its_name(name) -> None:
    wire = parse_wire(name)
    assert wire.name == name
    assert parse_wire(wire) is wire
    assert 0 < wire.size_ratio() <= 1
    assert 0 <= wire.residual < 1


def test_smaller_wires_leave_more() -> None:
    found = [parse_wire(name) for name in ("float32", "modulo:8", "modulo:4", "modulo:3")]
    assert sorted(found, key=lambda wire: -wire.size_ratio()) == found
    assert sorted(found, key=lambda wire: wire.residual) == found


def test_small_matrices_and_vectors_are_not_factored() -> None:
    wire = LowRank(rank=4)
    assert wire.is_factored((256, 1152))
    assert not wire.is_factored((10, 4))
    assert not wire.is_factored((4096,))
    shapes = [(256, 128, 3, 3), (256,)]
    assert wire.message_bytes(shapes) < Float().message_bytes(shapes) / 100


def test_ranks_and_bits_have_bounds() -> None:
    for name in ("lowrank:65", "modulo:1", "modulo:x", "zip"):
        with pytest.raises(InputError):
            parse_wire(name)


@pytest.mark.parametrize("wire", [None, 3, ["float32"]])
def test_what_is_no_wire_is_refused_in_a_sentence(wire):
    with pytest.raises(InputError, match=r"the wire is .* one of float32, bfloat16"):
        parse_wire(wire)
