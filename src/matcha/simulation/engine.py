"""The engine: one iteration of all workers on one device, by a loop, by vmap or by CUDA graphs.

The iteration is written once, as a few functions that read all they need from tensors on the device
(the iteration's batch indices, learning rate and mixing matrix are rows of tables filled once per
epoch). On a CPU they are called; on CUDA they are captured over several streams and replayed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from matcha.errors import InputError
from matcha.plans import PlanLike
from matcha.rounds import Round
from matcha.simulation.execution import (
    Bound,
    Graphs,
    choose_batching,
    compile_blocks,
    new_stream,
)
from matcha.simulation.flat import Workers
from matcha.simulation.mixing import (
    ClippedMixing,
    Mixing,
    PushMixing,
    RelayMixing,
    TopKMixing,
    WholeMixing,
    WireMixing,
    is_whole,
)
from matcha.topology import Link
from matcha.training.clipping import allowance
from matcha.training.momentum import Momentum, first_moment, make_rule
from matcha.training.optimizers import SGD, Adam, Muon, Optimizer
from matcha.training.settings import Batching, Execution
from matcha.training.task import Task
from matcha.wires import Float, TopK, Wire

_WARMUP, _TIMED, _PATIENCE = 2, 8, 2.0
"""Iterations before any is timed, as caches and threads start cold; those timed; and the seconds
after which fewer will do."""


class Engine:
    """All workers' state and the iteration that advances it.

    Args:
        task: data, model and loss.
        optimizer: turns gradients into update directions.
        overlap: mix before the step, x ← Wx − ηu, with u from the values before mixing, so that the
            exchange may overlap the gradient; otherwise after it, x ← W(x − ηu).
        execution: device, precision and how the workers are batched.

    Whole float32 messages and local momentum, unless `equip` says otherwise.
    """

    def __init__(
        self,
        task: Task,
        optimizer: Optimizer | None = None,
        *,
        overlap: bool = False,
        execution: Execution | None = None,
    ) -> None:
        execution = execution or Execution()
        self.task, self.overlap, self.execution = task, overlap, execution
        self.optimizer = optimizer or SGD()
        self.device = torch.device(execution.device)
        self.on_cuda = self.device.type == "cuda"
        dtype, compute = execution.dtype, execution.compute_dtype
        template = task.model()
        self.batching: Batching = choose_batching(template, execution)
        loops = self.batching == "loop"
        task.to(self.device, compute)
        self.workers = Workers(
            template,
            task.num_workers,
            device=self.device,
            dtype=dtype,
            compute_dtype=None if self.batching == "vmap" else compute,
            channels_last=self.on_cuda and loops,
        )
        self._losses_at_once = self._losses_of
        if execution.compile and loops:
            compile_blocks(self.workers.modules)
        elif execution.compile and self.batching == "stacked":
            self._losses_at_once = torch.compile(self._losses_of, dynamic=False)
        self._told: Optimizer = self.optimizer  # and where in a row the matrices are
        if isinstance(self.optimizer, Muon):
            offsets = dict(zip(self.workers.layout.names, self.workers.layout.offsets, strict=True))
            self._told = self.optimizer.for_rows(template, offsets)
        self.memory = self.optimizer.state(self.workers.parameters)
        can_fuse = self.optimizer.momentum and not isinstance(self.optimizer, Muon)
        self._fused = self.optimizer if self.on_cuda and not overlap and can_fuse else None
        m, steps = task.num_workers, task.steps_per_epoch
        self.losses = torch.zeros(m, dtype=torch.float64, device=self.device)
        """Each worker's loss summed over the epoch so far."""
        self.position = torch.full((1,), -1, dtype=torch.long, device=self.device)
        self.rates = torch.zeros(steps, dtype=dtype, device=self.device)
        self.tables: dict[str, Tensor] = {}
        first = task.initial_state()
        self.carried = [tuple(t.to(self.device, copy=True) for t in first) for _ in range(m)]
        self._rounds: list[Round] = []
        self._met = torch.zeros(steps, m, dtype=torch.bool, device=self.device)
        if self.on_cuda:
            self._streams = [new_stream(self.device) for _ in range(execution.streams)]
        self._graphs = Graphs(self.device, capture=execution.capture, compiles=execution.compile)
        self._parts: dict[str, Callable[[], None]] = {}
        self._equipment: tuple[object, ...] | None = None
        self.equip()

    def equip(
        self,
        plan: PlanLike | None = None,
        momentum: Momentum | None = None,
        clip: float | None = None,
    ) -> None:
        """Set what messages hold and how momentum and meetings go together.

        Costly captures (the gradients) are kept; the rest is captured again.

        Args:
            plan: whose rounds will be mixed; None: of whole values.
            momentum: settled for the optimizer and the plan; None: local.
            clip: as in `Settings`.

        Raises:
            InputError: mixing, wire, momentum, clipping and overlap exclude each other.
        """
        momentum, levels = momentum or Momentum(), () if plan is None else plan.levels
        wire: Wire = Float() if plan is None else plan.wire
        push_sum = any(level.needs_push_sum for level in levels)
        relay = any(level.mixing == "relay" for level in levels)
        links: Sequence[Link] = () if plan is None else plan.topology.links
        if plan is not None and relay:
            links = sorted({link for matching in plan.matchings for link in matching})
        weights = None if plan is None else plan.worker_weights
        limit = None if plan is None or clip is None else allowance(plan, clip)
        # DDP averages gradients. With SGD the average of the parameters is the same; Adam divides
        # each worker's gradient by its own noise, so there it is not.
        as_ddp = bool(plan and plan.strategy == "allreduce" and isinstance(self.optimizer, Adam))
        asked = (wire, momentum, tuple(links), push_sum, relay, limit, as_ddp, weights)
        if asked == self._equipment:
            return
        is_plain = is_whole(wire) and momentum.kind == "local" and not self.overlap
        if push_sum and not is_plain:
            raise InputError(
                "messages that go one way without coming round carry whole values after the "
                "gradient step: leave wire, momentum and overlap at their defaults."
            )
        if relay and not is_plain:
            raise InputError(
                "relayed sums (relaysum) are of whole float32 values after the gradient step, and "
                "late: leave wire, momentum and overlap at their defaults."
            )
        if momentum.steps_first and self.overlap:
            raise InputError(
                f"{momentum.kind} changes the step before the round, but with overlap the round "
                "comes first: leave overlap out."
            )
        if isinstance(wire, TopK) and (momentum.kind != "local" or self.overlap):
            raise InputError(
                "a top-k wire remembers where the last average left the workers: leave momentum at "
                "local, outer steps and overlap out."
            )
        if limit is not None and (not is_whole(wire) or momentum.messages > 1):
            raise InputError(
                "clip goes with whole values in a simulation, and with one vector per message: "
                "leave tracking, momentum-tracking and shared momentum out."
            )
        self._equipment, self._averages_gradients = asked, as_ddp
        workers = self.workers
        self._weights = None if weights is None else workers.updates.new_tensor(weights)[:, None]
        self._graphs.keep("gradients")
        self.momentum_rule = make_rule(
            momentum, self._told, workers.parameters, mixes_first=self.overlap
        )
        rows = [workers.parameters]
        if momentum.kind in ("tracking", "momentum-tracking"):
            rows.append(self.momentum_rule.state()["tracked"])
        elif momentum.kind == "shared":
            rows.append(first_moment(self.memory))
        self.mixing: Mixing
        workers.shares = None
        if push_sum:
            self.mixing = PushMixing(rows)
            workers.shares = self.mixing.omega
        elif relay:
            self.mixing = RelayMixing(rows, links, self._graphs)
        elif limit is not None:
            self.mixing = ClippedMixing(rows, limit)
        elif is_whole(wire):
            steps = self.task.steps_per_epoch
            self.mixing = WholeMixing(rows, steps, self.position, self._graphs)
        elif isinstance(wire, TopK):
            self.mixing = TopKMixing(wire, workers.segments(), rows, self._graphs)
        else:
            self.mixing = WireMixing(wire, workers.segments(), rows, links, self._graphs)
        self.message_bytes = momentum.messages * wire.message_bytes(workers.layout.shapes)
        """What a worker sends in a meeting."""

    def reset(self) -> None:
        """Start again from the task's initial model; what was captured stays."""
        self.workers.reset(self.task.model())
        self.workers.updates.zero_()
        for name, fresh in self.optimizer.state(self.workers.parameters).items():
            self.memory[name].copy_(fresh)
        self.momentum_rule.reset(self.workers.parameters)
        self.mixing.reset()

    # The iteration, in the parts that both update rules are made of.

    def _gradients(self) -> None:
        """Every worker's gradient at its own parameters, on its own batch."""
        self.position.add_(1)
        rows = {
            name: table.index_select(0, self.position)[0] for name, table in self.tables.items()
        }
        inputs, targets = self.task.batch(rows)
        self.workers.refresh()
        if self.batching != "loop":
            self._gradients_at_once(inputs, targets)
            return
        with self._fork() as worker_stream:
            for i in range(self.task.num_workers):
                with worker_stream(i):
                    self._gradient(i, inputs[i], targets[i])

    def _gradient(self, worker: int, inputs: Tensor, targets: Tensor) -> None:
        module, leaves = self.workers.modules[worker], self.workers.leaves[worker]
        with self.execution.autocast():
            loss, carried = self.task.loss(module, inputs, targets, self.carried[worker])
        gradients = torch.autograd.grad(loss, leaves)
        self.workers.store_gradients(worker, gradients)
        self.losses[worker].add_(loss.detach())
        for old, new in zip(self.carried[worker], carried, strict=True):
            old.copy_(new.detach())

    def _gradients_at_once(self, inputs: Tensor, targets: Tensor) -> None:
        leaves = {n: v.detach().requires_grad_() for n, v in self.workers.stacked().items()}
        with self.execution.autocast():
            if self.batching == "stacked":
                losses = self._losses_at_once(leaves, inputs, targets)
            else:
                losses = torch.func.vmap(self._losses_of, randomness="different")(
                    leaves, inputs, targets
                )
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()))
        views = self.workers.layout.views(self.workers.updates)
        for (_, target), gradient in zip(views, gradients, strict=True):
            target.copy_(gradient)
        self.losses.add_(losses.detach())

    def _losses_of(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """The loss at some parameters: one per worker where the task's model stacks."""
        return self.task.loss(Bound(self.workers.template, parameters), x, y, ())[0]

    def _direct(self) -> None:
        """Gradient → direction."""
        updates = self.workers.updates
        if self._weights is not None:
            updates.mul_(self._weights)
        if self._averages_gradients:
            updates.copy_(updates.mean(0, keepdim=True).expand_as(updates))
        self.momentum_rule.adjust_gradient(updates)
        self.momentum_rule.before_step(self.workers.parameters, self.memory)
        if self._fused is None:
            self._told.direct(self.workers.parameters, updates, self.memory)

    def _step(self) -> None:
        """Gradient → step, and what momentum does between it and the round."""
        x, rate = self.workers.parameters, self._rate()
        self._direct()
        if self._fused is None:
            x.addcmul_(self.workers.updates, rate, value=-1)
        else:
            self._fused.step_fused(x, self.workers.updates, self.memory, rate[0])
        self.momentum_rule.after_step(x, rate)
        self.momentum_rule.before_round(x, self._meeting())

    def _step_last(self) -> None:
        """The step along directions from before the round."""
        x, rate = self.workers.parameters, self._rate()
        self.momentum_rule.after_step(x, rate)
        x.addcmul_(self.workers.updates, rate, value=-1)

    def _after(self) -> None:
        x = self.workers.parameters
        self.momentum_rule.after_round(x, self.memory, self._rate(), self._meeting())

    def _rate(self) -> Tensor:
        return self.rates.index_select(0, self.position)

    def _meeting(self) -> Tensor:
        """Which workers take part in the iteration's round, as a column."""
        return self._met.index_select(0, self.position)[0].unsqueeze(1)

    # Running them.

    def _ordered_parts(self) -> dict[str, Callable[[], None]]:
        """The iteration's parts in their order."""
        parts, mixing = {"gradients": self._gradients}, self.mixing.parts()
        if self.overlap:
            parts |= {"direct": self._direct} | mixing | {"apply": self._step_last}
        else:
            parts |= {"step": self._step} | mixing
        return parts | {"after": self._after}

    def _run(self, name: str) -> None:
        self._graphs.run(name, self._parts[name])

    def begin_epoch(self, epoch: int, rates: Sequence[float], rounds: Sequence[Round]) -> None:
        """Fill the tables that the epoch's iterations read.

        Args:
            epoch: whose examples to draw.
            rates: the learning rate of each iteration.
            rounds: what is exchanged in each iteration.
        """
        assert len(rates) == len(rounds) == self.task.steps_per_epoch
        self._rounds = list(rounds)
        self.rates.copy_(torch.as_tensor(rates, dtype=self.rates.dtype))
        for name, array in self.task.tables(epoch).items():
            host = torch.from_numpy(array)
            if name not in self.tables:
                self.tables[name] = host.to(self.device)
            else:
                self.tables[name].copy_(host)
        self.mixing.fill(rounds)
        met = np.zeros(self._met.shape, dtype=np.bool_)
        for k, round in enumerate(rounds):
            met[k, [worker for link in round.links for worker in link]] = True
        self._met.copy_(torch.from_numpy(met))
        self._begin()
        self._parts = self._ordered_parts()
        if self._graphs.missing(self._parts):
            kept = {name: tensor.clone() for name, tensor in self._tensors().items()}
            self._graphs.capture(self._parts, self._begin)
            self.load_state(kept)
            self._begin()

    def _begin(self) -> None:
        self.position.fill_(-1)
        self.losses.zero_()
        for carried in self.carried:
            for tensor in carried:
                tensor.zero_()

    def step(self, index: int) -> None:
        """Iteration ``index`` of the epoch: gradients, update and mixing."""
        round, rule = self._rounds[index], self.momentum_rule
        self._run("gradients")
        self._run("direct" if self.overlap else "step")
        # Push-sum's x follows every step, also in silent rounds: z = x/ω divides it by ω.
        if round or self.mixing.mixes_always:
            self.mixing.mix(index)
        if self.overlap:
            self._run("apply")
        if round or rule.acts_without_round:
            self._run("after")

    def direct_one(
        self,
        worker: int,
        rows: Mapping[str, Tensor],
        memory: dict[str, Tensor],
        *,
        is_first: bool,
    ) -> None:
        """Turn one worker's gradient into its direction, for workers with paces of their own.

        Args:
            worker: whose; its row of `workers.updates` is overwritten.
            rows: of all workers' choices, of which it takes its own.
            memory: the optimizer's, of this worker alone.
            is_first: whether an epoch begins, and with it what is carried from batch to batch.
        """
        for tensor in self.carried[worker] if is_first else ():
            tensor.zero_()
        inputs, targets = self.task.batch(rows)
        self.workers.refresh()
        self._gradient(worker, inputs[worker], targets[worker])
        own = slice(worker, worker + 1)
        self._told.direct(self.workers.parameters[own], self.workers.updates[own], memory)

    def directions(self) -> Tensor:
        """Every worker's last update direction u; with Adam fused, its gradient."""
        if not isinstance(self._fused, SGD):
            return self.workers.updates
        matrices = self.workers.parameters, self.workers.updates, self.memory
        return self._fused.directions(*matrices)

    def time_gradients(self) -> float:
        """Seconds of one worker's gradient: the least of some iterations, after a warm-up.

        What else the machine does only ever adds to them. Between `begin_epoch` and `reset`: losses
        and position are not what an epoch left.
        """
        seconds: list[float] = []
        for number in range(_WARMUP + _TIMED):
            self.position.fill_(number % self.task.steps_per_epoch - 1)
            self._synchronize()
            started = time.perf_counter()
            self._run("gradients")
            self._synchronize()
            seconds.append(time.perf_counter() - started)
            if number >= _WARMUP and sum(seconds) > _PATIENCE:
                break
        return min(seconds[_WARMUP:]) / self.task.num_workers

    def _synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def _fork(self) -> Iterator[Callable[[int], contextlib.AbstractContextManager[object]]]:
        """Side streams on CUDA that start after what was queued and are joined at the end."""
        if not self.on_cuda or len(self._streams) == 1:
            yield lambda _: contextlib.nullcontext()
            return
        main = torch.cuda.current_stream(self.device)
        for stream in self._streams:
            stream.wait_stream(main)
        yield lambda i: torch.cuda.stream(self._streams[i % len(self._streams)])
        for stream in self._streams:
            main.wait_stream(stream)

    # Workers that come and go, and checkpoints.

    def hand_over(self, donor: int, worker: int) -> None:
        """Give a worker that comes back all of another's state; what links remember stays."""
        for tensor in self._worker_tensors().values():
            if tensor.dim():  # an optimizer's or a rule's single numbers are of all workers
                tensor[worker].copy_(tensor[donor])

    def change_team(self, joined: Collection[int], left: Collection[int], there: set[int]) -> None:
        """Keep the average of those that were there: who joins starts from it.

        Those that stay take over the share of those that leave.
        """
        rows = self.workers.parameters
        mean = rows[sorted(there)].mean(0)
        stay = sorted(there - {*left})
        if left and stay:
            rows[stay] += mean - rows[stay].mean(0)
        rows[sorted(joined)] = mean

    def park(self, present: Sequence[int]) -> None:
        """Put absent workers where they change neither the average nor the spread: in the mean."""
        absent = [i for i in range(self.task.num_workers) if i not in present]
        for rows in (self.workers.parameters, self.workers.buffers) if absent else ():
            rows[absent] = rows[list(present)].mean(0)

    def _worker_tensors(self) -> dict[str, Tensor]:
        """All that workers hold, a row per worker, and single numbers of all."""
        named = {"parameters": self.workers.parameters, "buffers": self.workers.buffers}
        named |= {f"memory.{name}": tensor for name, tensor in self.memory.items()}
        named |= {f"momentum.{name}": t for name, t in self.momentum_rule.state().items()}
        return named | {f"wire.{name}": tensor for name, tensor in self.mixing.state.items()}

    def _tensors(self) -> dict[str, Tensor]:
        links = {f"wire.{name}": tensor for name, tensor in self.mixing.link_state.items()}
        return self._worker_tensors() | links

    def state(self) -> dict[str, Tensor]:
        """Everything the next epoch depends on, on the host."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in self._tensors().items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from a state that :meth:`state` gave."""
        named = self._tensors()
        if {n: t.shape for n, t in named.items()} != {n: t.shape for n, t in state.items()}:
            raise InputError("the checkpoint belongs to another model, optimizer or worker count")
        for name, tensor in named.items():
            tensor.copy_(state[name])
