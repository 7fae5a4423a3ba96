"""Faults pinned to iterations: real workers end where the simulator, playing the script, ends."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from tests.distributed import cases
from tests.distributed.elastic.test_membership import wait_until
from tests.distributed.links.linked import cut_off, local_peers, mend, run_linked

from matcha.distributed import Gossip, LinkTransport
from matcha.errors import InputError
from matcha.plans import Cut, Events, Loss
from matcha.simulation import Simulation
from matcha.training.optimizers import SGD
from matcha.training.rates import Constant
from matcha.training.settings import Execution, Settings
from matcha.wires import parse_wire
from matcha.zoo.recipes import Choices, recipe

EPOCHS, LOST, BACK, CUT, MENDED = 2, 4, 13, 6, 16
VICTIM, LINK = 3, (1, 7)
SETTINGS = Settings(
    epochs=EPOCHS,
    optimizer=SGD(momentum=0.9, nesterov=True, weight_decay=1e-3),
    schedule=Constant(base=0.05),
    execution=Execution(precision="float64"),
)


@cache
def make_task():
    """One for all workers: it only tells them what to train on."""
    task = recipe("digits").task(Choices(num_workers=8))
    task.to(torch.device("cpu"), torch.float64)
    return task


class Player:
    """A worker that acts a script out."""

    def __init__(self, plan, settings, peers, arrived, both) -> None:
        self.plan, self.peers, self.arrived, self.both = plan, peers, arrived, both
        self.settings = settings

    def start(self, transport) -> None:
        self.transport = transport
        self.task = make_task()
        model = self.task.model().double()
        (self.optimizer,) = self.settings.optimizer.for_model(model)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.05
        self.gossip = Gossip(
            model,
            self.optimizer,
            self.plan,
            transport=transport,
            momentum=self.settings.momentum,
            clip=self.settings.clip,
            overlap=self.settings.overlap,
            timeout=150,
            on_loss="continue",
        )
        if self.gossip.state.overlaps:
            # The next round's exchange begins when a step ends, before the script can act: let it
            # wait for the gradient, which changes nothing else.
            hooks = self.gossip._hooks
            begin, end = hooks.begin, hooks.end_iteration

            def end_without_beginning() -> None:
                hooks.begin = lambda: None
                end()
                hooks.begin = begin

            hooks.end_iteration = end_without_beginning

    def run(self, stop: int) -> None:
        steps, task, rank = self.task.steps_per_epoch, self.task, self.gossip.rank
        while (k := self.gossip.iteration) < stop:
            tables = {name: torch.from_numpy(t) for name, t in task.tables(k // steps).items()}
            x, y = task.batch({name: table[k % steps] for name, table in tables.items()})
            loss, _ = task.loss(self.gossip.state.modules, x[rank], y[rank], ())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def wait_for(self, *peers: int) -> None:
        def are_up() -> bool:
            self.gossip.membership.tend()
            with self.transport.lock:
                return set(peers) <= {c.peer for c in self.transport.live_connections()}

        wait_until(are_up)

    def play(self, transport):
        rank, topology = transport.rank, self.plan.topology
        partner = [sum(LINK) - rank] if rank in LINK else []
        around = topology.neighbors(VICTIM)
        self.start(transport)
        self.run(LOST)
        if rank == VICTIM:
            transport.close()  # between two iterations; a kill could catch a meeting's last byte
            self.arrived.wait(150)
            transport = LinkTransport(topology, rank, self.peers, timeout=90.0, start_timeout=150.0)
            self.start(transport)
            assert self.gossip.iteration == BACK
            self.wait_for(*around)
        else:
            wait_until(lambda: VICTIM not in self.gossip.members)
            self.run(CUT)
            for peer in partner:
                self.both.wait(150)  # neither end cuts into a meeting of the iteration before
                cut_off(transport, peer)
            self.run(BACK)
            self.arrived.wait(150)
            self.wait_for(*[VICTIM] if rank in around else [])
            self.run(MENDED)
            for peer in partner:
                mend(transport, peer)
            self.wait_for(*partner)
        self.run(EPOCHS * self.task.steps_per_epoch)
        named = sorted(self.gossip.state.modules.named_parameters())
        flat = torch.cat([p.detach().flatten() for _, p in named])
        donor = self.gossip.membership.donor
        self.gossip.detach()
        transport.close()
        return flat.numpy().copy(), donor


# One-way messages cannot do without a worker: on_loss="continue" refuses them.
MEETINGS = [case for case in cases.STRATEGIES if case[1] not in ("push", "windows", "relay")]


OTHERS = {"wire": "float32", "momentum": "local", "clip": None, "overlap": False}
WIRES = ("bfloat16", "modulo:8", "modulo:4", "modulo:3", "modulo:2", "lowrank:2")
MOMENTA = ("quasi-global", "outer", "tracking", "shared")
CASES = [
    *({"strategy": strategy, "mixing": mixing} for strategy, mixing in MEETINGS),
    *({"wire": wire} for wire in WIRES),
    *({"momentum": momentum} for momentum in MOMENTA),
    {"momentum": "tracking", "wire": "modulo:4", "mixing": "laplacian", "strategy": "matcha"},
    {"momentum": "outer", "wire": "lowrank:1"},
    {"clip": 0.5},
    {"overlap": True},
    {"overlap": True, "momentum": "quasi-global", "wire": "modulo:4"},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_the_simulator_plays_what_happened(case) -> None:
    how = {"strategy": "greedy", "mixing": "pairwise"} | OTHERS | case
    plan = cases.make_plan(how["strategy"], how["mixing"])
    plan = replace(plan, wire=parse_wire(how["wire"]))
    asked = {name: how[name] for name in ("momentum", "clip", "overlap")}
    settings = replace(SETTINGS, **asked)
    if how["momentum"] == "tracking":
        settings = replace(settings, optimizer=SGD())
    assert LINK in plan.topology.links
    peers = local_peers(plan.num_workers)
    arrived, both = threading.Barrier(plan.num_workers), threading.Barrier(2)
    results = run_linked(
        plan.topology,
        lambda transport: Player(plan, settings, peers, arrived, both).play(transport),
        peers=peers,
    )
    found = np.stack([flat for flat, _ in results])
    events = Events(
        losses=(Loss(worker=VICTIM, at=LOST, back=BACK, donor=results[VICTIM][1]),),
        cuts=(Cut(link=LINK, at=CUT, until=MENDED),),
    )
    simulation = Simulation(make_task(), plan, settings, events=events, compute_time=0.0)
    records = list(simulation)
    stacked = sorted(simulation.engine.workers.stacked().items())
    right = torch.cat([values.reshape(plan.num_workers, -1) for _, values in stacked], dim=1)
    np.testing.assert_allclose(found, right.numpy(), rtol=0, atol=1e-10)
    assert [record.members for record in records] == [7, 8]
    changes = [change for record in records for change in record.changes or ()]
    assert changes == [[LOST, VICTIM, 0], [BACK, VICTIM, 1]]


def test_one_way_messages_cannot_do_without_a_worker() -> None:
    plan = cases.make_plan("greedy", "pairwise")
    plan = plan.with_process(mixing="push")

    def work(transport):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(InputError, match="needs meetings of two"):
            Gossip(model, optimizer, plan, transport=transport, on_loss="continue")

    run_linked(plan.topology, work)
