"""Whatever steps the parameters: several optimizers, wrapped ones, closures, none at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.distributed import cases
from tests.distributed.test_gossip import Fixed, double_step, flat, mlp, single_worker
from torch import nn

from matcha.distributed import Gossip, MemoryTransport, run_threads
from matcha.errors import InputError

PLAN = cases.make_plan("vanilla", "laplacian")
ALWAYS = Fixed(2, *([(((0, 1),),)] * 40))


def batch(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(16, 4, generator=generator).double()


def backward(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    return loss


def halves(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.SGD(matrices, lr=0.1), torch.optim.SGD(others, lr=0.1)]


def footnote(steps: int) -> list[torch.Tensor]:
    """x ← Wx − ηg with SGD, as a loop over the definition."""
    models = [mlp() for _ in range(PLAN.num_workers)]
    generators = [torch.Generator().manual_seed(rank) for rank in range(PLAN.num_workers)]
    for k in range(steps):
        x = np.stack([flat(model).numpy() for model in models])
        for model, generator in zip(models, generators, strict=True):
            backward(model, batch(generator))
        g = np.stack(
            [torch.cat([p.grad.flatten() for p in m.parameters()]).numpy() for m in models]
        )
        for model, row in zip(models, PLAN.round(k).mix(x) - 0.1 * g, strict=True):
            nn.utils.vector_to_parameters(torch.from_numpy(row), model.parameters())
    return [flat(model) for model in models]


@pytest.mark.parametrize("overlap", [False, True])
def test_two_optimizers_make_one_iteration(overlap) -> None:
    def work(transport: MemoryTransport) -> torch.Tensor:
        model = mlp()
        optimizers = halves(model)
        options: dict[str, Any] = {"transport": transport, "deadline": 30, "overlap": overlap}
        with Gossip(model, optimizers, PLAN, **options) as gossip:
            generator = torch.Generator().manual_seed(transport.rank)
            for k in range(4):
                backward(model, batch(generator))
                for optimizer in optimizers[:: 1 if k % 2 else -1]:  # in either order
                    optimizer.step()
                assert gossip.iteration == k + 1
        return flat(model)

    expected = footnote(4) if overlap else single_worker(4, torch.optim.SGD)
    for found, reference in zip(run_threads(8, work), expected, strict=True):
        assert torch.allclose(found, reference, rtol=0, atol=1e-10)


def test_an_optimizer_that_steps_more_often_makes_no_more_rounds() -> None:
    def work(transport: MemoryTransport) -> int:
        model = mlp()
        critic, generator = halves(model)
        with Gossip(model, [critic, generator], ALWAYS, transport=transport, deadline=30) as gossip:
            for _ in range(3):
                for _ in range(5):
                    backward(model, torch.ones(2, 4).double())
                    critic.step()
                generator.step()
            return gossip.iteration

    assert run_threads(2, work) == [3, 3]


def test_an_optimizer_that_gossip_does_not_know_is_refused() -> None:
    """Made anew after Gossip, it trained without an exchange; a second one lost updates."""

    def work(transport: MemoryTransport) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gossip = Gossip(model, optimizer, Fixed(2), transport=transport, deadline=30)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        with pytest.raises(InputError, match=r"does not know \(SGD\).*Gossip\(model, \[first, sec"):
            double_step(model, optimizer, torch.ones(2, 4))
        gossip.detach()
        double_step(model, optimizer, torch.ones(2, 4))
        stranger = nn.Linear(4, 1).double()
        double_step(stranger, torch.optim.SGD(stranger.parameters(), lr=0.1), torch.ones(2, 4))

    run_threads(2, work)


def test_parameters_that_no_optimizer_steps_are_mentioned() -> None:
    model = mlp()
    first, second = halves(model)
    with pytest.warns(UserWarning, match=r"no optimizer of this Gossip steps '0.bias' and 1 more"):
        Gossip(model, first, Fixed(2), transport=alone())
    other = mlp()
    Gossip(other, halves(other), Fixed(2), transport=alone())
    assert second.param_groups


def alone() -> MemoryTransport:
    return run_threads(1, lambda transport: transport)[0]


def test_a_second_gossip_on_a_model_is_refused_until_the_first_is_detached() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = Gossip(model, optimizer, Fixed(2), transport=alone())
    with pytest.raises(InputError, match=r"'0.weight' already belongs to another Gossip"):
        Gossip(model, optimizer, Fixed(2), transport=alone())
    first.detach()
    Gossip(model, optimizer, Fixed(2), transport=alone()).detach()
    Gossip(model, optimizer, Fixed(2), transport=alone())
    optimizer, first = torch.optim.SGD(model.parameters(), lr=0.1), None
    Gossip(model, optimizer, Fixed(2), transport=alone())  # nobody holds the one before


# -- wrappers --------------------------------------------------------------------------------------


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: an Optimizer by class that hands everything on and cannot be hooked."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as its best-known implementation is written."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(0.01 * p.grad)

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:
        closure = torch.enable_grad()(closure)
        closure()
        self.first_step()
        closure()
        self.second_step()


def sam_step(model: nn.Module, optimizer: Any, inputs: torch.Tensor, by_hand: bool) -> None:
    if by_hand:
        backward(model, inputs)
        optimizer.first_step()
        backward(model, inputs)
        optimizer.second_step()
    else:
        optimizer.step(lambda: backward(model, inputs))


@pytest.mark.parametrize("by_hand", [False, True])
def test_sam_exchanges_after_its_second_step(by_hand) -> None:
    def work(transport: MemoryTransport) -> torch.Tensor:
        model = mlp()
        optimizer = Sam(model.parameters(), lr=0.1)
        with Gossip(model, optimizer, PLAN, transport=transport, deadline=30) as gossip:
            generator = torch.Generator().manual_seed(transport.rank)
            for _ in range(3):
                sam_step(model, optimizer, batch(generator), by_hand)
            assert gossip.iteration == 3
        return flat(model)

    def expected() -> list[torch.Tensor]:
        models = [mlp() for _ in range(8)]
        optimizers = [Sam(m.parameters(), lr=0.1) for m in models]
        generators = [torch.Generator().manual_seed(rank) for rank in range(8)]
        for k in range(3):
            for model, optimizer, generator in zip(models, optimizers, generators, strict=True):
                sam_step(model, optimizer, batch(generator), by_hand)
            mixed = PLAN.round(k).mix(np.stack([flat(m).numpy() for m in models]))
            for model, row in zip(models, mixed, strict=True):
                nn.utils.vector_to_parameters(torch.from_numpy(row), model.parameters())
        return [flat(model) for model in models]

    for found, reference in zip(run_threads(8, work), expected(), strict=True):
        assert torch.allclose(found, reference, rtol=0, atol=1e-10)


def test_a_wrapped_optimizer_is_taken_out_of_its_wrapper() -> None:
    def work(transport: MemoryTransport) -> int:
        model = mlp()
        optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
        with Gossip(model, optimizer, ALWAYS, transport=transport, deadline=30) as gossip:
            assert gossip.optimizer is optimizer.optimizer
            for _ in range(3):
                double_step(model, optimizer, torch.ones(2, 4))
            return gossip.iteration

    Wrapper.zero_grad = lambda self: self.optimizer.zero_grad()  # type: ignore[method-assign]
    assert run_threads(2, work) == [3, 3]


@pytest.mark.parametrize("kind", [Sam, torch.optim.LBFGS])
def test_optimizers_with_several_gradients_a_step_are_not_overlapped(kind) -> None:
    model = mlp()
    with pytest.raises(InputError, match=r"several points a step.*without overlap=True"):
        Gossip(model, kind(model.parameters(), lr=0.1), PLAN, overlap=True)


class Opaque:
    """No optimizer of torch's at all."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": list(parameters)}]


def test_what_cannot_be_hooked_is_refused_with_advice() -> None:
    model = mlp()
    with pytest.raises(InputError, match=r"steps of Opaque cannot be followed.*gossip.step\(\)"):
        Gossip(model, Opaque(model.parameters()), PLAN)
    with pytest.raises(InputError, match="overlap=True needs an optimizer"):
        Gossip(model, None, PLAN, overlap=True)


# -- LBFGS, and no optimizer -----------------------------------------------------------------------


def lbfgs_loss() -> float:
    """The worst of eight workers after 30 steps on data of their own."""

    def work(transport: MemoryTransport) -> float:
        generator = torch.Generator().manual_seed(transport.rank)
        inputs = torch.randn(40, 4, generator=generator).double()
        targets = torch.sin(3 * inputs.sum(1))
        model = mlp()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        with Gossip(model, optimizer, PLAN, transport=transport, deadline=30):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = (model(inputs)[:, 0] - targets).square().mean()
                loss.backward()
                return loss

            for _ in range(30):
                optimizer.step(closure)
            return float(closure().detach())

    return max(run_threads(8, work))


def test_lbfgs_forgets_its_history_at_meetings(monkeypatch) -> None:
    assert lbfgs_loss() < 1  # 0.5 is the targets' variance
    monkeypatch.setattr("matcha.distributed.steps.Steps.restart_curvature", lambda self: None)
    assert not lbfgs_loss() < 10  # another point's curvature leads astray


def test_updates_written_by_hand_exchange_by_step() -> None:
    def work(transport: MemoryTransport) -> torch.Tensor:
        model = mlp()
        with Gossip(model, None, PLAN, transport=transport, deadline=30) as gossip:
            generator = torch.Generator().manual_seed(transport.rank)
            for _ in range(4):
                backward(model, batch(generator))
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(p.grad, alpha=-0.1)
                gossip.step()
        return flat(model)

    expected = single_worker(4, torch.optim.SGD)
    for found, reference in zip(run_threads(8, work), expected, strict=True):
        assert torch.allclose(found, reference, rtol=0, atol=1e-10)


# -- loss scaling ----------------------------------------------------------------------------------


def test_loss_scaling_leaves_no_mark_where_no_scaler_is() -> None:
    """Lightning refuses to clip gradients of optimizers that say they unscale by themselves."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Gossip(model, optimizer, Fixed(2), transport=alone())
    assert not hasattr(optimizer, "_step_supports_amp_scaling")


def test_a_skipped_step_is_seen_as_skipped_by_everybody() -> None:
    """The optimizer is not called at all, so wrappers that count calls count right."""
    calls: list[int] = []

    def work(transport: MemoryTransport) -> int:
        model = mlp()
        first, second = halves(model)
        first.register_step_post_hook(lambda *_: calls.append(transport.rank))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with Gossip(
            model, [first, second], ALWAYS, transport=transport, deadline=30, overlap=True
        ) as gossip:
            for k in range(4):
                model.zero_grad()
                scaler.scale(model(torch.ones(2, 4).double()).square().mean()).backward()
                if transport.rank == 1 and k % 2:
                    model[0].weight.grad[0, 0] = torch.inf
                scaler.step(first)
                scaler.step(second)
                scaler.update()
            return gossip.iteration

    assert run_threads(2, work) == [4, 4]
    assert sorted(calls) == [0, 0, 0, 0, 1, 1]


# -- complex values, one process, the average to save ----------------------------------------------


@pytest.mark.parametrize("mixing", ["laplacian", "pairwise"])
def test_complex_parameters_are_mixed_and_averaged(mixing) -> None:
    plan = cases.make_plan("vanilla", mixing)
    start = torch.randn(8, 5, dtype=torch.complex128)

    def work(transport: MemoryTransport):
        model = nn.ParameterList([torch.zeros(5, dtype=torch.complex128)])
        model.register_buffer("waves", start[transport.rank].clone())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Gossip(model, optimizer, plan, transport=transport, deadline=30) as gossip:
            with torch.no_grad():
                model[0].copy_(start[transport.rank])
                model.waves.copy_(start[transport.rank])
            distance = gossip.consensus_distance()
            state = gossip.averaged_state_dict()
            gossip.skip_step()
            return model[0].detach().clone(), state, distance

    results = run_threads(8, work)
    centre = start.mean(0)
    mixed = plan.round(0).mix(torch.view_as_real(start).reshape(8, 10).numpy())
    for rank, (value, state, distance) in enumerate(results):
        assert torch.allclose(state["0"], centre)
        assert torch.allclose(state["waves"], centre)
        assert distance == pytest.approx(float((start - centre).abs().square().sum(1).mean()))
        np.testing.assert_allclose(torch.view_as_real(value).flatten(), mixed[rank], atol=1e-12)


LAUNCHERS = ("RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")


def test_a_process_alone_trains_as_without_gossip(monkeypatch, caplog) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)

    def train(wrap: Callable[[nn.Module, Any], Any]) -> torch.Tensor:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        wrap(model, optimizer)
        for _ in range(5):
            double_step(model, optimizer, torch.ones(2, 4))
        return flat(model)

    gossips: list[Gossip] = []
    alone = train(lambda model, optimizer: gossips.append(Gossip(model, optimizer, PLAN)))
    assert torch.equal(alone, train(lambda model, optimizer: None))
    assert [r.message.split(":")[0] for r in caplog.records] == ["one process"]
    assert "torchrun --nproc-per-node=8" in caplog.text
    (gossip,) = gossips
    assert (gossip.rank, gossip.num_workers, gossip.iteration) == (0, 1, 5)
    assert gossip.consensus_distance() == 0
    assert torch.equal(gossip.averaged_state_dict()["0.weight"], gossip.model[0].weight)
    gossip.detach()


def test_the_average_to_save_has_memory_of_its_own() -> None:
    lock = threading.Lock()

    def work(transport: MemoryTransport) -> tuple[torch.Tensor, torch.Tensor]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Gossip(model, optimizer, Fixed(2), transport=transport, deadline=30) as gossip:
            double_step(model, optimizer, torch.full((2, 4), 1.0 + transport.rank))
            own = flat(model)
            state = gossip.averaged_state_dict()
            with torch.no_grad(), lock:
                model[0].weight.zero_()
            return own, torch.cat([value.flatten() for value in state.values()])

    (one, average), (two, same) = run_threads(2, work)
    assert torch.equal(average, same)
    assert torch.allclose(average, (one + two) / 2)
