from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from tests.simulation import textbook
from tests.simulation.tasks import digits, er8, rows

import matcha
from matcha.errors import InputError
from matcha.plans.events import Events, Loss
from matcha.simulation import SGD, Execution, Settings, Simulation
from matcha.simulation.execution import Graphs
from matcha.simulation.mixing import WireMixing
from matcha.strategies import Vanilla
from matcha.training.momentum import (
    iterations_between_meetings,
    make_rule,
    parse_momentum,
    resolve_momentum,
    rules,
    stable_correction,
)
from matcha.training.optimizers import OPTIMIZERS, Adam
from matcha.training.rates import Constant
from matcha.wires import parse_wire
from matcha.wires.wire import Segment

GRAPHS = Graphs(torch.device("cpu"), capture=False)
RATE, BETA, MEMORY = 0.05, 0.9, 0.9


def simulated(task, plan, momentum, optimizer=None, **choices):
    settings = Settings(
        epochs=2,
        schedule=Constant(base=RATE),
        optimizer=optimizer or SGD(momentum=BETA),
        execution=Execution(precision="float64"),
        momentum=momentum,
        **choices,
    )
    simulation = Simulation(task, plan, settings)
    list(simulation)
    return rows(simulation.engine)


def final_losses(task, plan, momenta, epochs):
    """The average model's training loss in the end, by momentum."""
    losses = {}
    for name in momenta:
        settings = Settings(
            epochs=epochs,
            schedule=Constant(base=RATE),
            optimizer=SGD(momentum=BETA),
            momentum=name,
            evaluate_every=epochs,
        )
        *_, last = Simulation(task, plan, settings)
        losses[name] = last.train_loss
    return losses


class Textbook:
    """Training as a paper writes it, around a rule for one iteration."""

    def __init__(self, task, plan) -> None:
        task.to(torch.device("cpu"), torch.float64)
        self.task, self.plan, self.model = task, plan, task.model().double().train()
        start = torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().numpy()
        self.x = np.tile(start, (plan.num_workers, 1))

    def run(self, iteration) -> np.ndarray:
        steps = self.task.steps_per_epoch
        for k in range(2 * steps):
            g = textbook.gradients(self.task, self.model, self.x, *divmod(k, steps))
            met = np.zeros((len(self.x), 1), bool)
            met[[w for link in self.plan.round(k).links for w in link]] = True
            self.x = iteration(self.x, g, textbook.mixing_matrix(self.plan, k), met)
        return self.x


@pytest.mark.parametrize(("overlap", "warmup"), [(False, 0), (True, 0), (False, 30)])
def test_quasi_global_is_the_papers(overlap, warmup) -> None:
    task, plan = digits(name="logistic", steps=4), er8("matcha", 0.5)
    found = simulated(task, plan, f"quasi-global:follow=1,warmup={warmup}", overlap=overlap)
    book = Textbook(task, plan)
    hat, age = np.zeros_like(book.x), 0
    pause = max(1.0, iterations_between_meetings(plan))

    def iteration(x, g, W, met):
        nonlocal hat, age
        age += 1
        keep = min(MEMORY, age / (age + warmup))
        held = [1 - (mu + (1 - mu) * BETA) ** pause for mu in (MEMORY, keep)]
        step = RATE * (BETA * hat + g)
        after = W @ x - step if overlap else W @ (x - step)
        mixing = x - step - after
        hat = keep * hat + (1 - keep) * (step + held[0] / held[1] * mixing) / RATE
        return after

    np.testing.assert_allclose(found, book.run(iteration), rtol=0, atol=1e-10)


def test_exact_diffusion_is_the_papers() -> None:
    """D²: x ← W(2x − x₋ − η(u − u₋)), with the same W in every iteration."""
    task, ring = digits(name="logistic", steps=4), matcha.families.ring(8)
    plan = matcha.plan(ring, 1.0, Vanilla(alpha=0.3))
    found = simulated(task, plan, "exact-diffusion:correction=1")
    book = Textbook(task, plan)
    u, before = np.zeros_like(book.x), None

    def iteration(x, g, W, met):
        nonlocal u, before
        last, u = u, BETA * u + g
        step = x - RATE * u if before is None else 2 * x - before - RATE * (u - last)
        before = x
        return W @ step

    np.testing.assert_allclose(found, book.run(iteration), rtol=0, atol=1e-10)


def test_exact_diffusion_corrects_by_a_share_where_rounds_differ() -> None:
    task, plan = digits(name="logistic", steps=4), er8("greedy", 0.3)
    found = simulated(task, plan, "exact-diffusion:correction=0.25", SGD())
    book = Textbook(task, plan)
    moved = np.zeros_like(book.x)

    def iteration(x, g, W, met):
        nonlocal moved
        own = x - RATE * g - 0.25 * moved
        moved = moved + own - W @ own
        np.testing.assert_allclose(moved.sum(0), 0, atol=1e-10)
        return W @ own

    np.testing.assert_allclose(found, book.run(iteration), rtol=0, atol=1e-10)


def test_momentum_tracking_is_the_papers() -> None:
    """c ← W(c − u) + u and x ← W(x − η(u − c)), where u is the buffer of the new gradient."""
    task, plan = digits(name="logistic", steps=4), er8("matcha", 0.5)
    found = simulated(task, plan, "momentum-tracking")
    book = Textbook(task, plan)
    u, c = np.zeros_like(book.x), np.zeros_like(book.x)

    def iteration(x, g, W, met):
        nonlocal u, c
        u = BETA * u + g
        after = W @ (x - RATE * (u - c))
        c = W @ (c - u) + u
        return after

    np.testing.assert_allclose(found, book.run(iteration), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("strategy", "budget"), [("vanilla", 1.0), ("greedy", 0.1), ("hypercube", 0.1)]
)
def test_exact_diffusion_ends_where_workers_agree(strategy, budget) -> None:
    """Quadratics with minima of their own: local SGD stays apart, the correction does not."""
    plan = matcha.plan(matcha.families.complete(8), budget, strategy)
    minima = np.random.default_rng(0).normal(size=(8, 3))

    def apart(share: float) -> float:
        x, moved = np.zeros((8, 3)), np.zeros((8, 3))
        for round in plan.rounds(0, 4000):
            own = x - 0.01 * (x - minima) - share * moved
            x = round.mix(own)
            moved = moved + own - x
        return float(np.abs(x - minima.mean(0)).max())

    share = stable_correction(plan)
    assert apart(share) < 1e-6 < 1e-4 < apart(0.0) + (strategy == "vanilla")


@pytest.mark.parametrize("momentum", ["exact-diffusion", "momentum-tracking", "shared"])
def test_rules_that_change_the_step_need_it_before_the_round(momentum) -> None:
    task = digits(name="logistic", steps=4)
    with pytest.raises(InputError, match="leave overlap out"):
        simulated(task, er8("greedy", 0.3), momentum, overlap=True)


def test_exact_diffusion_needs_all_workers() -> None:
    settings = Settings(epochs=1, momentum="exact-diffusion")
    events = Events(losses=(Loss(worker=1, at=1, back=2),))
    with pytest.raises(InputError, match="only while all workers are there"):
        Simulation(digits(steps=4), er8("greedy", 0.3), settings, events=events)


def test_an_outer_step_goes_from_an_anchor_through_the_mean() -> None:
    task, plan = digits(name="logistic", steps=4), er8("greedy", 0.1)
    found = simulated(task, plan, "outer:outer_rate=0.6,outer_momentum=0.4", SGD())
    book = Textbook(task, plan)
    anchor, velocity = book.x.copy(), np.zeros_like(book.x)

    def iteration(x, g, W, met):
        nonlocal anchor, velocity
        mean = W @ (x - RATE * g)
        velocity = np.where(met, 0.4 * velocity + 0.6 * (mean - anchor), velocity)
        anchor = np.where(met, anchor + velocity, anchor)
        return np.where(met, anchor, mean)

    np.testing.assert_allclose(found, book.run(iteration), rtol=0, atol=1e-10)


def test_an_outer_step_after_an_exact_average_is_dilocos() -> None:
    """`torch.optim.SGD` with Nesterov momentum on the anchor, whose gradient is φ − x̄."""
    task = digits(name="logistic", steps=4)
    plan = matcha.plan(matcha.families.complete(8), 0.25 / 3, "local")
    assert [bool(plan.round(k)) for k in range(6)] == [False, False, True, False, False, True]
    found = simulated(task, plan, "outer:outer_rate=0.7,outer_momentum=0.9,nesterov=1", SGD())
    book = Textbook(task, plan)
    anchor = torch.from_numpy(book.x[0].copy()).requires_grad_()
    outer = torch.optim.SGD([anchor], lr=0.7, momentum=0.9, nesterov=True)

    def iteration(x, g, W, met):
        x = x - RATE * g
        if not met.any():
            return x
        anchor.grad = anchor.detach() - torch.from_numpy(x.mean(0))
        outer.step()
        return np.tile(anchor.detach().numpy(), (len(x), 1))

    np.testing.assert_allclose(found, book.run(iteration), rtol=0, atol=1e-10)


def test_shared_moments_are_exchanged_and_no_coordinate_moves_beyond_the_rate() -> None:
    task, plan = digits(name="logistic", steps=4), er8("greedy", 0.3)
    found = simulated(task, plan, "shared", Adam(beta2=0.95))
    book = Textbook(task, plan)
    first, second, age = np.zeros_like(book.x), np.zeros_like(book.x), 0
    bounded = 0

    def iteration(x, g, W, met):
        nonlocal first, second, age, bounded
        age += 1
        first = 0.9 * first + 0.1 * g
        second = 0.95 * second + 0.05 * g * g
        quotient = first / (1 - 0.9**age) / (np.sqrt(second / (1 - 0.95**age)) + 1e-8)
        bounded += int((np.abs(quotient) > 1.001).sum())
        first = W @ first
        return W @ (x - RATE * np.clip(quotient, -1, 1))

    np.testing.assert_allclose(found, book.run(iteration), rtol=0, atol=1e-10)
    assert bounded > 0


def test_adam_under_allreduce_steps_along_the_mean_gradient() -> None:
    """As DDP does: Adam on each worker's own gradient would divide by its own noise."""
    task, plan = digits(name="logistic", steps=4), er8("allreduce")
    found = simulated(task, plan, "local", Adam())
    book = Textbook(task, plan)
    x = torch.from_numpy(book.x[0].copy()).requires_grad_()
    adam = torch.optim.Adam([x], lr=RATE)

    def iteration(points, g, W, met):
        x.grad = torch.from_numpy(g.mean(0))
        adam.step()
        return np.tile(x.detach().numpy(), (len(points), 1))

    np.testing.assert_allclose(found, book.run(iteration), rtol=0, atol=1e-10)


@pytest.mark.parametrize("memory", [0.0, 0.75])
def test_tracking_follows_the_average_gradient(memory) -> None:
    task, plan = digits(name="logistic", steps=8, partition="shards"), er8("matcha", 0.5)
    found = simulated(task, plan, f"tracking:memory={memory}", SGD())
    book = Textbook(task, plan)
    tracked = mean = np.zeros_like(book.x)
    age = 0

    def iteration(x, g, W, met):
        nonlocal tracked, mean, age
        age += 1
        newest = max(1 / age, 1 - memory)
        tracked, mean = tracked - mean, (1 - newest) * mean + newest * g
        tracked = tracked + mean
        step = g + tracked - mean
        # Over all workers the corrections cancel: their average takes the average gradient's step.
        np.testing.assert_allclose(step.mean(0), g.mean(0), atol=1e-12)
        if not memory:
            np.testing.assert_allclose(step, tracked, atol=1e-12)  # as published
        x, tracked = W @ (x - RATE * step), W @ tracked
        return x

    np.testing.assert_allclose(found, book.run(iteration), rtol=0, atol=1e-10)


def test_tracking_survives_rare_meetings() -> None:
    """As published it walks along one batch's noise from a meeting to the next."""
    task, plan = digits(steps=11, partition="shards"), er8("greedy", 0.03)
    losses = final_losses(task, plan, ("tracking", "tracking:memory=0"), epochs=6)
    assert losses["tracking"] < 0.5 * losses["tracking:memory=0"]


def test_quasi_global_is_held_back_where_rounds_are_rare() -> None:
    optimizer = SGD(momentum=0.9)
    often, rarely = er8("greedy", 0.3), er8("greedy", 0.01)
    assert iterations_between_meetings(often) < 2 < 10 < iterations_between_meetings(rarely)
    assert resolve_momentum("quasi-global", optimizer, often).follow == 1.0
    assert resolve_momentum("quasi-global", optimizer, rarely).follow < 0.4
    task = digits(name="logistic", steps=40)
    spread = {
        follow: simulated(task, rarely, f"quasi-global{follow}").std(0).max()
        for follow in ("", ":follow=1")
    }
    assert spread[""] < spread[":follow=1"]


def test_quasi_global_begins_as_local_momentum_does() -> None:
    """With μ from the start its buffer needs a hundred iterations; short trainings regretted it."""
    task, plan = digits(steps=11), er8("greedy", 0.5)
    losses = final_losses(task, plan, ("local", "quasi-global", "quasi-global:warmup=0"), epochs=3)
    assert losses["quasi-global"] < 1.15 * losses["local"]
    assert losses["quasi-global"] < 0.8 * losses["quasi-global:warmup=0"]


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_follows_meetings_too(name) -> None:
    task, plan = digits(name="logistic", steps=4), er8("greedy", 0.3)
    optimizer = OPTIMIZERS[name]()
    local = simulated(task, plan, "local", optimizer)
    followed = simulated(task, plan, "quasi-global", optimizer)
    assert np.isfinite(followed).all()
    assert not np.allclose(local, followed)


@pytest.mark.parametrize("name", ["quasi", "outer:rate=1", "quasi-global:follow=2", "outer:x"])
def test_a_momentum_that_does_not_exist_is_refused(name) -> None:
    with pytest.raises(InputError):
        parse_momentum(name)


def test_quasi_global_needs_momentum() -> None:
    with pytest.raises(InputError, match="needs SGD with momentum"):
        resolve_momentum("quasi-global", SGD(), er8("greedy", 0.3))
    assert resolve_momentum("auto", SGD(), er8("greedy", 0.3)).kind == "local"
    often, rarely = er8("greedy", 0.3), er8("greedy", 0.02)
    assert resolve_momentum("auto", Adam(), often).kind == "local"
    assert resolve_momentum("auto", Adam(), rarely).kind == "outer"
    assert not resolve_momentum("auto", Adam(), rarely).nesterov
    averages = er8("local", 0.02)
    assert resolve_momentum("auto", Adam(), averages).nesterov
    assert resolve_momentum("auto", Adam(), er8("silent")).kind == "local"


@pytest.mark.parametrize("bounded", [True, False])
def test_what_no_gradient_holds_does_not_run_away(bounded, monkeypatch) -> None:
    """Gradients of pure noise, rare meetings over 3 bits, and every displacement followed whole."""
    if not bounded:
        monkeypatch.setattr(rules, "_shorten_blocks", lambda x, limits: None)
    plan, optimizer = er8("greedy", 0.02), SGD(momentum=0.9)
    random = torch.Generator().manual_seed(0)
    x = 0.05 * torch.randn(1, 512, generator=random).repeat(8, 1)
    memory = optimizer.state(x)
    rule = make_rule(resolve_momentum("quasi-global:follow=1", optimizer, plan), optimizer, x)
    places = [Segment(offset=0, shape=(512,))]
    wire = WireMixing(parse_wire("modulo:3"), places, [x], plan.topology.links, GRAPHS)
    wire.fill(list(plan.rounds(0, 600)))
    for k in range(600):
        gradients = 0.01 * torch.randn(x.shape, generator=random)
        rule.adjust_gradient(gradients)
        rule.before_step(x, memory)
        optimizer.direct(x, gradients, memory)
        x.sub_(gradients, alpha=0.4)
        rule.after_step(x, 0.1)
        wire.mix(k)
        rule.after_round(x, memory, 0.4, None)
    apart = float((x - x.mean(0)).square().sum() / 8)
    assert (apart < 1000) == bounded


@pytest.mark.parametrize("mixes_first", [False, True])
def test_quasi_globals_kernel_for_gpus_is_the_rule(mixes_first) -> None:
    reason = "Triton is not installed"
    fused = pytest.importorskip(
        "matcha.training.momentum.fused", reason=reason, exc_type=ImportError
    )
    device = "cuda" if os.environ["TRITON_INTERPRET"] == "0" else "cpu"
    spec = parse_momentum("quasi-global:follow=0.7,pause=3")
    random = torch.Generator().manual_seed(0)
    start = torch.randn(2, 512, generator=random, dtype=torch.float64).to(device)
    found = []
    for kernel in (None, fused):
        x, random = start.clone(), torch.Generator().manual_seed(1)
        memory = {"momentum": torch.zeros_like(x)}
        rule: Any = make_rule(spec, SGD(momentum=0.9), x, mixes_first=mixes_first)
        rule._fused = kernel
        for k in range(3):
            gradients, move = torch.randn(2, 2, 512, generator=random, dtype=x.dtype).to(device)
            rule.adjust_gradient(gradients)
            rule.before_step(x, memory)
            memory["momentum"].mul_(0.9).add_(gradients)
            steps = [memory["momentum"] * 0.1, move * (9.0 if k else 0.01)]
            x -= steps[mixes_first]
            rule.after_step(x, 0.1)
            x -= steps[not mixes_first]
            rule.after_round(x, memory, torch.full((1,), 0.1, dtype=x.dtype, device=device), None)
        found.append(memory["momentum"])
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)
