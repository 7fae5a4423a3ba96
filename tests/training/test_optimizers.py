from __future__ import annotations

import pytest
import torch

from matcha.errors import InputError, PackageError
from matcha.simulation import SGD, Adam
from matcha.simulation.flat import Workers
from matcha.training.optimizers import Muon, make_optimizer


def run(mine, theirs, steps=5):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 16, dtype=torch.float64, generator=generator)
    rows = [torch.nn.Parameter(row.clone()) for row in x]
    others = [theirs([row]) for row in rows]
    state = mine.state(x)
    for _ in range(steps):
        updates = torch.randn(3, 16, dtype=torch.float64, generator=generator)
        for row, gradient in zip(rows, updates, strict=True):
            row.grad = gradient.clone()
        for other in others:
            other.step()
        mine.direct(x, updates, state)
        x -= 0.1 * updates
    torch.testing.assert_close(x, torch.stack([row.detach() for row in rows]), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"weight_decay": 0.1},
    ],
)
def test_sgd_is_torchs(choices):
    run(SGD(**choices), lambda rows: torch.optim.SGD(rows, lr=0.1, **choices))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_is_torchs(decay):
    run(
        Adam(beta1=0.8, beta2=0.95, weight_decay=decay),
        lambda rows: torch.optim.Adam(rows, lr=0.1, betas=(0.8, 0.95), weight_decay=decay),
    )


@pytest.mark.parametrize("choices", [{}, {"weight_decay": 0.1}, {"weight_decay": 0.0}])
def test_adamw_is_torchs_and_so_are_its_defaults(choices):
    run(make_optimizer("adamw", **choices), lambda rows: torch.optim.AdamW(rows, lr=0.1, **choices))


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_muon_is_torchs_for_hidden_matrices_and_adamw_for_the_rest(shape):
    tall, width = shape
    model = torch.nn.Sequential(torch.nn.Linear(width, tall), torch.nn.Linear(tall, 2)).double()
    workers = Workers(model, 1, device=torch.device("cpu"), dtype=torch.float64)
    mine = Muon(weight_decay=0.03, beta2=0.95)
    layout = workers.layout
    told = mine.for_rows(model, dict(zip(layout.names, layout.offsets, strict=True)))
    assert [matrix[1:] for matrix in told.matrices] == [shape]
    theirs = mine.for_model(model)
    assert [type(one).__name__ for one in theirs] == ["Muon", "AdamW"]
    state = told.state(workers.parameters)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        gradients = [torch.randn(p.shape, generator=generator).double() for p in model.parameters()]
        workers.store_gradients(0, gradients)
        told.direct(workers.parameters, workers.updates, state)
        workers.parameters -= 0.1 * workers.updates
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        for one in theirs:
            for group in one.param_groups:
                group["lr"] = 0.1
            one.step()
    for mine_, theirs_ in zip(workers.leaves[0], model.parameters(), strict=True):
        torch.testing.assert_close(mine_.detach(), theirs_.detach(), atol=1e-12, rtol=0)


def test_muon_without_torchs_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(PackageError, match=r"needs PyTorch 2\.9 or newer"):
        Muon().for_model(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("nesterov", [False, True])
def test_fused_step_is_the_separate_one(nesterov):
    optimizer = SGD(momentum=0.9, nesterov=nesterov, weight_decay=0.01, clip_norm=2.0)
    x = torch.randn(2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    mine, fused = optimizer.state(x), optimizer.state(y)
    for k in range(4):
        gradient = torch.randn(
            2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(k)
        )
        updates, left = gradient.clone(), gradient.clone()
        before = y.clone()
        optimizer.direct(x, updates, mine)
        x -= 0.25 * updates
        optimizer.step_fused(y, left, fused, torch.tensor(0.25))
        torch.testing.assert_close(x, y, atol=1e-13, rtol=0)
        torch.testing.assert_close(optimizer.directions(before, left, fused), updates)


def test_clipping_is_by_worker():
    updates = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    SGD(clip_norm=1.0).direct(torch.zeros(2, 2), updates, {})
    torch.testing.assert_close(updates, torch.tensor([[0.6, 0.8], [0.3, 0.4]]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(momentum=1.0), "momentum"),
        (lambda: SGD(nesterov=True), "nesterov"),
        (lambda: SGD(weight_decay=-1), "weight_decay"),
        (lambda: Adam(beta1=1.5), "betas"),
        (lambda: Adam(weight_decay=-1), "weight_decay"),
        (lambda: Muon(muon_momentum=1.0), "muon_momentum"),
        (lambda: make_optimizer("adamw", decoupled=False), "decoupled"),
    ],
)
def test_nonsense_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
