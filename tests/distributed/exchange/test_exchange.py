from __future__ import annotations

import threading
import traceback

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.distributed import cases
from tests.graphs import topologies

from matcha import Round
from matcha.distributed import Message, Pending, Transport
from matcha.distributed.exchange.codecs import FloatCodec, RelayedSums
from matcha.distributed.exchange.exchange import Exchange
from matcha.distributed.exchange.meeting import MeetingHook, meetings
from matcha.distributed.transports.base import MAX_TAG
from matcha.distributed.transports.collectives import barrier
from matcha.errors import ExchangeError
from matcha.testing import run_threads


def float_exchange(transport, values, bucket_bytes, dtype=None) -> Exchange:
    codec = FloatCodec(values, bucket_bytes=bucket_bytes, dtype=dtype)
    return Exchange(transport, [codec], timeout=20)


def exchanged(
    round: Round, x: np.ndarray, bucket_bytes: int, dtype=None, *, one_by_one: bool = False
) -> np.ndarray:
    """`x` after a round over in-memory links; each worker's row in two flat tensors."""

    def work(transport):
        values = [torch.from_numpy(part.copy()) for part in np.array_split(x[transport.rank], 2)]
        exchange = float_exchange(transport, values, bucket_bytes, dtype)
        if one_by_one:
            exchange.hooks.append(MeetingHook())
        met = meetings(round, transport.rank)
        if met:
            assert exchange.run(round, met, iteration=7) == len(met)
        copy = sum(value.nbytes for value in values) if one_by_one else 0
        assert exchange.spare_bytes <= 2 * max(bucket_bytes, 16) + copy
        return torch.cat(values).numpy()

    return np.stack(run_threads(len(x), work))


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Round, int]:
    """Any ordered list of matchings of a random graph, links free to come again.

    For push: of one-way messages, in which everyone sends once and hears once at most.
    """
    topology = draw(topologies(max_workers=6))
    mixing = draw(st.sampled_from(["laplacian", "pairwise", "push"]))
    push = mixing == "push"
    matchings = []
    for _ in range(draw(st.integers(0, 4))):
        senders: set[int] = set()
        receivers: set[int] = set()
        matching = []
        for i, j in draw(st.permutations(topology.arrows if push else topology.links)):
            busy = i in senders or j in receivers
            busy = busy if push else bool({i, j} & (senders | receivers))
            if not busy and draw(st.booleans()):
                matching.append((i, j))
                senders.add(i)
                receivers.add(j)
        if matching:
            matchings.append(tuple(matching))
    weight = draw(st.floats(0.05, 0.6) if mixing == "laplacian" else st.sampled_from([0.5, 0.54]))
    weights = None
    if draw(st.booleans()):
        shares = st.floats(0.1, 0.9)
        weights = tuple(tuple(draw(shares) for _ in matching) for matching in matchings)
    round = Round(
        matchings=tuple(matchings),
        indices=tuple(range(len(matchings))),
        mixing=mixing,
        weight=weight,
        weights=weights,
    )
    return round, topology.num_workers


@settings(max_examples=60)
@given(case=rounds(), size=st.integers(2, 40), bucket=st.sampled_from([16, 40, 100, 10_000]))
def test_an_exchange_is_the_definition_to_the_bit(case, size, bucket) -> None:
    """Also with hooks, which hold meetings one after another."""
    round, num_workers = case
    x = np.random.default_rng(size).normal(size=(num_workers, size))
    np.testing.assert_array_equal(exchanged(round, x, bucket), round.mix(x))
    np.testing.assert_array_equal(exchanged(round, x, bucket, one_by_one=True), round.mix(x))
    x = x.astype(np.float32)
    np.testing.assert_array_equal(exchanged(round, x, bucket), round.mix(x))


def test_blocks_of_a_large_tensor_are_the_definition_to_the_bit() -> None:
    x = np.random.default_rng(0).normal(size=(8, 300_001))
    for mixing in cases.MIXINGS:
        round = cases.make_plan("vanilla", mixing).round(0)
        np.testing.assert_array_equal(exchanged(round, x, 1_000_000), round.mix(x))


def test_a_small_wire_format_keeps_the_mass_of_messages_that_go_one_way() -> None:
    matchings = (((0, 1), (1, 2), (3, 0)), ((2, 0), (0, 3)))
    round = Round(matchings=matchings, indices=(0, 1), mixing="push", weight=0.5)
    x = np.random.default_rng(1).normal(size=(4, 500)).astype(np.float32)
    mixed = exchanged(round, x, 400, torch.bfloat16)
    np.testing.assert_allclose(mixed.sum(0), x.sum(0), atol=1e-5)
    assert 0 < np.abs(mixed - round.mix(x)).max() < 0.1


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mixing", cases.MIXINGS)
def test_a_small_wire_format_keeps_the_average(mixing, wire) -> None:
    x = np.random.default_rng(1).normal(size=(8, 500)).astype(np.float32)
    round = cases.make_plan("vanilla", mixing).round(0)
    mixed = exchanged(round, x, 400, wire)
    np.testing.assert_allclose(mixed.mean(0), x.mean(0), atol=1e-6)
    # Nearby, but rounded: one unit in the last place of the wire format a message.
    assert 0 < np.abs(mixed - round.mix(x)).max() < 8 * torch.finfo(wire).eps * np.abs(x).max()


def test_a_partner_at_another_iteration_is_named() -> None:
    round = Round(matchings=(((0, 1),),), indices=(0,), mixing="pairwise", weight=0.5)

    def work(transport) -> str:
        exchange = float_exchange(transport, [torch.ones(3)], 100)
        with pytest.raises(ExchangeError) as caught:
            exchange.run(round, meetings(round, transport.rank), iteration=16 + transport.rank)
        return str(caught.value)

    first, _ = run_threads(2, work)
    assert "rank 1 is at iteration 17" in first
    assert "rank 0 is at 16" in first


class Recording(Transport):
    """Notes the order of what is posted and waited for; nothing ever arrives."""

    def __init__(self) -> None:
        self.rank, self.num_workers = 0, 4
        self.events: list[tuple[str, int, int]] = []

    def post(self, messages) -> Pending:
        (message,) = messages
        self.events.append(("post", message.peer, message.tag))
        return Noted(self, message)


class Noted(Pending):
    def __init__(self, transport: Recording, message: Message) -> None:
        self.transport, self.message = transport, message

    def wait(self, timeout: float) -> None:
        self.transport.events.append(("wait", self.message.peer, self.message.tag))
        self.message.incoming.copy_(self.message.outgoing)


def test_pairwise_matchings_are_pipelined_over_pieces() -> None:
    matchings = (((0, 1),), ((0, 2),))
    round = Round(matchings=matchings, indices=(0, 1), mixing="pairwise", weight=0.5)
    transport = Recording()
    exchange = float_exchange(transport, [torch.ones(60)], 80)  # six pieces
    exchange.run(round, meetings(round, 0), iteration=0)
    events = transport.events
    second_begins = next(i for i, e in enumerate(events) if e[:2] == ("post", 2))
    first_ends = max(i for i, e in enumerate(events) if e[:2] == ("wait", 1))
    assert second_begins < first_ends


@pytest.mark.parametrize("hooks", [[], [MeetingHook(), MeetingHook()]])
def test_few_frames_stand_between_a_round_and_its_messages(hooks) -> None:
    """run, the loop, one transfer; hooks add none."""
    round = Round(matchings=(((0, 1),),), indices=(0,), mixing="pairwise", weight=0.5)
    transport = Recording()
    exchange = float_exchange(transport, [torch.ones(8)], 64)
    exchange.hooks.extend(hooks)
    depths = []
    post = transport.post

    def deep_post(messages) -> Pending:
        if messages[0].incoming.dtype == torch.uint8:  # values, and not the handshake
            names = [frame.name for frame in traceback.extract_stack()]
            depths.append(len(names) - names.index("run_here") - 2)  # without that and this
        return post(messages)

    transport.post = deep_post

    def run_here() -> None:
        exchange.run(round, meetings(round, 0), iteration=0)

    run_here()
    assert max(depths) <= 3


def test_tags_stay_within_what_every_mpi_takes() -> None:
    """A round of 40,000 matchings; MPI guarantees tags up to 32,767 and no more."""
    silence = ((),) * 19_999
    round = Round(
        matchings=(*silence, ((0, 1),), *silence, ((0, 1),), ((0, 1),)),
        indices=tuple(range(40_001)),
        mixing="pairwise",
        weight=0.5,
    )

    def work(transport):
        tags = []
        post = transport.post
        transport.post = lambda messages: tags.extend(m.tag for m in messages) or post(messages)
        values = [torch.full((64,), float(transport.rank), dtype=torch.float64)]
        exchange = float_exchange(transport, values, 128)
        exchange.run(round, meetings(round, transport.rank), iteration=0)
        barrier(transport, 20)
        assert values[0].tolist() == [0.5] * 64
        return tags

    for tags in run_threads(2, work):
        assert min(tags) >= 0
        assert max(tags) <= MAX_TAG
        assert len(tags) > 3 * 8


def test_a_relayed_sum_that_is_not_finite_names_its_sender_and_none_is_averaged() -> None:
    def work(transport):
        value = torch.full((4,), torch.nan if transport.rank else 1.0)
        relay = RelayedSums(transport, [value], [1 - transport.rank])
        if transport.rank == 0:
            with pytest.raises(ExchangeError, match=r"1.* sent a sum that is not finite"):
                relay.mix(20.0)
        else:  # its own check, before it sends, is left out here
            relay.mix(20.0)
        return value.isfinite().all()

    assert run_threads(2, work)[0]


def test_a_relayed_sum_is_waited_for_as_long_as_the_exchange_waits_now() -> None:
    over = threading.Event()

    def work(transport):
        values = [torch.ones(4)]
        exchange = float_exchange(transport, values, 64)
        exchange.relay = RelayedSums(transport, values, [1 - transport.rank])
        exchange.timeout = 0.3  # as iterations turned out to be: it began with 20
        if transport.rank == 0:
            round = Round(matchings=(((0, 1),),), indices=(0,), mixing="relay", weight=0.5)
            with pytest.raises(ExchangeError, match=r"within 0\.3 s"):
                exchange.run(round, meetings(round, 0), iteration=0)
            over.set()
        assert over.wait(20)

    run_threads(2, work)
