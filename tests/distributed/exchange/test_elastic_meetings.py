"""Elastic meetings over memory; those over links that really fail are in test_membership.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.distributed.exchange import test_codecs
from tests.wires.definition import Definition
from tests.wires.networks import SHAPES, compact, drift, padded, round_of, start

from matcha import Round
from matcha.distributed import Pending
from matcha.distributed.exchange.codecs import FloatCodec
from matcha.distributed.exchange.exchange import Exchange
from matcha.distributed.exchange.hooks import ElasticMeetings
from matcha.distributed.exchange.meeting import Meeting, meetings
from matcha.distributed.transports.base import Tag
from matcha.errors import PeerLostError
from matcha.testing import MemoryNetwork, MemoryTransport, run_threads
from matcha.wires import parse_wire

VALUES = np.array([[1.0, 5.0], [2.0, -4.0], [9.0, 0.0]])
MATCHINGS = (((0, 1),), ((1, 2),))


class Place(MemoryTransport):
    """A network in memory from which workers may be missing, and a last byte be lost."""

    missing: frozenset[int] = frozenset()
    loses_last_byte = False

    def begin(self, iteration: int) -> None:
        self.began = iteration

    def meets(self, peer: int, iteration: int) -> bool:
        return not {peer, self.rank} & self.missing

    def connection(self, peer: int) -> object:
        return self.network

    def post(self, messages):
        last = any(m.tag == Tag.CONFIRM and m.incoming is not None for m in messages)
        if last and self.loses_last_byte:
            return Lost()
        return super().post(messages)


class Lost(Pending):
    """What never comes."""

    def wait(self, timeout: float) -> None:
        raise PeerLostError("the link is gone.", 0)


def held(mixing: str, missing: frozenset[int] = frozenset(), loses: int | None = None):
    """All workers' values after one round, and their meetings."""
    weight = 0.5 if mixing == "pairwise" else 0.25
    round = Round(matchings=MATCHINGS, indices=(0, 1), mixing=mixing, weight=weight)

    def work(transport):
        place = Place(transport.network, transport.rank)
        place.missing, place.loses_last_byte = missing, loses == place.rank
        values = torch.from_numpy(VALUES[place.rank].copy())
        exchange = Exchange(place, [FloatCodec([values], bucket_bytes=1000)], timeout=20)
        met = ElasticMeetings(exchange, place, [values])
        exchange.hooks.append(met)
        if place.rank not in missing:
            held = exchange.run(round, meetings(round, place.rank), 4)
            assert held == met.held
        return values.numpy(), met

    values, met = zip(*run_threads(3, work), strict=True)
    return round, np.stack(values), met


@pytest.mark.parametrize("mixing", ["laplacian", "pairwise"])
def test_with_everybody_there_meetings_are_the_round(mixing) -> None:
    round, found, met = held(mixing)
    np.testing.assert_allclose(found, round.mix(VALUES), rtol=0, atol=1e-14)
    assert [one.held for one in met] == [1, 2, 1]
    assert not any(one.left_out for one in met)


@pytest.mark.parametrize("mixing", ["laplacian", "pairwise"])
def test_a_meeting_with_one_who_is_missing_is_left_out_alone(mixing) -> None:
    round, found, met = held(mixing, missing=frozenset({2}))
    rest = Round(matchings=MATCHINGS[:1], indices=(0,), mixing=mixing, weight=round.weight)
    np.testing.assert_allclose(found, rest.mix(VALUES), rtol=0, atol=1e-14)
    assert [(one.held, one.left_out, one.uncertain) for one in met[:2]] == [(1, 0, 0), (1, 1, 0)]


def test_a_lost_last_byte_shifts_the_sum_by_no_more_than_is_counted() -> None:
    _, found, met = held("pairwise", missing=frozenset({2}), loses=0)
    assert found[0].tolist() == VALUES[0].tolist()
    assert found[1].tolist() == [1.5, 0.5]
    shift = np.linalg.norm(found.sum(0) - VALUES.sum(0))
    assert (met[0].held, met[0].left_out, met[0].uncertain) == (0, 1, 1)
    assert met[0].shift == pytest.approx(shift)


@pytest.mark.parametrize("mixing", ["laplacian", "pairwise"])
@pytest.mark.parametrize("wire", ["bfloat16", "modulo:3", "lowrank:2"])
def test_over_every_wire_the_others_do_what_the_definition_says(wire, mixing) -> None:
    """Worker 3 is missing from the sixth round on; who then meets nobody stays as it is."""

    def work(transport):
        place = Place(transport.network, transport.rank)
        row = padded(start())[place.rank].clone()
        exchange = test_codecs.exchange(place, wire, row)
        exchange.hooks.append(ElasticMeetings(exchange, place, [row]))
        for k in range(12):
            place.missing = frozenset({3}) if k >= 6 else frozenset()
            row += padded(drift(k))[place.rank]
            met = meetings(round_of(k, mixing), place.rank)
            if met and place.rank not in place.missing:
                exchange.run(round_of(k, mixing), met, k)
        return row

    found = compact(torch.stack(run_threads(5, work)))
    x = start()
    definition = Definition(parse_wire(wire), SHAPES, x)
    for k in range(12):
        round = round_of(k, mixing)
        x = definition.mix(round.without([3]) if k >= 6 else round, x + drift(k))
    np.testing.assert_allclose(found, x, rtol=0, atol=1e-10)


def test_a_link_that_broke_begins_without_a_past() -> None:
    """Directions of a low-rank link must be the same at both ends, and one end may be new."""
    place = Place(MemoryNetwork(2), 0)
    exchange = test_codecs.exchange(place, "lowrank:2", padded(start())[0].clone())
    elastic = ElasticMeetings(exchange, place, [])
    directions = exchange.state()["directions-0-1"]
    first = directions.clone()
    meeting = Meeting(position=0, peer=1, weight=0.5)
    for k, (connection, expected) in enumerate([("a", 9.0), ("a", 9.0), ("b", None)]):
        directions.fill_(9.0)
        place.connection = lambda peer, connection=connection: connection
        elastic.before(meeting, k)
        assert directions.equal(first if expected is None else torch.full_like(first, expected))


def test_a_transport_that_fails_before_a_meeting_changes_no_value() -> None:
    """The copy is of an earlier meeting then: to go back to it would lose the steps since."""
    place = Place(MemoryNetwork(2), 0)
    values = torch.zeros(3)
    exchange = Exchange(place, [FloatCodec([values], bucket_bytes=100)], timeout=1)
    elastic = ElasticMeetings(exchange, place, [values])
    exchange.hooks.append(elastic)
    meeting = Meeting(position=0, peer=1, weight=0.5)
    elastic.before(meeting, 0)
    values.fill_(7.0)

    def lost(peer: int, iteration: int) -> bool:
        raise PeerLostError("the link is gone.", 1)

    place.meets = lost
    round = Round(matchings=MATCHINGS[:1], indices=(0,), mixing="pairwise", weight=0.5)
    with pytest.raises(PeerLostError):
        exchange.run(round, (meeting,), 1)
    assert values.tolist() == [7.0] * 3


def test_a_message_that_is_not_finite_takes_its_meeting_back(monkeypatch) -> None:
    monkeypatch.setattr(Exchange, "_check_finite", lambda *_: None)
    monkeypatch.setattr(
        Place, "refuse", lambda place, peer, problem: PeerLostError(f"{peer} {problem}", peer)
    )
    monkeypatch.setitem(globals(), "VALUES", np.where(VALUES == 9.0, np.nan, VALUES))
    _, found, met = held("pairwise", loses=2)
    assert found[:2].tolist() == [[1.5, 0.5], [1.5, 0.5]]
    assert [(one.held, one.left_out) for one in met[:2]] == [(1, 0), (1, 1)]
