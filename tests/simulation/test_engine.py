from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.simulation import textbook
from tests.simulation.tasks import digits, er8, quadratic, rows

import matcha
from matcha.errors import InputError
from matcha.rounds import Round
from matcha.simulation import SGD, Adam, Constant, Delays, Engine, Execution, Settings, Simulation
from matcha.training.momentum import Momentum

EXACT = Execution(precision="float64")
PLANS = [
    ("vanilla", 1.0, "laplacian"),
    ("vanilla", 1.0, "pairwise"),
    ("matcha", 0.5, "laplacian"),
    ("matcha", 0.5, "pairwise"),
    ("matcha", 0.1, "laplacian"),
    ("periodic", 0.5, "laplacian"),
    ("periodic", 0.5, "pairwise"),
    ("single", 0.1, "laplacian"),
    ("single", 0.1, "pairwise"),
    ("greedy", 0.3, "pairwise"),
    ("greedy", 0.3, "laplacian"),
]
SILENT = Round(matchings=(), indices=(), mixing="laplacian", weight=0.1)


def simulate(task, plan, *, epochs=2, rate=0.05, optimizer=None, overlap=False, execution=EXACT):
    settings = Settings(
        epochs=epochs,
        schedule=Constant(base=rate),
        optimizer=optimizer or SGD(),
        overlap=overlap,
        delays=Delays(compute_time=1.0),
        execution=execution,
    )
    simulation = Simulation(task, plan, settings)
    return simulation, list(simulation)


def steps(engine, rounds, rate=0.1, epoch=0):
    engine.begin_epoch(epoch, [rate] * len(rounds), rounds)
    for k in range(len(rounds)):
        engine.step(k)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("strategy", "budget", "mixing"), PLANS)
def test_equals_the_textbook(strategy, budget, mixing, overlap):
    plan = er8(strategy, budget, mixing)
    for task in (quadratic(), digits()):
        simulation, _ = simulate(
            task,
            plan,
            overlap=overlap,
            optimizer=SGD(momentum=0.9, nesterov=True, weight_decay=1e-3),
        )
        expected = textbook.train(
            task,
            plan,
            epochs=2,
            rate=0.05,
            overlap=overlap,
            momentum=0.9,
            nesterov=True,
            decay=1e-3,
        )
        np.testing.assert_allclose(rows(simulation.engine), expected, rtol=1e-12, atol=1e-12)
        assert np.ptp(expected, axis=0).max() > 1e-4  # the workers differ: mixing had work to do


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equals_the_textbook_without_nesterov(momentum):
    task, plan = digits(name="logistic"), er8()
    simulation, _ = simulate(task, plan, optimizer=SGD(momentum=momentum))
    expected = textbook.train(task, plan, epochs=2, rate=0.05, overlap=False, momentum=momentum)
    np.testing.assert_allclose(rows(simulation.engine), expected, rtol=1e-12, atol=1e-12)


def test_full_budget_matcha_is_vanilla():
    topology = matcha.families.paper("er8")
    parts = matcha.families.paper_matchings("er8")
    plans = [
        matcha.plan(topology, 1.0, strategy, matchings=parts) for strategy in ("matcha", "vanilla")
    ]
    ends = [rows(simulate(digits(), plan)[0].engine) for plan in plans]
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-12, atol=1e-13)
    silent = rows(simulate(digits(), er8("periodic", 0.01))[0].engine)
    assert np.abs(silent - ends[1]).max() > 1e-3  # both mixed: without it they would agree too


def test_exact_averaging_is_large_batch_sgd():
    """On a complete graph W = 11ᵀ/m: all workers step as one model on the union of batches."""
    task = digits(4, name="logistic")
    plan = matcha.plan(matcha.families.complete(4), 1.0, "vanilla")
    np.testing.assert_allclose(plan.mixing_matrix(0), np.full((4, 4), 0.25), atol=1e-14)
    simulation, _ = simulate(task, plan, rate=0.1)

    model = task.model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for k in range(2 * task.steps_per_epoch):
        epoch, step = divmod(k, task.steps_per_epoch)
        tables = {n: torch.from_numpy(t[step]) for n, t in task.tables(epoch).items()}
        inputs, targets = task.batch(tables)
        loss, _ = task.loss(model, inputs.flatten(0, 1), targets.flatten(0, 1), ())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    np.testing.assert_allclose(rows(simulation.engine), np.tile(vector, (4, 1)), atol=1e-12)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("strategy", "budget", "mixing"), PLANS)
def test_average_iterate_is_plain_sgd(strategy, budget, mixing, overlap):
    """W is doubly stochastic, so mixing leaves the mean alone: x̄ ← x̄ − ηū."""
    task, plan = quadratic(), er8(strategy, budget, mixing)
    engine = Engine(task, SGD(momentum=0.9), overlap=overlap, execution=EXACT)
    count = task.steps_per_epoch
    engine.begin_epoch(0, [0.1] * count, [plan.round(k) for k in range(count)])
    for k in range(count):
        before = engine.workers.parameters.mean(0)
        engine.step(k)
        expected = before - 0.1 * engine.directions().mean(0)
        torch.testing.assert_close(engine.workers.parameters.mean(0), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("make", [quadratic, lambda: digits(name="logistic")])
def test_vmap_equals_the_loop(make):
    ends = {}
    for batching in ("loop", "vmap"):
        execution = Execution(precision="float64", batching=batching)
        simulation, records = simulate(make(), er8(), execution=execution)
        assert simulation.engine.batching == batching
        ends[batching] = rows(simulation.engine), records[-1].train_loss
    np.testing.assert_allclose(ends["loop"][0], ends["vmap"][0], rtol=1e-12, atol=1e-13)
    assert ends["loop"][1] == pytest.approx(ends["vmap"][1], rel=1e-12)


def test_batching_follows_the_model():
    assert Engine(digits()).batching == "loop"
    assert Engine(digits(name="logistic")).batching == "vmap"


def test_reduced_precision_stays_near():
    """bfloat16 computing with float32 parameters: a few parts in a hundred, not garbage."""
    losses = {}
    for precision in ("float32", "bfloat16"):
        execution = Execution(precision=precision)
        simulation, records = simulate(digits(batch_size=16), er8(), epochs=6, execution=execution)
        assert simulation.engine.workers.parameters.dtype == torch.float32
        losses[precision] = records[-1].train_loss
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.05)


@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9), Adam(weight_decay=1e-2)])
def test_silent_workers_train_as_torch_trains_them(optimizer):
    task = digits(2)
    engine = Engine(task, optimizer, execution=EXACT)
    steps(engine, [SILENT] * task.steps_per_epoch)
    for worker in range(2):
        model = task.model().double()
        kind = torch.optim.SGD if isinstance(optimizer, SGD) else torch.optim.Adam
        choices = {"momentum": 0.9} if kind is torch.optim.SGD else {"weight_decay": 1e-2}
        theirs = kind(model.parameters(), lr=0.1, **choices)
        for step in range(task.steps_per_epoch):
            inputs, targets = task.batch(
                {n: torch.from_numpy(t[step]) for n, t in task.tables(0).items()}
            )
            theirs.zero_grad()
            task.loss(model, inputs[worker], targets[worker], ())[0].backward()
            theirs.step()
        vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
        np.testing.assert_allclose(rows(engine)[worker], vector, rtol=1e-9, atol=1e-11)


def test_reset_and_state_round_trip():
    task = digits()
    engine = Engine(task, SGD(momentum=0.9))
    rounds = [er8().round(k) for k in range(task.steps_per_epoch)]
    steps(engine, rounds)
    middle, buffers = engine.state(), engine.workers.buffers.clone()
    steps(engine, rounds, epoch=1)
    end = engine.workers.parameters.clone()
    engine.load_state(middle)
    assert torch.equal(engine.workers.buffers, buffers)
    steps(engine, rounds, epoch=1)
    assert torch.equal(engine.workers.parameters, end)
    engine.reset()
    assert torch.equal(engine.workers.parameters, Engine(task).workers.parameters)
    assert not engine.memory["momentum"].any()


def test_state_of_another_model_is_refused():
    with pytest.raises(InputError, match="another model"):
        Engine(digits()).load_state(Engine(quadratic()).state())


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"precision": "float16"}, "precision must be one of"),
        ({"batching": "both"}, "batching must be"),
        ({"streams": 0}, "streams must be"),
        ({"device": "tpu"}, "cpu or cuda, not 'tpu'"),
    ],
)
def test_execution_refuses_nonsense(choices, message):
    with pytest.raises(InputError, match=message):
        Execution(**choices)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_cuda_without_a_gpu_is_one_sentence():
    with pytest.raises(InputError, match="asks for an NVIDIA GPU"):
        Execution(device="cuda")


class Directed(SGD):
    """An optimizer whose memory is named as a wire's memory of links is."""

    def state(self, parameters):
        return {"directions": torch.zeros_like(parameters), "count": torch.zeros(())}


@pytest.mark.parametrize("wire", ["float32", "lowrank:2"])
def test_who_comes_back_takes_all_of_the_donors_state_and_none_of_the_links(wire):
    """Path of 8: links and the row for those at rest are as many as the workers."""
    engine = Engine(digits(name="logistic", steps=4), Directed(), execution=EXACT)
    plan = matcha.plan(matcha.families.path(8), 1.0, "vanilla", wire=wire)
    engine.equip(plan, Momentum(kind="outer"))
    with torch.no_grad():
        for tensor in engine._tensors().values():
            tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape))
    before = engine.state()
    engine.hand_over(donor=2, worker=5)
    after = engine.state()
    for name, value in after.items():
        if name in ("wire.0.directions", "memory.count"):
            assert torch.equal(value, before[name]), name
        else:
            assert torch.equal(value[5], before[name][2]), name
            others = [k for k in range(8) if k != 5]
            assert torch.equal(value[others], before[name][others]), name
    assert "memory.directions" in after
