"""Workers that join a running training, and workers that leave it for good."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.distributed.elastic.test_membership import wait_until
from tests.distributed.links.linked import (
    HOST,
    cut_off,
    local_peers,
    mend,
    run_linked,
    vanish,
)

import matcha
from matcha import families
from matcha._io.keys import Keys, issue, new_keys
from matcha.distributed import Gossip, GossipOptions, LinkTransport
from matcha.distributed.checkpoint import checkpoints
from matcha.distributed.elastic import growth
from matcha.distributed.elastic.membership import Membership
from matcha.distributed.elastic.shard import Shard, batch_of
from matcha.distributed.elastic.sponsor import Sponsor
from matcha.distributed.launch.placement import join_team
from matcha.distributed.links import joining
from matcha.distributed.links.joining import Joining
from matcha.distributed.links.listener import JoinRequest, RefusedError
from matcha.distributed.transports.collectives import barrier
from matcha.errors import DataError, ExchangeError, InputError
from matcha.plans import Events, Join, Leave, Loss
from matcha.simulation import Simulation
from matcha.strategies.planning import in_stages, with_workers
from matcha.testing import run_threads
from matcha.training.optimizers import SGD
from matcha.training.rates import Constant
from matcha.training.settings import Execution, Settings
from matcha.training.task import DealtTask
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

    def __init__(self, plan, keys=None, momentum="local") -> None:
        self.plan, self.keys, self.momentum = plan, keys, momentum
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
            if rank == 1:  # which newcomers ask, and which may have no Gossip yet
                self.runs.set()
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
        options = {"timeout": 150, "on_loss": "continue", "momentum": self.momentum}
        gossip = Gossip(model, optimizer, self.plan, transport=transport, **options)
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
        loss, _ = task.loss(gossip.state.modules, x[gossip.rank], y[gossip.rank], ())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

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


def go(trainee) -> None:
    """Leave for good once others have come."""
    while len(trainee.stages) < 2:
        trainee.step()
    trainee.gossip.leave()
    while trainee.gossip.rank in trainee.gossip.members:
        trainee.step()


@pytest.mark.parametrize("momentum", ["local", "quasi-global"])
def test_a_team_grows_and_shrinks_as_the_simulator_says(tmp_path, monkeypatch, momentum) -> None:
    monkeypatch.setenv("MATCHA_TOKEN", TOKEN)
    monkeypatch.setattr(growth, "_HOLD", PATIENCE)  # the machine may be loaded, and none is lost
    grow_and_shrink(tmp_path, secure=False, momentum=momentum)


@pytest.mark.long("the same as above over TLS, by which strangers are refused below")
def test_a_team_grows_and_shrinks_over_tls_as_the_simulator_says(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(growth, "_HOLD", PATIENCE)
    grow_and_shrink(tmp_path, secure=True)


def grow_and_shrink(tmp_path: Path, *, secure: bool, momentum: str = "local") -> None:
    keys = None
    if secure:
        keys = tmp_path / "keys"
        new_keys(keys, 4)
        for rank in (4, 5):
            issue(keys, rank)
    plan = matcha.plan(families.ring(4), 0.5, "greedy")
    team = Team(plan, keys, momentum)

    def stay(trainee) -> None:
        trainee.run_to_stage(3)

    for rank in range(4):
        team.start(rank, go if rank == 2 else stay)
    for rank in (4, 5):
        team.join(stay, keys=team.key(rank)) if secure else team.join(stay, rank=rank)
    results = team.wait()

    staged = results[0][1]
    assert [level.members for level in staged.levels[-1:]] == [(0, 1, 3, 4, 5)]
    starts = [stage.start for stage in staged.stages]
    events = Events(joins=joins_of(results, staged), leaves=(Leave(worker=2, at=starts[-1]),))
    end = -(-(starts[-1] + 5) // steps_per_epoch())
    check_simulated(results, staged, events, end=end, momentum=momentum)


def steps_per_epoch() -> int:
    return digits().steps_per_epoch


def joins_of(results, staged) -> tuple[Join, ...]:
    joins = []
    for before, at in zip(staged.stages, staged.stages[1:], strict=False):
        new = {*staged.level_at(at.start).members} - {*staged.level_at(before.start).members}
        joins += [
            Join(worker=w, at=at.start, donor=results[w][2], links=staged.topology.neighbors(w))
            for w in sorted(new)
        ]
    return tuple(joins)


def check_simulated(results, staged, events, *, end: int, momentum: str = "local") -> None:
    """After so many epochs the simulator's workers are where the last members are."""
    settings = replace(SETTINGS, epochs=end, momentum=momentum)
    simulation = Simulation(digits(), staged, settings, events=events, compute_time=0.0)
    list(simulation)
    stacked = sorted(simulation.engine.workers.stacked().items())
    number = staged.topology.num_workers
    right = torch.cat([values.reshape(number, -1) for _, values in stacked], dim=1).numpy()
    for worker in staged.levels[-1].members:
        np.testing.assert_allclose(results[worker][0], right[worker], rtol=0, atol=1e-10)


@pytest.mark.parametrize("way", ["its neighbours", "join"])
def test_a_lost_worker_returns_to_a_team_that_has_changed(way, monkeypatch) -> None:
    """While it was away one joined and the one that plans left."""
    monkeypatch.setenv("MATCHA_TOKEN", TOKEN)
    monkeypatch.setattr(growth, "_HOLD", PATIENCE)
    team, lost_at = Team(matcha.plan(families.ring(4), 0.5, "greedy")), 10
    here, away, returns = threading.Barrier(4), threading.Event(), threading.Barrier(4)
    ends: set[int] = set()

    def stay(trainee) -> None:
        gossip, steps = trainee.gossip, steps_per_epoch()
        if gossip.rank < 4:
            while gossip.iteration < lost_at:
                trainee.step()
            here.wait(PATIENCE)
            assert away.wait(PATIENCE)
        if gossip.rank == 0:
            while len(trainee.stages) < 2:
                trainee.step()
            gossip.leave()
            while gossip.rank in gossip.members:
                trainee.step()
            return
        trainee.run_to_stage(3)
        ends.add(gossip.iteration)
        returns.wait(PATIENCE)
        if 2 in gossip.plan.topology.neighbors(gossip.rank):
            wait_for_links(gossip, {2})
        while gossip.iteration < max(ends) + steps:
            trainee.step()

    def lose(trainee) -> None:
        while trainee.gossip.iteration < lost_at:
            trainee.step()
        here.wait(PATIENCE)
        vanish(trainee.gossip.state.transport)
        away.set()

    def come_back(trainee) -> None:
        assert trainee.gossip.iteration == max(ends)
        assert trainee.gossip.num_workers == 4
        near = {*trainee.gossip.plan.topology.neighbors(2)} & {*range(1, 5)}
        wait_for_links(trainee.gossip, near)
        while trainee.gossip.iteration < max(ends) + steps_per_epoch():
            trainee.step()

    for rank in range(4):
        team.start(rank, lose if rank == 2 else stay)
    assert away.wait(PATIENCE)
    team.join(stay, rank=4)
    returns.wait(PATIENCE)
    team.start(2, come_back) if way == "its neighbours" else team.join(come_back, rank=2)
    results = team.wait()

    staged, (end,) = results[1][1], ends
    assert [level.members for level in staged.levels] == [
        (0, 1, 2, 3),
        (0, 1, 2, 3, 4),
        (1, 2, 3, 4),
    ]
    joins = joins_of(results, staged)
    back = Loss(worker=2, at=lost_at, back=end, donor=results[2][2])
    leave = Leave(worker=0, at=staged.stages[-1].start)
    events = Events(losses=(back,), joins=joins, leaves=(leave,))
    check_simulated(results, staged, events, end=end // steps_per_epoch() + 1)


def wait_for_links(gossip, peers: set[int]) -> None:
    transport = gossip.state.transport

    def are_up() -> bool:
        gossip.membership.tend()
        with transport.lock:
            return peers <= {each.peer for each in transport.live_connections()}

    wait_until(are_up)


def test_strangers_do_not_join_and_training_goes_on(tmp_path) -> None:
    keys, foreign, old = (tmp_path / name for name in ("keys", "foreign", "old"))
    new_keys(keys, 5)
    new_keys(foreign, 5)
    shutil.copytree(keys, old)
    issue(keys, 4)  # its certificate of before is revoked
    team = Team(matcha.plan(families.ring(4), 0.5, "greedy"), keys)
    steps, over = [0] * 4, threading.Event()

    def stay(trainee) -> None:
        while not over.is_set():
            trainee.step()
            steps[trainee.gossip.rank] += 1
        assert not trainee.stages

    for rank in range(4):
        team.start(rank, stay)
    try:
        assert team.runs.wait(PATIENCE)
        where = f"{HOST}:{team.peers.addresses[1][1]}"
        for folder, rank in ((foreign, 4), (old, 4), (None, 4)):
            own = None if folder is None else Keys(directory=folder, rank=rank)
            with pytest.raises(ExchangeError, match=where):
                Joining(where, keys=own, token=TOKEN).finish()
        with pytest.raises(ExchangeError, match="worker 1 is there already"):
            Joining(where, keys=Keys(directory=keys, rank=1)).finish()
        good = Keys(directory=keys, rank=4)
        with pytest.raises(ExchangeError, match="needs links to workers that are there"):
            Joining(where, keys=good).finish(links=[7])
        other = Joining(where, keys=good)
        with pytest.raises(InputError, match="the team has another options"):
            other.check({**other.facts, "options": "clip 1"})
        Joining(where, keys=good).close()  # it dies before it has asked
        before = list(steps)
        wait_until(lambda: all(now > then for now, then in zip(steps, before, strict=True)))
    finally:
        over.set()
    team.wait()


def test_a_team_without_keys_asks_for_its_token() -> None:
    def heard(token: str, shown: str) -> str:
        keyless = SimpleNamespace(has_keys=False)
        sponsor = Sponsor(SimpleNamespace(), keyless, {}, "", token)
        with pytest.raises(RefusedError) as refused:
            sponsor(JoinRequest(join=-1, token=shown))
        return str(refused.value)

    assert "neither keys nor a token" in heard("", "")
    assert "does not show this team's token" in heard(TOKEN, "open sesam")
    assert "does not show this team's token" in heard(TOKEN, "")


@pytest.mark.parametrize("before", ["its Gossip", "it trains"])
def test_a_newcomer_that_asks_a_member_too_early_comes_again(before, monkeypatch, caplog) -> None:
    """It was told that this team takes in no others, or left without an answer."""
    monkeypatch.setenv("MATCHA_TOKEN", TOKEN)
    monkeypatch.setattr(growth, "_HOLD", PATIENCE)
    caplog.set_level("DEBUG", logger="matcha.links")
    where = Gossip, "_start"
    if before == "it trains":
        where = Membership, "start"
    begin = getattr(*where)

    def late(self, *arguments) -> None:
        if threading.current_thread().name == "1":
            wait_until(lambda: "is asked to come again" in caplog.text)
        begin(self, *arguments)

    monkeypatch.setattr(*where, late)
    team = Team(matcha.plan(families.ring(3), 0.5, "greedy"))
    for rank in range(3):
        team.start(rank, lambda trainee: trainee.run_to_stage(2))
        team.threads[-1].name = str(rank)
    team.join(lambda trainee: trainee.run_to_stage(2))
    assert {plan.levels[-1].members for _, plan, _ in team.wait().values()} == {(0, 1, 2, 3)}


def test_who_is_told_for_too_long_to_come_again_gives_up(monkeypatch) -> None:
    monkeypatch.setattr(joining, "_COMES_AGAIN", 0.0)

    def work(transport) -> None:
        if transport.rank == 1:
            with pytest.raises(ExchangeError, match="does not take this worker in: it has yet to"):
                Joining(f"{HOST}:{transport.team.peers.addresses[1][1]}", token=TOKEN)
        barrier(transport, PATIENCE)

    run_linked(families.path(2), work)


def test_a_worker_joins_a_team_that_goes_on_without_those_it_loses() -> None:
    with pytest.raises(InputError, match="leave on_loss out"):
        GossipOptions(join="a:1", on_loss="stop")
    assert GossipOptions(join="a:1").with_launcher().on_loss == "continue"


def test_a_team_that_has_changed_is_saved_and_another_starts_from_its_average(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("MATCHA_TOKEN", TOKEN)
    team, averages = Team(matcha.plan(families.ring(3), 0.5, "greedy")), []

    def stay(trainee) -> None:
        trainee.run_to_stage(3)
        trainee.gossip.save(tmp_path / "saved", extra={"rank": trainee.gossip.rank})
        averages.append(trainee.gossip.averaged_state_dict())

    for rank in range(3):
        team.start(rank, go if rank == 0 else stay)
    team.join(stay)
    team.wait()
    (info,) = checkpoints(tmp_path / "saved")
    assert (info.workers, info.is_whole) == ([1, 2, 3], True)

    def resume(transport):
        model = digits().model().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        plan = matcha.plan(families.complete(2), 0.5, "vanilla")
        gossip = Gossip(model, optimizer, plan, transport=transport)
        with pytest.raises(DataError, match=r"of workers 1, 2, 3 of a team that had changed"):
            gossip.load(tmp_path / "saved")
        assert gossip.load(tmp_path / "saved", average=True) == {"rank": 1}
        assert gossip.iteration == info.iteration
        return model.state_dict()

    for model in run_threads(2, resume):
        for name, value in model.items():
            torch.testing.assert_close(value, averages[0][name], rtol=0, atol=1e-12)


def test_each_example_is_dealt_once_in_each_pass_whoever_comes_and_goes() -> None:
    plan = matcha.plan(families.ring(3), 0.5, "greedy")
    grown = in_stages(plan).with_stage(5, with_workers(plan, {3: [0, 1], 4: [2, 0]}))
    both = grown.with_stage(9, with_workers(grown, {}, left=[1]))
    size, batch = 50, 4
    seen = [
        n
        for k in range(30)
        for w in both.level_at(k).members
        for n in batch_of(both, k, w, size=size, batch_size=batch, seed=3)
    ]
    turns = [seen[n : n + size] for n in range(0, len(seen) - size, size)]
    assert len(turns) > 5
    assert all(sorted(turn) == list(range(size)) for turn in turns)
    assert turns[0] != turns[1]


def test_a_shard_is_one_pass_and_ends_for_all_at_the_same_iteration() -> None:
    plan = matcha.plan(families.ring(3), 0.5, "greedy")
    given = {"size": 50, "batch_size": 4, "seed": 0}
    ends = []
    for worker in range(3):
        now = [0]
        shard = Shard(lambda: plan, lambda now=now: now[0], worker, **given)
        for rows in shard:
            assert rows == batch_of(plan, now[0], worker, **given)
            now[0] += 1
        ends.append(now[0])
    assert ends == [5, 5, 5]
    shard = iter(Shard(lambda: plan, lambda: 0, 0, **given))
    next(shard)
    with pytest.raises(InputError, match="leave num_workers at 0"):
        next(shard)


@pytest.mark.long("seconds until the lost one is given up; test_membership.py loses workers, too")
def test_the_next_one_plans_when_the_planner_is_lost(monkeypatch) -> None:
    monkeypatch.setenv("MATCHA_TOKEN", TOKEN)
    team, gone = Team(matcha.plan(families.ring(4), 0.5, "greedy")), threading.Event()

    def die(trainee) -> None:
        growth, transport = trainee.gossip._growth, trainee.gossip.state.transport

        def lose(*_: object) -> None:  # it has proposed, and fixes no iteration any more
            if growth._draft.number and not gone.is_set():
                gone.set()
                threading.Thread(target=vanish, args=(transport,)).start()
            elif not gone.is_set():
                promote(growth._draft)

        promote, growth._promote = growth._promote, lose
        while not gone.is_set():
            trainee.step()

    def stay(trainee) -> None:
        trainee.run_to_stage(2)
        assert trainee.gossip.plan.levels[-1].members == (0, 1, 2, 3, 4)

    for rank in range(4):
        team.start(rank, stay if rank else die)
    team.join(stay)
    results = team.wait()
    assert {1, 2, 3, 4} <= results.keys()
    assert gone.is_set()


def test_who_has_left_for_good_is_not_waited_for_when_the_next_one_leaves(monkeypatch) -> None:
    """A call waits for those who were lost just now; this one said that it would not come back."""
    waited: list[list[int]] = []
    ask = LinkTransport._may_return

    def noted(self) -> list[int]:
        waited.append(ask(self))
        return waited[-1]

    monkeypatch.setattr(LinkTransport, "_may_return", noted)
    team = Team(matcha.plan(families.ring(5), 0.5, "greedy"))

    def go(number):
        def work(trainee) -> None:
            while len(trainee.stages) < number:
                trainee.step()
            trainee.gossip.leave()
            while trainee.gossip.rank in trainee.gossip.members:
                trainee.step()

        return work

    def stay(trainee) -> None:
        trainee.run_to_stage(3)

    for rank, work in enumerate([go(0), stay, stay, go(2), stay]):
        team.start(rank, work)
    assert team.wait()[1][1].levels[-1].members == (1, 2, 4)
    assert waited
    assert not any(waited)


def test_who_missed_a_change_holds_up_none_and_takes_a_state(monkeypatch) -> None:
    """It heard too late, and waited in a meeting for one that waited for it in the change."""
    monkeypatch.setenv("MATCHA_TOKEN", TOKEN)
    monkeypatch.setattr(growth, "_HOLD", PATIENCE)
    team = Team(matcha.plan(families.ring(4), 1.0, "vanilla"))

    def deaf(trainee) -> None:
        own = trainee.gossip._growth
        hear = own._hear

        def late() -> None:
            """Names a fence and does not wait for it; hears when it is past the change."""
            notes = own._transport.get_notes("change", everyone=True).values()
            said = [growth._numbers(text) for text in notes]
            if all(not at or own._position > at for _, at in said):
                hear()
            own._fence = None

        own._hear = late
        trainee.run_to_stage(2)
        assert trainee.gossip.membership.returns == 1

    for rank in range(4):
        team.start(rank, deaf if rank == 2 else lambda trainee: trainee.run_to_stage(2))
    team.join(lambda trainee: trainee.run_to_stage(2))
    results = team.wait()
    assert all(plan.levels[-1].members == (0, 1, 2, 3, 4) for _, plan, _ in results.values())


@pytest.mark.parametrize("when", ["proposed", "committed"])
def test_a_planner_that_is_cut_off_changes_nothing_alone(when, monkeypatch) -> None:
    """It is a team of its own then, all of which agrees; the others change without it."""
    monkeypatch.setattr(growth, "_HOLD", PATIENCE)
    team, alone = Team(matcha.plan(families.complete(4), 1.0, "vanilla")), threading.Event()
    changed, back = threading.Event(), threading.Event()

    def plan(trainee) -> None:
        own, transport = trainee.gossip._growth, trainee.gossip.state.transport
        lead = own._lead

        def led() -> None:
            lead()
            draft = own._draft
            if draft is not None and (draft.committed if when == "committed" else draft.number):
                own._lead = lead
                for peer in (1, 2, 3):
                    cut_off(transport, peer)
                alone.set()

        own._lead = led
        while not alone.is_set():
            trainee.step()
        while not changed.is_set():
            trainee.step()
            assert not trainee.stages
        for peer in (1, 2, 3):
            mend(transport, peer)
        while len(trainee.stages) < 2:
            trainee.step()
        back.set()

    def stay(trainee) -> None:
        while len(trainee.stages) < 2:
            trainee.step()
        changed.set()
        while not back.is_set():
            trainee.step()

    for rank in range(4):
        team.start(rank, leave_at_once if rank == 2 else stay if rank else plan)
    results = team.wait()
    digests = {plan.digest for worker, (_, plan, _) in results.items() if worker != 2}
    assert len(digests) == 1
    assert results[0][1].levels[-1].members == (0, 1, 3)


def leave_at_once(trainee) -> None:
    trainee.gossip.leave()
    while trainee.gossip.rank in trainee.gossip.members:
        trainee.step()
