"""Who waits for whom, and who for nobody."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tests.distributed.perceptrons import (
    Fixed,
    double_step,
    mlp,
)

from matcha import families, plan
from matcha.distributed import Gossip, SlowLinks
from matcha.errors import ExchangeError
from matcha.testing import MemoryTransport, run_threads


class Counting(MemoryTransport):
    """Counts calls."""

    calls = 0

    def post(self, messages):
        self.calls += 1
        return super().post(messages)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_worker_without_a_partner_makes_no_call(overlap) -> None:
    plan = Fixed(3, (), (((0, 1),),), (), ())

    def work(transport: MemoryTransport) -> list[int]:
        counting = Counting(transport.network, transport.rank)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Gossip(model, optimizer, plan, transport=counting, overlap=overlap, timeout=30)
        seen = []
        for _ in range(4):
            before = counting.calls
            double_step(model, optimizer, torch.ones(2, 4))
            seen.append(counting.calls - before)
        return seen

    first, second, idle = run_threads(3, work)
    assert idle == [0, 0, 0, 0]
    assert sum(first) == sum(second) == 2  # a header and one bucket


def test_workers_out_of_reach_of_a_slow_one_run_ahead() -> None:
    # 0-1 meet in every round and 2-3 in every round; nobody else ever meets.
    plan = Fixed(4, *([(((0, 1), (2, 3)),)] * 30))
    released = threading.Event()
    finished: dict[int, float] = {}

    def work(transport: MemoryTransport) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gossip = Gossip(model, optimizer, plan, transport=transport, timeout=30)
        for k in range(30):
            if transport.rank == 0 and k == 3:
                assert released.wait(20), "the others did not run ahead"
            double_step(model, optimizer, torch.ones(2, 4))
        finished[transport.rank] = time.monotonic()
        if {2, 3} <= finished.keys():
            released.set()
        assert gossip.iteration == 30

    run_threads(4, work)
    assert max(finished[2], finished[3]) < min(finished[0], finished[1])


def test_overlap_hides_the_exchange_behind_the_gradient() -> None:
    plan = Fixed(2, *([(((0, 1),),)] * 10))

    def work(transport: MemoryTransport) -> tuple[float, float]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        slow = SlowLinks(transport, mbps=0.4)  # 424 bytes: about 8 ms
        with Gossip(model, optimizer, plan, transport=slow, overlap=True, timeout=30) as gossip:
            double_step(model, optimizer, torch.ones(2, 4))
            started = gossip.state.stopwatch.exchange_seconds
            blocked = 0.0
            for _ in range(5):
                time.sleep(0.05)  # the gradient
                before = time.perf_counter()
                gossip.state.settle()
                blocked += time.perf_counter() - before
                double_step(model, optimizer, torch.ones(2, 4))
            return blocked, gossip.state.stopwatch.exchange_seconds - started

    for blocked, exchanging in run_threads(2, work):
        assert exchanging > 0.03
        assert blocked < exchanging


def test_spans_tell_computing_waiting_and_exchanging_apart() -> None:
    plan = Fixed(2, *([(((0, 1),),)] * 3))

    def work(transport: MemoryTransport):
        spans = []
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Gossip(model, optimizer, plan, transport=transport, timeout=30, on_span=spans.append)
        for _ in range(3):
            time.sleep(0.02 * transport.rank)
            double_step(model, optimizer, torch.ones(2, 4))
        return spans

    quick, slow = run_threads(2, work)
    assert [(s.iteration, s.kind) for s in quick] == [
        (k, kind) for k in range(3) for kind in ("compute", "wait", "exchange")
    ]
    assert all(span.start <= span.end for span in (*quick, *slow))
    waited = [sum(s.end - s.start for s in spans if s.kind == "wait") for spans in (quick, slow)]
    assert waited[0] > 0.03 > waited[1]


def test_a_silent_partner_is_named_within_the_timeout() -> None:
    plan = Fixed(2, (((0, 1),),))

    def work(transport: MemoryTransport) -> Gossip:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gossip = Gossip(model, optimizer, plan, transport=transport, timeout=0.5)
        if transport.rank == 0:
            with pytest.raises(ExchangeError, match=r"rank 1 \(host .*did not answer within 0.5 s"):
                double_step(model, optimizer, torch.ones(2, 4))
        return gossip  # one that is collected says that it has finished

    run_threads(2, work)


def test_overlap_hides_the_exchange_behind_a_closure_too() -> None:
    """A closure computes the gradient: the exchange must not be waited for before it ran."""
    plan = Fixed(2, *([(((0, 1),),)] * 4))
    gradients = {rank: threading.Event() for rank in range(2)}

    class Late(MemoryTransport):
        """Delivers the other's values only when this worker's gradient is there."""

        def post(self, messages):
            pending = super().post(messages)
            if not armed.is_set():
                return pending
            wait = pending.wait

            def late(timeout: float) -> None:
                assert gradients[self.rank].wait(20), "waited for the exchange before the closure"
                wait(timeout)

            pending.wait = late
            return pending

    armed = threading.Event()
    ready = threading.Barrier(2)

    def work(transport: MemoryTransport) -> int:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        late = Late(transport.network, transport.rank)
        with Gossip(model, optimizer, plan, transport=late, overlap=True, timeout=30) as gossip:
            ready.wait(20)
            armed.set()

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(torch.ones(2, 4).double()).square().mean()
                loss.backward()
                gradients[transport.rank].set()
                return loss

            for _ in range(4):
                gradients[transport.rank].clear()
                optimizer.step(closure)
            gradients[transport.rank].set()
            return gossip.iteration

    assert run_threads(2, work) == [4, 4]


def test_a_script_that_ends_is_not_said_to_have_finished() -> None:
    """At exit `sys.exit(1)` looks like the end of a script: the message says both."""

    def work(transport) -> str:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        chosen = plan(families.path(2), 1.0, "vanilla")
        gossip = Gossip(model, optimizer, chosen, transport=transport, timeout=60)
        try:
            for _ in range(5 if transport.rank else 2):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        except ExchangeError as error:
            return str(error)
        gossip._farewell()  # as the interpreter does at its exit
        return ""

    said = run_threads(2, work)[1]
    assert "the script of rank 0 (host " in said
    assert "ended at iteration 2, but rank 1 (host " in said
    assert "if it called sys.exit() because of an error, its log says which" in said
