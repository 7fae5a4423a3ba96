from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch
from tests.distributed import asynchronous, cases
from tests.distributed.links.linked import run_linked
from torch import nn

from matcha import families, plan
from matcha.distributed import Gossip, MpiTransport
from matcha.distributed.transports.emulation import SlowLinks
from matcha.errors import ExchangeError, InputError
from matcha.testing import MemoryNetwork, run_threads

PATIENCE = 150.0
ER8 = families.paper("er8")
GREEDY = cases.make_plan("greedy", "pairwise")


def flat(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def scattered(rank):
    """A model whose values differ from worker to worker, and an optimizer that counts its steps."""
    model = nn.Sequential(nn.Linear(9, 5), nn.Linear(5, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def scatter(model, rank):
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))


def step(model, optimizer, rank, k):
    optimizer.zero_grad()
    inputs = torch.randn(2, 9, generator=torch.Generator().manual_seed(97 * rank + k)).double()
    model(inputs).tanh().sum().backward()
    before = flat(model)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    optimizer.step()
    return before, gradient


def meet_first(gossip):
    """Hold all meetings of the current round; only where everybody does, at every iteration."""
    gossip._hooks.begin()
    asynchronous.meet_all(gossip.state.asynchrony.rendezvous)


@pytest.mark.parametrize("seed", range(8))
def test_the_sum_is_kept_whatever_the_speeds(seed):
    """Of what workers hold in the end, gradient steps apart, to 1e-12; with any endings."""
    mixing = "pairwise" if seed % 2 else "laplacian"
    chosen = cases.make_plan("greedy" if seed % 2 else "matcha", mixing, seed)

    def work(transport):
        rng = random.Random(10 * seed + transport.rank)
        model, optimizer = scattered(transport.rank)
        gossip = Gossip(
            model, optimizer, chosen, transport=transport, asynchronous=True,
            timeout=PATIENCE, bucket_cap_mb=2e-4, momentum="local",
        )  # fmt: skip
        scatter(model, transport.rank)
        start, steps = flat(model), torch.zeros(1, dtype=torch.float64)
        pace = rng.choice([0.0, 1e-3, 4e-3])
        for k in range(rng.randrange(20, 50)):
            _, gradient = step(model, optimizer, transport.rank, k)
            steps = steps - 0.01 * gradient
            time.sleep(pace * rng.random())
            if k in (5, 11):
                with gossip.averaged() as average:
                    middle = flat(average), start + steps
        # However loaded the machine, each has met each neighbour in the end.
        rendezvous, neighbors = gossip.state.asynchrony.rendezvous, ER8.neighbors(transport.rank)
        rendezvous.want(dict.fromkeys(neighbors, 0.5))
        asynchronous.meet_all(rendezvous)
        gossip.detach()
        return flat(model), start + steps, rendezvous.held >= len(neighbors), middle

    found = run_threads(8, work)
    ends, alone = (torch.stack([f[part] for f in found]) for part in (0, 1))
    assert (ends.mean(0) - alone.mean(0)).abs().max() < 1e-12
    assert all(f[2] for f in found)
    averages = torch.stack([f[3][0] for f in found])
    expected = torch.stack([f[3][1] for f in found]).mean(0)
    assert (averages - expected).abs().max() < 1e-12


def test_in_step_it_is_the_overlapped_exchange():
    """Equal speeds, a partner a round, and every meeting held before the step ends."""
    chosen = cases.make_plan("single", "pairwise")

    def work(transport):
        model = cases.Quadratic(transport.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=cases.RATE)
        options = {"transport": transport, "bucket_cap_mb": 3e-4, "timeout": PATIENCE}
        with Gossip(model, optimizer, chosen, asynchronous=True, **options) as gossip:
            for _ in range(cases.ITERATIONS):
                optimizer.zero_grad()
                model().backward()
                meet_first(gossip)
                optimizer.step()
            asynchronous.meet_all(gossip.state.asynchrony.rendezvous)
            gossip.state.asynchrony._moves = [
                torch.zeros_like(m) for m in gossip.state.asynchrony._moves
            ]
            return model.flat()  # without the meetings of a step that does not come

    cases.check(run_threads(8, work), chosen, "footnote")


def test_a_slow_worker_holds_up_nobody():
    """Seven go through all their iterations while the eighth is still in its first."""

    def work(transport):
        model, optimizer = scattered(transport.rank)
        options = {"transport": transport, "asynchronous": True, "timeout": PATIENCE}
        with Gossip(model, optimizer, GREEDY, **options) as gossip:
            if transport.rank == 7:
                end = time.monotonic() + PATIENCE
                others = [(r, "done") for r in range(7)]
                while any(transport.network.notes.get(o) is None for o in others):
                    assert time.monotonic() < end
                    time.sleep(0.01)
            for k in range(20 if transport.rank < 7 else 2):
                step(model, optimizer, transport.rank, k)
            transport.set_note("done", "yes")
            return gossip.state.asynchrony.rendezvous.held

    assert len(run_threads(8, work)) == 8


def test_a_checkpoint_is_of_one_iteration_and_goes_on(tmp_path):
    def work(transport):
        model, optimizer = scattered(transport.rank)
        options = {"transport": transport, "asynchronous": True, "timeout": PATIENCE}
        with Gossip(model, optimizer, GREEDY, **options) as gossip:
            for k in range(6):
                step(model, optimizer, transport.rank, k)
            gossip.save(tmp_path)
            saved = flat(model)
            step(model, optimizer, transport.rank, 6)
            gossip.load(tmp_path)
            assert gossip.iteration == 6
            assert torch.equal(flat(model), saved)
            step(model, optimizer, transport.rank, 6)
            if transport.rank == 3:
                step(model, optimizer, transport.rank, 7)
            with pytest.raises(
                ExchangeError,
                match=r"nothing is saved: rank 0 .* iteration 7 and rank 3 .* iteration 8",
            ):
                gossip.save(tmp_path)

    run_threads(8, work)


def test_it_works_beside_averaged_statistics_half_precision_and_slow_links():
    chosen = plan(families.ring(4), 1.0, "matcha", wire="bfloat16")

    def work(transport):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with Gossip(
            model, optimizer, chosen, transport=SlowLinks(transport, 100.0), asynchronous=True,
            timeout=PATIENCE, buffers="average",
        ) as gossip:  # fmt: skip
            scatter(model, transport.rank)
            start = flat(model)
            for k in range(30):
                meet_first(gossip)
                step(model, optimizer, transport.rank, k)
            distance = gossip.consensus_distance()
        return start, flat(model), distance

    found = run_threads(4, work)
    starts, ends = (torch.stack([f[part] for f in found]) for part in (0, 1))
    assert (starts.mean(0) - ends.mean(0)).abs().max() < 1e-12
    assert found[0][2] < 0.2 * float((starts - starts.mean(0)).square().sum(1).mean())


def test_alone_it_trains_as_without():
    model, optimizer = scattered(0)
    chosen = plan(families.path(2), 1.0, "vanilla")
    transport = MemoryNetwork(1).transport(0)
    with Gossip(model, optimizer, chosen, transport=transport, asynchronous=True) as gossip:
        step(model, optimizer, 0, 0)
        assert gossip.iteration == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"overlap": True}, "leave overlap out"),
        ({"momentum": "quasi-global"}, "leave momentum at 'local'"),
        ({"plan": cases.real_plan("greedy", "push", 3)}, "choose a plan of pairs"),
        ({"plan": plan(families.ring(3), 1.0, "allreduce")}, "choose a plan of pairs"),
        ({"plan": plan(families.ring(3), 0.5, "matcha", wire="modulo:4")}, "float32 or bfloat16"),
    ],
)
def test_what_cannot_be_right_is_refused_in_a_sentence(options, said):
    chosen = options.pop("plan", None) or plan(families.ring(3), 1.0, "vanilla")

    def work(transport):
        model, optimizer = scattered(0)
        with pytest.raises(InputError, match=said) as raised:
            Gossip(
                model, optimizer, chosen, transport=transport, timeout=PATIENCE,
                asynchronous=True, **options,
            )  # fmt: skip
        return str(raised.value)

    (message,) = set(run_threads(3, work))
    assert "asynchronous=True" in message
    assert message.count(".") == 1


def test_only_transports_that_two_threads_may_use_are_taken():
    def work(transport):
        transport.threads = MpiTransport.threads
        model, optimizer = scattered(0)
        with pytest.raises(InputError, match="choose gloo or links of our own"):
            Gossip(model, optimizer, GREEDY, transport=transport, asynchronous=True, timeout=60)

    run_threads(8, work)


def test_without_steps_of_ones_own_workers_agree():
    """Meetings alone lead to the average."""

    def work(transport):
        model, _ = scattered(0)
        options = {"transport": transport, "asynchronous": True, "timeout": PATIENCE}
        with Gossip(model, None, GREEDY, **options) as gossip:
            scatter(model, transport.rank)
            start = flat(model)
            for _ in range(40):
                meet_first(gossip)
                gossip.step()
        return start.numpy(), flat(model).numpy()

    found = run_threads(8, work)
    start, end = (np.stack([f[part] for f in found]) for part in (0, 1))
    np.testing.assert_allclose(end.mean(0), start.mean(0), atol=1e-12)
    assert end.std(0).mean() < 0.2 * start.std(0).mean()


def test_it_runs_over_gloo(workers, tmp_path):
    count = asynchronous.NUM_WORKERS
    workers.run("asynchronous.py", str(tmp_path), num_workers=count)
    asynchronous.check(
        [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(count)]
    )


def test_it_runs_over_links_of_our_own():
    asynchronous.check(run_linked(asynchronous.PLAN.topology, asynchronous.train))
