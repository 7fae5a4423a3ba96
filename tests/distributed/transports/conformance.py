"""What every transport does alike: cases for four workers, any two of which can talk.

Run as a script it is one worker: every case over the transport named on the command line.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from matcha.distributed import Message, MpiTransport, TorchTransport, Transport
from matcha.distributed.transports.collectives import (
    barrier,
    broadcast,
    gather,
    mean_,
    ring_mean_,
    roll_call,
)
from matcha.errors import ExchangeError

NUM_WORKERS = 4
PATIENCE = 120.0


def receive(transport: Transport, peer: int, tag: int, like: torch.Tensor) -> torch.Tensor:
    arriving = torch.zeros_like(like)
    transport.post([Message(peer=peer, tag=tag, incoming=arriving)]).wait(PATIENCE)
    return arriving


def knows_its_place(transport: Transport) -> None:
    assert transport.num_workers == NUM_WORKERS
    assert transport.members == tuple(range(NUM_WORKERS))
    ranks = gather(transport, bytes([transport.rank]), PATIENCE)
    assert ranks == [bytes([rank]) for rank in range(NUM_WORKERS)]
    assert "rank 2" in transport.name(2)


def keeps_the_order_within_a_tag(transport: Transport) -> None:
    if transport.rank == 0:
        sent = [(1, torch.tensor([1.0])), (2, torch.tensor([2.0])), (1, torch.tensor([3.0]))]
        pending = [transport.post([Message(peer=1, tag=tag, outgoing=t)]) for tag, t in sent]
        for each in pending:  # which may take until the other end asks for it
            each.wait(PATIENCE)
    elif transport.rank == 1:
        like = torch.zeros(1)
        assert [receive(transport, 0, tag, like).item() for tag in (1, 1, 2)] == [1.0, 3.0, 2.0]


def lets_memory_be_used_again_once_waited_for(transport: Transport) -> None:
    peer = transport.rank ^ 1
    leaving, arriving = torch.empty(1000), torch.empty(1000)
    for value in range(20):
        leaving.fill_(value)
        message = Message(peer=peer, tag=5, incoming=arriving, outgoing=leaving)
        pending = transport.post([message])
        pending.wait(PATIENCE)
        pending.wait(PATIENCE)  # which does nothing
        assert arriving.eq(value).all()


def carries_large_messages_both_ways_at_once(transport: Transport) -> None:
    peer, size = transport.rank ^ 2, 1_000_000
    leaving = [torch.full((size,), 10.0 * transport.rank + tag) for tag in range(3)]
    arriving = [torch.empty(size) for _ in range(3)]
    messages = [
        Message(peer=peer, tag=tag, incoming=arriving[tag], outgoing=leaving[tag])
        for tag in range(3)
    ]
    for pending in [transport.post([message]) for message in messages]:
        pending.wait(PATIENCE)
    assert [part.mean().item() for part in arriving] == [10.0 * peer + tag for tag in range(3)]


def talks_to_all_at_once(transport: Transport) -> None:
    others = [rank for rank in range(NUM_WORKERS) if rank != transport.rank]
    arriving = {peer: torch.zeros(7) for peer in others}
    leaving = torch.full((7,), float(transport.rank))
    messages = [
        Message(peer=peer, tag=9, incoming=arriving[peer], outgoing=leaving) for peer in others
    ]
    transport.post(messages).wait(PATIENCE)
    assert all(arriving[peer].eq(float(peer)).all() for peer in others)


def carries_any_type(transport: Transport) -> None:
    peer = transport.rank ^ 1
    kinds = (torch.uint8, torch.bool, torch.int64, torch.bfloat16, torch.float64, torch.complex64)
    for tag, kind in enumerate(kinds):
        leaving = torch.tensor([0, 1, 1, 0, transport.rank % 2], dtype=kind)
        arriving = torch.zeros(5, dtype=kind)
        if kind in (torch.bool, torch.bfloat16, torch.complex64):  # as exchanges do: bytes
            message = Message(
                peer=peer,
                tag=tag,
                incoming=arriving.view(torch.uint8),
                outgoing=leaving.view(torch.uint8),
            )
        else:
            message = Message(peer=peer, tag=tag, incoming=arriving, outgoing=leaving)
        transport.post([message]).wait(PATIENCE)
        assert arriving.tolist() == torch.tensor([0, 1, 1, 0, peer % 2], dtype=kind).tolist()


def makes_collective_calls(transport: Transport) -> None:
    rank = transport.rank
    shared = [torch.full((4,), float(rank + 10)), torch.tensor(rank)]
    broadcast(transport, shared, PATIENCE)
    assert shared[0].eq(10.0).all()
    assert shared[1].item() == 0
    for mean in (mean_, ring_mean_):
        values = [torch.arange(9.0) * rank, torch.full((2,), float(rank))]
        mean(transport, values, PATIENCE)
        assert torch.allclose(values[0], torch.arange(9.0) * (NUM_WORKERS - 1) / 2)
        assert values[1].tolist() == [(NUM_WORKERS - 1) / 2] * 2
    assert gather(transport, b"x" * rank, PATIENCE) == [b"x" * n for n in range(NUM_WORKERS)]
    roll_call(transport, "this case", PATIENCE)


def publishes_notes(transport: Transport) -> None:
    transport.set_note("seen", f"by {transport.rank}")
    others = [rank for rank in range(NUM_WORKERS) if rank != transport.rank]
    for expected in ("by {}", ""):
        end = time.monotonic() + PATIENCE
        while [transport.get_note(r, "seen") for r in others] != [
            expected.format(r) for r in others
        ]:
            assert time.monotonic() < end, "the notes did not come"
            time.sleep(0.01)
        barrier(transport, PATIENCE)
        transport.set_note("seen", "")


def lets_threads_share_it(transport: Transport) -> None:
    if not transport.threads:
        return
    peer = transport.rank ^ 1
    found: list[float] = []

    def body(tag: int) -> None:
        for value in range(20):
            leaving, arriving = torch.full((50,), float(value)), torch.empty(50)
            message = Message(peer=peer, tag=tag, incoming=arriving, outgoing=leaving)
            transport.post([message]).wait(PATIENCE)
            found.append(arriving.mean().item() - value)

    threads = [threading.Thread(target=body, args=(20 + n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [0.0] * 60


def names_a_silent_peer(transport: Transport) -> None:
    """The last case: some transports cannot be used after it."""
    if transport.rank == 0:
        pending = transport.post([Message(peer=1, tag=30, incoming=torch.zeros(1))])
        with pytest.raises(ExchangeError, match=r"rank 1.*(did not answer|closed|finished)"):
            pending.wait(2.0)


CASES: dict[str, Callable[[Transport], None]] = {
    case.__name__: case
    for case in (
        knows_its_place,
        keeps_the_order_within_a_tag,
        lets_memory_be_used_again_once_waited_for,
        carries_large_messages_both_ways_at_once,
        talks_to_all_at_once,
        carries_any_type,
        makes_collective_calls,
        publishes_notes,
        lets_threads_share_it,
        names_a_silent_peer,
    )
}


def main(kind: str) -> None:
    torch.set_num_threads(1)
    if kind == "mpi":
        transport: Transport = MpiTransport()
    else:
        torch.distributed.init_process_group("gloo")
        transport = TorchTransport()
    for name, case in CASES.items():
        print(name, flush=True)  # where it hangs, if it does
        case(transport)
    print("passed")


if __name__ == "__main__":
    main(*sys.argv[1:])
