"""Workers are lost, cut off and come back at given iterations: what is left is what should be."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from tests.distributed import cases
from tests.distributed.links.linked import cut_off, local_peers, mend, run_linked, vanish

import matcha.distributed
from matcha import families
from matcha.distributed import Gossip, LinkTransport
from matcha.distributed.elastic.membership import Welcome, give_state
from matcha.distributed.links.framing import FrameStream, Kind
from matcha.distributed.snapshot import dump_snapshot
from matcha.distributed.transports.collectives import barrier
from matcha.distributed.transports.waiting import Pace
from matcha.errors import ExchangeError, InputError
from matcha.testing import run_threads

LOST, BACK, ITERATIONS = 12, 25, 40
MOMENTUM = 0.9


def wait_until(condition, seconds: float = 150.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.002)


class Worker:
    """A model with momentum in float64, under Gossip on links."""

    def __init__(self, transport, plan) -> None:
        self.transport = transport
        self.model = cases.Quadratic(transport.rank)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=cases.RATE, momentum=MOMENTUM)
        self.gossip = Gossip(
            self.model,
            self.optimizer,
            plan,
            transport=transport,
            bucket_cap_mb=3e-4,
            timeout=150,
            on_loss="continue",
        )

    def run(self, stop: int) -> None:
        while self.gossip.iteration < stop:
            self.optimizer.zero_grad()
            self.model().backward()
            self.optimizer.step()

    def tend_until(self, *events: threading.Event) -> None:
        """Answer those who come back until all of them say that they are there."""

        def are_there() -> bool:
            self.gossip.membership.tend()
            return all(event.is_set() for event in events)

        wait_until(are_there)

    def wait_for(self, *peers: int) -> None:
        """Until the links to these neighbours are up again, answering them meanwhile."""

        def are_up() -> bool:
            self.gossip.membership.tend()
            with self.transport.lock:
                return set(peers) <= {c.peer for c in self.transport.live_connections()}

        wait_until(are_up)


def expected(plan, lost=(), cut=(), donor=None):
    """The same by the definition: meetings of the lost and over cut links are left out."""
    optimum, curvature = cases.targets("float64")
    x, velocity = np.ones_like(optimum), np.zeros_like(optimum)
    for k in range(ITERATIONS):
        away = LOST <= k < BACK
        if k == BACK:
            for worker in lost:
                x[worker], velocity[worker] = x[donor], velocity[donor]
        gradient = curvature * (x - optimum)
        velocity = gradient if k == 0 else MOMENTUM * velocity + gradient
        step = cases.RATE * velocity
        round = plan.round(k)
        if away:
            kept = [
                [li for li in m if not set(li) & set(lost) and li not in cut]
                for m in round.matchings
            ]
            round = replace(round, matchings=tuple(tuple(m) for m in kept if m))
        x = round.mix(x - step)
    return x


# With overlap a round begins before the script can act on its iteration: nothing to pin there.
PLANS = [("vanilla", "laplacian"), ("matcha", "pairwise"), ("greedy", "pairwise")]


@pytest.mark.parametrize(("strategy", "mixing"), PLANS)
def test_a_link_that_is_cut_and_mended(strategy, mixing) -> None:
    plan = cases.make_plan(strategy, mixing)
    cut = plan.topology.links[3:5]
    arrived = threading.Barrier(plan.num_workers)

    def work(transport):
        worker = Worker(transport, plan)
        mine = [i + j - transport.rank for i, j in cut if transport.rank in (i, j)]
        worker.run(LOST)
        arrived.wait(150)  # neither end cuts into a meeting of the iteration before
        for peer in mine:
            cut_off(transport, peer)
        worker.run(BACK)
        for peer in mine:
            mend(transport, peer)
        worker.wait_for(*mine)
        worker.run(ITERATIONS)
        worker.gossip.detach()
        return worker.model.flat()["float64"], worker.gossip.state.elastic

    found, meetings = zip(*run_linked(plan.topology, work), strict=True)
    np.testing.assert_allclose(np.stack(found), expected(plan, cut=cut), rtol=0, atol=1e-10)
    scheduled = sum(sum(li in cut for li in plan.round(k).links) for k in range(LOST, BACK))
    assert sum(m.left_out for m in meetings) == 2 * scheduled > 0
    assert sum(m.uncertain for m in meetings) == 0


@pytest.mark.parametrize(("strategy", "mixing"), PLANS)
@pytest.mark.parametrize("victim", [0, 3])
def test_a_worker_that_is_lost_and_comes_back(strategy, mixing, victim) -> None:
    plan = cases.make_plan(strategy, mixing)
    topology = plan.topology
    peers = local_peers(topology.num_workers)
    around = topology.neighbors(victim)
    arrived = threading.Barrier(topology.num_workers)

    def work(transport):
        worker = Worker(transport, plan)
        worker.run(LOST)
        if transport.rank == victim:
            transport.close()  # between two iterations; a kill could catch a meeting's last byte
            arrived.wait(150)
            transport = LinkTransport(topology, victim, peers, timeout=90.0, start_timeout=150.0)
            worker = Worker(transport, plan)  # takes a neighbour's state
            assert worker.gossip.iteration == BACK
            worker.wait_for(*around)
        else:
            wait_until(lambda: victim not in worker.gossip.members)
            worker.run(BACK)
            arrived.wait(150)
            worker.wait_for(*[victim] if transport.rank in around else [])
        worker.run(ITERATIONS)
        distance = worker.gossip.consensus_distance()
        facts = distance, worker.gossip.membership.donor, transport.changes
        worker.gossip.detach()
        transport.close()
        return worker.model.flat()["float64"], *facts

    results = run_linked(topology, work, peers=peers)
    x, distances, donors, changes = zip(*results, strict=True)
    donor = donors[victim]
    assert donor in around
    right = expected(plan, lost=[victim], donor=donor)
    np.testing.assert_allclose(np.stack(x), right, rtol=0, atol=1e-10)
    assert len({round(distance, 9) for distance in distances}) == 1
    for rank, seen in enumerate(changes):
        states = [change.is_member for change in seen if change.worker == victim]
        assert rank == victim or states[:3] == [True, False, True]


def test_all_but_one_are_gone_and_it_goes_on() -> None:
    plan = cases.make_plan("greedy", "pairwise")

    def work(transport):
        worker = Worker(transport, plan)
        worker.run(5)
        if transport.rank != 2:
            vanish(transport)
            return None
        wait_until(lambda: worker.gossip.members == (2,))
        worker.run(ITERATIONS)
        with worker.gossip.averaged():
            assert worker.gossip.consensus_distance() == 0.0
        worker.gossip.detach()
        return worker.gossip.state.elastic.left_out

    assert run_linked(plan.topology, work)[2] > 0


def test_with_stop_the_first_cause_is_named() -> None:
    plan = cases.make_plan("vanilla", "laplacian")

    def work(transport):
        model = cases.Quadratic(transport.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=cases.RATE)
        with Gossip(model, optimizer, plan, transport=transport, timeout=20) as gossip:
            while gossip.iteration < ITERATIONS:
                if transport.rank == 3 and gossip.iteration == LOST:
                    return vanish(transport)
                optimizer.zero_grad()
                model().backward()
                try:
                    optimizer.step()
                except ExchangeError as error:
                    return str(error)
        return "went on"

    results = run_linked(plan.topology, work)
    for rank, sentence in enumerate(results):
        if rank != 3:
            assert sentence.startswith("rank 3 (host "), sentence


def test_only_links_of_our_own_go_on() -> None:
    plan = cases.make_plan("greedy", "pairwise")

    def work(transport):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(InputError, match="needs links of our own"):
            Gossip(model, optimizer, plan, transport=transport, on_loss="continue")

    run_threads(families.paper("er8").num_workers, work)


def test_a_worker_restarted_twice_within_a_second_comes_back() -> None:
    plan = cases.make_plan("greedy", "pairwise")
    topology = plan.topology
    peers = local_peers(topology.num_workers)
    arrived, back = threading.Barrier(topology.num_workers), threading.Event()

    def work(transport):
        worker = Worker(transport, plan)
        worker.run(LOST)
        arrived.wait(150)  # whoever gives a state is this far
        if transport.rank == 3:
            vanish(transport)
            # The first new life ends before it has a state; the second one takes one.
            vanish(LinkTransport(topology, 3, peers, timeout=90.0, start_timeout=150.0))
            transport = LinkTransport(topology, 3, peers, timeout=90.0, start_timeout=150.0)
            worker = Worker(transport, plan)
            assert worker.gossip.iteration >= LOST
            back.set()
        else:
            worker.tend_until(back)
        worker.run(ITERATIONS)
        distance = worker.gossip.consensus_distance()
        worker.gossip.detach()
        transport.close()
        return round(distance, 9)

    assert len(set(run_linked(topology, work, peers=peers))) == 1


def test_two_neighbours_that_die_together_come_back_with_living_ones_states() -> None:
    plan = cases.make_plan("greedy", "pairwise")
    topology = plan.topology
    peers = local_peers(topology.num_workers)
    dead = topology.links[3]
    back = {rank: threading.Event() for rank in dead}

    def work(transport):
        worker = Worker(transport, plan)
        worker.run(LOST)
        if transport.rank in dead:
            vanish(transport)
            transport = LinkTransport(
                topology, transport.rank, peers, timeout=90.0, start_timeout=150.0
            )
            worker = Worker(transport, plan)
            back[transport.rank].set()
        else:
            # Nobody goes on before both are there: it would wait for one who is not, and not tend.
            worker.tend_until(*back.values())
        worker.run(ITERATIONS)
        finite = all(bool(torch.isfinite(p).all()) for p in worker.model.parameters())
        worker.gossip.detach()
        transport.close()
        return finite, worker.gossip.iteration

    assert run_linked(topology, work, peers=peers) == [(True, ITERATIONS)] * 8


def test_a_clock_that_jumps_changes_nothing(monkeypatch) -> None:
    """Days back and forth at every look: only the clock that cannot jump may be looked at."""
    plan = cases.make_plan("greedy", "pairwise")
    looks = count()
    monkeypatch.setattr(time, "time", lambda: 1e9 + 1e6 * (-1) ** next(looks))
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))

    def work(transport):
        worker = Worker(transport, plan)
        worker.run(ITERATIONS)
        worker.gossip.detach()
        return worker.model.flat()["float64"], worker.gossip.state.elastic.left_out

    found, left_out = zip(*run_linked(plan.topology, work), strict=True)
    np.testing.assert_allclose(np.stack(found), expected(plan), rtol=0, atol=1e-10)
    assert set(left_out) == {0}


def test_nothing_that_runs_looks_at_the_clock_on_the_wall() -> None:
    for path in Path(matcha.distributed.__file__).parent.rglob("*.py"):
        assert not re.search(r"\btime\.time(_ns)?\(", path.read_text(encoding="utf-8")), path


def test_a_pace_is_that_of_iterations_whatever_else_happens() -> None:
    """A worker stopped in its second iteration once took its first, of a millisecond, for its pace.

    It then trained 36 iterations that the others had behind them, and they waited for it.
    """
    pace = Pace(0)
    assert pace.seconds is None
    for iteration, now in ((1, 10.0), (2, 10.001), (3, 10.101), (4, 15.101), (5, 15.201)):
        pace.note(iteration, now)
        pace.note(iteration, now + 0.0005)  # asked again while it waits
    assert pace.seconds == pytest.approx(0.1)
    pace.note(50, 15.3)  # a neighbour's state: far ahead at once
    assert pace.seconds == pytest.approx(0.1)


def test_a_state_that_cannot_be_used_is_refused_and_another_neighbour_asked(
    monkeypatch, caplog
) -> None:
    plan = cases.make_plan("greedy", "pairwise")
    topology = plan.topology
    peers = local_peers(topology.num_workers)
    donors: list[int] = []
    arrived, back = threading.Barrier(topology.num_workers), threading.Event()

    def spoil(worker, extra) -> bytes:
        donors.append(worker.rank)  # the first one that is asked gives garbage
        return b"garbage" if worker.rank == donors[0] else dump_snapshot(worker, extra)

    monkeypatch.setattr("matcha.distributed.elastic.membership.dump_snapshot", spoil)

    def work(transport):
        worker = Worker(transport, plan)
        worker.run(LOST)
        arrived.wait(150)
        if transport.rank == 3:
            vanish(transport)
            transport = LinkTransport(topology, 3, peers, timeout=90.0, start_timeout=150.0)
            worker = Worker(transport, plan)
            back.set()
        else:
            worker.tend_until(back)
        worker.run(ITERATIONS)
        worker.gossip.detach()
        transport.close()
        return worker.gossip.membership.donor

    assert run_linked(topology, work, peers=peers)[3] not in (None, donors[0])
    assert f"worker {donors[0]} gave a state that cannot be used" in caplog.text


def test_a_worker_whose_links_break_for_a_moment_does_not_average_alone() -> None:
    """A loaded machine is silent for long enough now and then; its links come back at once."""

    silent = matcha.plan(families.ring(3), 1.0, "silent")

    def work(transport: LinkTransport) -> torch.Tensor:
        model = torch.nn.Linear(3, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Gossip(
            model, optimizer, silent, transport=transport, on_loss="continue", timeout=100
        ) as gossip:
            with torch.no_grad():
                model.weight.fill_(float(transport.rank))
            barrier(transport, 100)  # all have started
            if transport.rank == 0:
                for peer in (1, 2):
                    cut_off(transport, peer)
                assert transport.members == (0,)
                for peer in (1, 2):
                    mend(transport, peer)
            with gossip.averaged():
                return model.weight.detach().clone()

    for average in run_linked(families.ring(3), work):
        torch.testing.assert_close(average, torch.ones(1, 3))


def test_a_bit_that_is_flipped_on_plain_tcp_costs_one_meeting(monkeypatch, caplog) -> None:
    caplog.set_level("INFO", logger="matcha.links")
    write, left = FrameStream._write, [1]

    def flip(stream: FrameStream, views: list[memoryview]) -> None:
        if views[0][0] == Kind.DATA and len(views) > 1 and len(views[1]) > 50 and left:
            left.pop()
            views[1] = memoryview(bytes([views[1][0] ^ 64, *views[1][1:]]))
        write(stream, views)

    plan = matcha.plan(families.path(2), 1.0, "vanilla")

    def work(transport: LinkTransport) -> tuple[int, float]:
        worker = Worker(transport, plan)
        monkeypatch.setattr(FrameStream, "_write", flip)
        while worker.gossip.iteration < ITERATIONS:
            if not left:
                worker.wait_for(1 - transport.rank)
            worker.run(worker.gossip.iteration + 1)
        assert worker.gossip.state.elastic is not None
        return worker.gossip.state.elastic.left_out, worker.gossip.state.elastic.shift

    assert [shift for _, shift in run_linked(plan.topology, work)] == [0.0, 0.0]
    assert "changed on its way" in caplog.text


def test_a_newcomer_that_asks_while_another_is_answered_gets_the_average_too(monkeypatch) -> None:
    """Its request came between the state for the first and those for all others, and it got one."""
    plan = cases.make_plan("vanilla", "laplacian")
    given: list[tuple[bytes, list[int]]] = []

    def work(transport):
        worker = Worker(transport, plan)
        if transport.rank:
            return
        membership = worker.gossip.membership

        def dump(*arguments) -> bytes:
            transport.state_requests |= {2}
            return dump_snapshot(*arguments)

        def give(own, contents, to) -> None:
            given.append((contents[0], [*to]))
            give_state(own, contents, to)

        monkeypatch.setattr(matcha.distributed.elastic.membership, "dump_snapshot", dump)
        monkeypatch.setattr(matcha.distributed.elastic.membership, "give_state", give)
        averaging = worker.gossip.state.averaging
        average = [torch.full_like(value, 7.0) for value in averaging.values()]
        membership.welcome = Welcome(workers=frozenset({1, 2}), values=average)
        transport.state_requests |= {1}
        while transport.state_requests or not given:
            membership.tend()

    run_linked(plan.topology, work)
    assert [to for _, to in given] == [[1], [2]]
    for content, _ in given:
        model = {n: t for n, t in safetensors.torch.load(content).items() if n.startswith("model/")}
        assert model
        assert all((tensor == 7.0).all() for tensor in model.values())
