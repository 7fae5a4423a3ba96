from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed.perceptrons import PLAN, Fixed, double_step, mlp, plain_step
from tests.distributed.test_optimizer_hooks import ALWAYS, Sam, halves
from torch import nn

from matcha.distributed import Gossip
from matcha.errors import InputError, ModelError
from matcha.testing import MemoryNetwork, MemoryTransport, run_threads


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"on_loss": "hope"}, "'stop' or 'continue'"),
        ({"replan": -1}, "replan is -1, but it is a number of iterations"),
        ({"clip": 0.0}, "clip is 0.0, but it is a positive number"),
        ({"momentum": "quick"}, "unknown momentum"),
        ({"buffers": "global"}, "'local' or 'average'"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb is 0"),
    ],
)
def test_bad_options_are_refused(options, sentence) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match=sentence):
        Gossip(model, optimizer, PLAN, **options)


def test_a_foreign_optimizer_is_refused() -> None:
    optimizer = torch.optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.raises(InputError, match="none of the model's parameters"):
        Gossip(mlp(), optimizer, PLAN)


def test_moved_or_unfrozen_parameters_are_noticed() -> None:
    plan = Fixed(2, (((0, 1),),))

    def work(transport: MemoryTransport) -> None:
        model = mlp()
        model[0].bias.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Gossip(model, optimizer, plan, transport=transport, timeout=5)
        if transport.rank == 0:
            model.float()
            with pytest.raises(ModelError, match=r"'0.weight' has another device, dtype"):
                plain_step(model, optimizer, torch.ones(2, 4))
        else:
            model[0].bias.requires_grad_(True)
            with pytest.raises(ModelError, match="frozen when Gossip was constructed"):
                double_step(model, optimizer, torch.ones(2, 4))

    run_threads(2, work)


def test_parameters_that_no_optimizer_steps_are_mentioned() -> None:
    model = mlp()
    first, second = halves(model)
    sentence = r"no optimizer of this Gossip steps '0.bias' and 1 more"
    with pytest.warns(UserWarning, match=sentence) as warned:
        Gossip(model, first, Fixed(2), transport=MemoryNetwork(1).transport(0))
    assert warned[0].filename == __file__  # the line that constructs Gossip
    other = mlp()
    Gossip(other, halves(other), Fixed(2), transport=MemoryNetwork(1).transport(0))
    assert second.param_groups


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: an Optimizer by class that hands everything on and cannot be hooked."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_a_wrapped_optimizer_is_taken_out_of_its_wrapper() -> None:
    def work(transport: MemoryTransport) -> int:
        model = mlp()
        optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
        with Gossip(model, optimizer, ALWAYS, transport=transport, timeout=30) as gossip:
            assert gossip.state.optimizers[0] is optimizer.optimizer
            for _ in range(3):
                double_step(model, optimizer, torch.ones(2, 4))
            return gossip.iteration

    Wrapper.zero_grad = lambda self: self.optimizer.zero_grad()  # type: ignore[method-assign]
    assert run_threads(2, work) == [3, 3]


@pytest.mark.parametrize("kind", [Sam, torch.optim.LBFGS])
def test_optimizers_with_several_gradients_a_step_are_not_overlapped(kind) -> None:
    model = mlp()
    with pytest.raises(InputError, match=r"several gradients per step.*leave overlap out"):
        Gossip(model, kind(model.parameters(), lr=0.1), PLAN, overlap=True)


class Opaque:
    """No optimizer of torch's at all."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": list(parameters)}]


def test_what_cannot_be_hooked_is_refused_with_advice() -> None:
    model = mlp()
    with pytest.raises(InputError, match=r"steps of Opaque cannot be followed.*gossip.step\(\)"):
        Gossip(model, Opaque(model.parameters()), PLAN)
    with pytest.raises(InputError, match="overlap=True does not go with optimizer=None"):
        Gossip(model, None, PLAN, overlap=True)


def test_parameters_that_the_model_does_not_hold_are_named_and_exchanged_by_also() -> None:
    """A criterion's temperature was stepped and never exchanged."""

    class Criterion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def work(transport: MemoryTransport) -> torch.Tensor:
        model, criterion = mlp(), Criterion()
        with torch.no_grad():
            criterion.temperature.add_(transport.rank)
        optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
        options: dict[str, Any] = {"transport": transport, "timeout": 30}
        with pytest.raises(InputError, match=r"SGD steps a parameter.*shape \(3,\).*also=\[crit"):
            Gossip(model, optimizer, ALWAYS, **options)
        with Gossip(model, optimizer, ALWAYS, also=[criterion], **options) as gossip:
            assert torch.equal(criterion.temperature, torch.ones(3).double())  # as worker 0's
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4).double()).mean()
            (loss * criterion.temperature.sum() * (1 + transport.rank)).backward()
            optimizer.step()
            mixed = criterion.temperature.detach().clone()
            with torch.no_grad():
                criterion.temperature.add_(transport.rank)
            with gossip.averaged():
                assert torch.allclose(criterion.temperature, mixed + 0.5)
        return mixed

    one, other = run_threads(2, work)
    assert torch.equal(one, other)
    with pytest.raises(InputError, match=r"also= holds a Parameter.*nn.ParameterList"):
        Gossip(mlp(), None, ALWAYS, also=[nn.Parameter(torch.ones(1))], transport=alone())


def test_what_also_names_is_saved_and_loaded(tmp_path) -> None:
    def make() -> tuple[nn.Module, Gossip]:
        model, teacher = mlp(), mlp().requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return teacher, Gossip(model, optimizer, Fixed(2), also=[teacher], transport=alone())

    teacher, gossip = make()
    for parameter in teacher.parameters():
        parameter.data.fill_(7.0)
    gossip.save(tmp_path)
    teacher, gossip = make()
    gossip.load(tmp_path)
    assert all(parameter.eq(7).all() for parameter in teacher.parameters())


def test_parameters_added_later_are_refused() -> None:
    """`add_param_group` after Gossip: they were stepped and never exchanged."""
    model, late = mlp(), nn.Parameter(torch.ones(2, 3))
    late.grad = torch.ones(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Gossip(model, optimizer, Fixed(2), transport=alone())
    double_step(model, optimizer, torch.ones(2, 4))
    optimizer.add_param_group({"params": [late]})
    with pytest.raises(InputError, match=r"added to SGD after Gossip.*\(2, 3\).*construct"):
        double_step(model, optimizer, torch.ones(2, 4))
    assert late.eq(1).all()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda model: model.to(memory_format=torch.channels_last),
            r"model \('0.weight, float32 \(8, 3, 3, 3\), stride \(27, 1, 9, 3\)', others '0.weight",
        ),
        (lambda model: model.append(nn.Linear(2, 2)), r"'2.weight, .*', others 'no more param"),
        (lambda model: model[1].half(), r"others '1.weight, float32"),
    ],
)
def test_the_first_parameter_that_differs_between_workers_is_named(change, sentence) -> None:
    """They were shown as digests; a memory format permutes weights, so it is a difference."""

    def work(transport: MemoryTransport) -> None:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3))
        if transport.rank == 1:
            change(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(InputError, match=rf"rank 1 .* has another {sentence}|{sentence}"):
            Gossip(model, optimizer, ALWAYS, transport=transport, timeout=20)

    run_threads(2, work)


def alone() -> MemoryTransport:
    return MemoryNetwork(1).transport(0)
