"""Exchanges over every wire, on links in memory, against the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.wires.definition import Definition
from tests.wires.networks import SHAPES, compact, drift, padded, round_of, segments, start

from matcha import Round
from matcha.distributed.exchange.codecs import (
    Codec,
    FloatCodec,
    LowRankCodec,
    ModuloCodec,
    is_finite,
)
from matcha.distributed.exchange.exchange import Exchange
from matcha.distributed.exchange.meeting import MeetingHook, meetings
from matcha.errors import ExchangeError, ModelError
from matcha.testing import run_threads
from matcha.wires import Float, LowRank, Modulo, parse_wire
from matcha.wires.wire import Segment

CODED = ("modulo:8", "modulo:4", "modulo:3", "modulo:2", "lowrank:2")
BUCKET_BYTES = 10_000


def exchange(transport, wire: str, row: torch.Tensor) -> Exchange:
    """One over a worker's row, cut into two buckets after its second parameter."""
    places = segments()
    cut = places[2].offset
    values = [row[:cut], row[cut:]]
    second = [type(place)(offset=place.offset - cut, shape=place.shape) for place in places[2:]]
    parts, chosen = [places[:2], second], parse_wire(wire)
    if isinstance(chosen, Float):
        dtype = torch.bfloat16 if wire == "bfloat16" else None
        codec = FloatCodec(values, bucket_bytes=BUCKET_BYTES, dtype=dtype)
    elif isinstance(chosen, LowRank):
        codec = LowRankCodec(values, parts, chosen, transport.num_workers)
    else:
        codec = ModuloCodec(values, parts, chosen, bucket_bytes=BUCKET_BYTES)
    return Exchange(transport, [codec], timeout=20)


def rounds(wire: str, mixing: str, *, one_by_one: bool = False):
    """All workers' rows after each of several rounds, and their exchanges."""

    def work(transport):
        row = padded(start("float64"))[transport.rank].clone()
        mixer = exchange(transport, wire, row)
        if one_by_one:
            mixer.hooks.append(MeetingHook())
        rows = []
        for k in range(16):
            row += padded(drift(k, "float64", jump=300.0 if k in (5, 11) else 1.0))[transport.rank]
            round = round_of(k, mixing)
            met = meetings(round, transport.rank)
            if met:
                mixer.run(round, met, k)
            rows.append(row.clone())
        return torch.stack(rows), mixer

    found = run_threads(5, work)
    return torch.stack([rows for rows, _ in found], 1), [mixer for _, mixer in found]


@pytest.mark.parametrize("mixing", ["laplacian", "pairwise"])
@pytest.mark.parametrize("wire", ["float32", "bfloat16", *CODED])
def test_an_exchange_is_the_definition(wire, mixing) -> None:
    found, mixers = rounds(wire, mixing)
    x = start()
    definition = Definition(parse_wire(wire), SHAPES, x)
    for k, rows in enumerate(found):
        x = x + drift(k, jump=300.0 if k in (5, 11) else 1.0)
        mixed = definition.mix(round_of(k, mixing), x)
        np.testing.assert_allclose(compact(rows), mixed, rtol=0, atol=1e-10)
        np.testing.assert_allclose(compact(rows).sum(0), x.sum(0), rtol=1e-12, atol=1e-12 * 5000)
        x = mixed
        assert padded(compact(rows)).equal(rows)  # padding stays zero
    if wire in CODED:
        expected = parse_wire(wire).message_bytes(SHAPES)
        count = [sum(len(meetings(round_of(k, mixing), r)) for k in range(16)) for r in range(5)]
        assert [mixer.bytes_sent for mixer in mixers] == [expected * n for n in count]


@pytest.mark.parametrize("mixing", ["laplacian", "pairwise"])
@pytest.mark.parametrize("wire", ["bfloat16", "modulo:3", "lowrank:2"])
def test_meetings_one_by_one_are_the_round(wire, mixing) -> None:
    whole, _ = rounds(wire, mixing)
    single, _ = rounds(wire, mixing, one_by_one=True)
    assert whole.equal(single)


@pytest.mark.parametrize("wire", ["modulo:4", "lowrank:2"])
def test_the_state_of_an_exchange_is_all_it_remembers(wire) -> None:
    """Rounds with an exchange that takes over another's state are the same to the bit."""

    def work(transport):
        rows = [padded(start("float32"))[transport.rank].clone() for _ in range(2)]
        mixers = [exchange(transport, wire, row) for row in rows]
        for k in range(12):
            if k == 6:
                fresh = exchange(transport, wire, rows[1])
                with torch.no_grad():
                    for name, value in mixers[1].state().items():
                        fresh.state()[name].copy_(value)
                mixers[1] = fresh
            round = round_of(k, "pairwise")
            met = meetings(round, transport.rank)
            for row, mixer in zip(rows, mixers, strict=True):
                row += padded(drift(k, "float32"))[transport.rank]
                if met:
                    mixer.run(round, met, k)
        return rows[0].equal(rows[1])

    assert all(run_threads(5, work))


PAIR = Round(matchings=(((0, 1),),), indices=(0,), mixing="pairwise", weight=0.5)
ALL = Round(matchings=(((0, 1),),), indices=(0,), mixing="average", weight=0.5)


@pytest.mark.parametrize("round", [PAIR, ALL], ids=["pair", "all"])
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "modulo:4", "lowrank:2"])
def test_a_value_that_is_not_finite_is_refused_before_anything_is_sent(wire, round) -> None:

    def work(transport) -> tuple[str, int]:
        row = padded(start())[0].clone()
        mixer = exchange(transport, wire, row)
        row[7] = float("nan")
        with pytest.raises(ModelError) as caught:
            mixer.run(round, meetings(round, transport.rank), 17)
        return str(caught.value), mixer.bytes_sent

    for rank, (message, sent) in enumerate(run_threads(2, work)):
        assert f"rank {rank} holds a parameter that is not finite at iteration 17" in message
        assert sent == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_a_message_that_is_not_finite_is_refused_and_its_sender_named(
    wire, value, monkeypatch
) -> None:
    """As a worker sends that does not look, or whose memory flips bits."""
    monkeypatch.setattr(Exchange, "_check_finite", lambda *_: None)

    def work(transport) -> str:
        row = padded(start())[transport.rank].clone()
        row[-9] = value if transport.rank else 1.0
        try:
            exchange(transport, wire, row).run(PAIR, meetings(PAIR, transport.rank), 17)
        except ExchangeError as error:
            return str(error)
        return "took it"

    found = run_threads(2, work)
    assert found[0] == "rank 1 sent a value that is not finite."


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_large_values_are_finite_though_their_sum_is_not(dtype) -> None:
    most = torch.finfo(dtype).max
    assert is_finite(torch.full((100,), most, dtype=dtype))
    assert not is_finite(torch.tensor([most, float("nan")], dtype=dtype))
    assert is_finite(torch.arange(3))


def test_infinite_buffers_are_no_fault() -> None:
    """As a mask of -inf is, where buffers are averaged."""
    mask = torch.tensor([0.0, -torch.inf])

    def work(transport):
        values = [torch.full((3,), float(transport.rank)), mask.clone()]
        codec = FloatCodec(values, bucket_bytes=100, any_value=[1])
        Exchange(transport, [codec], timeout=20).run(PAIR, meetings(PAIR, transport.rank), 0)
        return values

    for values, buffer in run_threads(2, work):
        assert values.tolist() == [0.5] * 3
        assert buffer.equal(mask)


@pytest.mark.parametrize("mixing", ["laplacian", "pairwise"])
@pytest.mark.parametrize("wire", ["modulo:3", "lowrank:2"])
def test_codecs_side_by_side_do_what_each_does_alone(wire, mixing) -> None:
    """As with coded parameters and whole statistics; a bucket of vectors has no second factor."""
    places = [Segment(offset=0, shape=(256,)), Segment(offset=256, shape=(1,))]

    def codec(kind: str, values: torch.Tensor, num_workers: int) -> Codec:
        if kind == "float32":
            return FloatCodec([values], bucket_bytes=1000)
        if kind == "lowrank:2":
            return LowRankCodec([values], [places], LowRank(rank=2), num_workers)
        return ModuloCodec([values], [places], Modulo(bits=3), bucket_bytes=BUCKET_BYTES)

    def work(transport):
        whole, code = torch.zeros(2, 2, 512, dtype=torch.float64)
        for k, one in enumerate((whole, code)):  # alone, and then both together
            one[:2, :257] = torch.from_numpy(drift(k)[transport.rank, :257])
        kinds = [["float32"], [wire], ["float32", wire]]
        rows = [[whole[0]], [code[0]], [whole[1], code[1]]]
        for names, values in zip(kinds, rows, strict=True):
            count = transport.num_workers
            codecs = [codec(n, v, count) for n, v in zip(names, values, strict=True)]
            mixer = Exchange(transport, codecs, timeout=20)
            for k in range(4):
                met = meetings(round_of(k, mixing), transport.rank)
                if met:
                    mixer.run(round_of(k, mixing), met, k)
        return whole[0].equal(whole[1]), code[0].equal(code[1])

    assert run_threads(5, work) == [(True, True)] * 5


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "modulo:3"])
def test_spare_memory_stays_within_two_buckets(wire) -> None:
    _, mixers = rounds(wire, "laplacian")
    assert 0 < max(mixer.spare_bytes for mixer in mixers) <= 2 * BUCKET_BYTES
