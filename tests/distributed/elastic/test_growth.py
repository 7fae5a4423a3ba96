"""Workers that join a running training, and workers that leave it for good."""

from __future__ import annotations

import threading
from functools import cache

import numpy as np
import pytest
import torch
from tests.distributed.links.linked import HOST, local_peers

import matcha
from matcha import families
from matcha._io.keys import Keys, issue, new_keys
from matcha.distributed import Gossip, LinkTransport
from matcha.distributed.launch.environment import join_team
from matcha.distributed.links.joining import Joining
from matcha.plans import Events, Join, Leave
from matcha.simulation import Simulation
from matcha.training.dealing import DealtTask
from matcha.training.optimizers import SGD
from matcha.training.rates import Constant
from matcha.training.settings import Execution, Settings
from matcha.zoo.recipes import Choices, recipe

RATE, TOKEN = 0.05, "open sesame"
SETTINGS = Settings(
    epochs=1,
    optimizer=SGD(momentum=0.9),
    schedule=Constant(base=RATE),
    execution=Execution(precision="float64"),
)
PATIENCE = 90.0  # seconds of silence: a loaded machine may be silent for long


@cache
def digits():
    task = recipe("digits").task(Choices(num_workers=4))
    task.to(torch.device("cpu"), torch.float64)
    return task


class Team:
    """Workers as threads over links of their own, of which some join and leave."""

    def __init__(self, plan, keys=None) -> None:
        self.plan, self.keys = plan, keys
        self.peers = local_peers(plan.num_workers)
        self.results, self.errors, self.threads = {}, {}, []
        self.runs = threading.Event()

    def key(self, rank):
        return None if self.keys is None else Keys(directory=self.keys, rank=rank)

    def start(self, rank, work) -> None:
        """Start one of the first workers."""

        def body() -> None:
            own = {"keys": self.key(rank), "timeout": PATIENCE}
            transport = LinkTransport(self.plan.topology, rank, self.peers, **own)
            self._train(transport, work)

        self._run(body)

    def join(self, work, **options) -> None:
        """Start a worker that joins at worker 1's address."""

        def body() -> None:
            assert self.runs.wait(PATIENCE)
            where = f"{HOST}:{self.peers.addresses[1][1]}"
            joining = Joining(where, token=TOKEN, **options)
            self._train(join_team(joining), work)

        self._run(body)

    def _train(self, transport, work) -> None:
        model = digits().model().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        gossip = Gossip(
            model, optimizer, self.plan, transport=transport, timeout=150, on_loss="continue"
        )
        try:
            work(Trainee(self, gossip, optimizer))
            named = sorted(model.named_parameters())
            flat = torch.cat([p.detach().flatten() for _, p in named]).numpy().copy()
            self.results[gossip.rank] = flat, gossip.plan, gossip.membership.donor
        finally:
            gossip.detach()
            transport.close()

    def _run(self, body) -> None:
        def guarded() -> None:
            try:
                body()
            except BaseException as error:
                self.errors[threading.current_thread()] = error
                raise

        self.threads.append(threading.Thread(target=guarded))
        self.threads[-1].start()

    def wait(self):
        for thread in self.threads:
            thread.join()
        if self.errors:
            raise next(iter(self.errors.values()))
        return self.results


class Trainee:
    """A worker's loop."""

    def __init__(self, team, gossip, optimizer) -> None:
        self.team, self.gossip, self.optimizer = team, gossip, optimizer

    def step(self) -> None:
        assert not self.team.errors, "another worker failed"
        gossip, steps = self.gossip, digits().steps_per_epoch
        k, task = gossip.iteration, DealtTask(digits(), gossip.plan)
        tables = {name: torch.from_numpy(t) for name, t in task.tables(k // steps).items()}
        x, y = task.batch({name: table[k % steps] for name, table in tables.items()})
        loss, _ = task.loss(gossip.model, x[gossip.rank], y[gossip.rank], ())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.team.runs.set()

    @property
    def stages(self):
        return getattr(self.gossip.plan, "stages", ())

    def run_to_stage(self, number) -> None:
        """Train until the plan has so many stages, and to the end of an epoch soon after."""
        steps = digits().steps_per_epoch
        while len(self.stages) < number:
            self.step()
        end = -(-(self.stages[number - 1].start + 5) // steps) * steps
        while self.gossip.iteration < end:
            self.step()


@pytest.mark.parametrize("secure", [True, False])
def test_a_team_grows_and_shrinks_as_the_simulator_says(tmp_path, monkeypatch, secure) -> None:
    monkeypatch.setenv("MATCHA_TOKEN", TOKEN)
    keys = None
    if secure:
        keys = tmp_path / "keys"
        new_keys(keys, 4)
        for rank in (4, 5):
            issue(keys, rank)
    plan = matcha.plan(families.ring(4), 0.5, "greedy")
    team = Team(plan, keys)

    def stay(trainee) -> None:
        trainee.run_to_stage(3)

    def go(trainee) -> None:
        while len(trainee.stages) < 2:
            trainee.step()
        trainee.gossip.leave()
        while not trainee.gossip.has_left:
            trainee.step()

    for rank in range(4):
        team.start(rank, go if rank == 2 else stay)
    for rank in (4, 5):
        team.join(stay, keys=team.key(rank)) if secure else team.join(stay, rank=rank)
    results = team.wait()

    staged = results[0][1]
    assert [level.members for level in staged.levels[-1:]] == [(0, 1, 3, 4, 5)]
    starts = [stage.start for stage in staged.stages]
    joins = []
    for before, at in zip(staged.stages, staged.stages[1:], strict=False):
        new = {*staged.level_at(at.start).members} - {*staged.level_at(before.start).members}
        joins += [
            Join(worker=w, at=at.start, donor=results[w][2], links=staged.topology.neighbors(w))
            for w in sorted(new)
        ]
    events = Events(joins=tuple(joins), leaves=(Leave(worker=2, at=starts[-1]),))
    end = -(-(starts[-1] + 5) // digits().steps_per_epoch)
    settings = Settings(
        epochs=end,
        optimizer=SETTINGS.optimizer,
        schedule=SETTINGS.schedule,
        execution=SETTINGS.execution,
    )
    simulation = Simulation(digits(), staged, settings, events=events, compute_time=0.0)
    list(simulation)
    stacked = sorted(simulation.engine.workers.stacked().items())
    right = torch.cat([values.reshape(6, -1) for _, values in stacked], dim=1).numpy()
    for worker in (0, 1, 3, 4, 5):
        np.testing.assert_allclose(results[worker][0], right[worker], rtol=0, atol=1e-10)
