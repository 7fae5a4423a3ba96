"""The engine: one iteration of all workers on one device, by a loop, by vmap or by CUDA graphs.

The iteration is written once, as a few functions that read all they need from tensors on the device
(the iteration's batch indices, learning rate and mixing matrix are rows of tables filled once an
epoch). On a CPU they are called; on CUDA they are captured over several streams and replayed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from matcha.errors import InputError
from matcha.rounds import Round
from matcha.simulation.flat import Workers
from matcha.simulation.mixing import matrices, mix_product, mix_rows
from matcha.tasks.optimizers import SGD, Optimizer
from matcha.tasks.task import Task

Rule: TypeAlias = Literal["eq2", "footnote"]
Batching: TypeAlias = Literal["auto", "loop", "vmap"]
Precision: TypeAlias = Literal["float32", "float64", "bfloat16"]

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """How the iteration is carried out; it changes speed, and results only in the last bits."""

    device: str = "cpu"
    precision: Precision = "float32"
    """``bfloat16`` keeps float32 parameters and computes under autocast."""
    batching: Batching = "auto"
    """Several workers' passes one by one, or as one batched computation (``vmap``)."""
    streams: int = 8
    """CUDA: how many workers' passes may overlap."""
    capture: bool = True
    """CUDA: replay captured graphs instead of launching kernel by kernel."""
    compile: bool = False
    """Compile the model's blocks first (``torch.compile``); pays on CUDA for long trainings."""

    def __post_init__(self) -> None:
        if self.precision not in _DTYPES:
            raise InputError(
                f"precision must be one of {', '.join(_DTYPES)}, not {self.precision!r}"
            )
        if self.batching not in ("auto", "loop", "vmap"):
            raise InputError(f"batching must be auto, loop or vmap, not {self.batching!r}")
        if self.streams < 1:
            raise InputError(f"streams must be 1 or more, not {self.streams}")
        kind = self.device.partition(":")[0]
        if kind not in ("cpu", "cuda"):
            raise InputError(f"device must be cpu or cuda, not {self.device!r}")
        if kind == "cuda" and not torch.cuda.is_available():
            raise InputError("device 'cuda' asks for an NVIDIA GPU, and PyTorch sees none here")


def prefers_vmap(model: nn.Module) -> bool:
    """Whether one batched computation beats a loop over models on a CPU.

    Measured: vmap wins on linear models and perceptrons (many tiny products become one), loses on
    convolutions (they become grouped ones); modules that change buffers cannot be batched.
    """
    unsuitable = (nn.modules.conv._ConvNd, nn.RNNBase, nn.modules.batchnorm._BatchNorm, nn.Dropout)
    return not any(isinstance(module, unsuitable) for module in model.modules())


class Engine:
    """All workers' state and the iteration that advances it.

    Args:
        task: data, model and loss.
        optimizer: turns gradients into update directions.
        rule: ``eq2`` mixes after the step, x ← W(x − ηu); ``footnote`` before it, x ← Wx − ηu, with
            u from the values before mixing, so that the exchange may overlap the gradient.
        execution: device, precision and how the workers are batched.
    """

    def __init__(
        self,
        task: Task,
        optimizer: Optimizer | None = None,
        *,
        rule: Rule = "eq2",
        execution: Execution | None = None,
    ) -> None:
        if rule not in ("eq2", "footnote"):
            raise InputError(f"rule must be eq2 or footnote, not {rule!r}")
        execution = execution or Execution()
        self.task, self.rule, self.execution = task, rule, execution
        self.optimizer: Optimizer = optimizer or SGD()
        self.device = torch.device(execution.device)
        self.on_cuda = self.device.type == "cuda"
        self.low_precision = execution.precision == "bfloat16"
        dtype = _DTYPES[execution.precision]
        compute = torch.bfloat16 if self.low_precision else dtype
        template = task.model()
        use_vmap = execution.batching == "vmap" or (
            execution.batching == "auto" and not self.on_cuda and prefers_vmap(template)
        )
        self.batching: Batching = "vmap" if use_vmap else "loop"
        task.to(self.device, compute)
        self.workers = Workers(
            template,
            task.num_workers,
            device=self.device,
            dtype=dtype,
            compute_dtype=None if use_vmap else compute,
            channels_last=self.on_cuda and not use_vmap,
        )
        if execution.compile:
            _compile_blocks(self.workers.modules)
        self.memory = self.optimizer.state(self.workers.parameters)
        self._fused: SGD | None = None
        if self.on_cuda and rule == "eq2" and isinstance(self.optimizer, SGD):
            self._fused = self.optimizer if self.optimizer.momentum else None
        m, steps = task.num_workers, task.steps_per_epoch
        self.losses = torch.zeros(m, dtype=torch.float64, device=self.device)
        """Each worker's loss summed over the epoch so far."""
        self.position = torch.full((1,), -1, dtype=torch.long, device=self.device)
        self.rates = torch.zeros(steps, dtype=dtype, device=self.device)
        self.tables: dict[str, Tensor] = {}
        first = task.initial_state()
        self.carried = [
            tuple(tensor.to(self.device, copy=True) for tensor in first) for _ in range(m)
        ]
        self._rounds: list[Round] = []
        if self.on_cuda:
            self.mixers = torch.eye(m, dtype=dtype, device=self.device).repeat(steps, 1, 1)
            self._scratch = torch.empty_like(self.workers.parameters)
            self._streams = [_stream(self.device) for _ in range(execution.streams)]
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}

    def reset(self) -> None:
        """Start afresh from the task's initial model; what was captured stays."""
        self.workers.reset(self.task.model())
        self.workers.updates.zero_()
        for name, fresh in self.optimizer.state(self.workers.parameters).items():
            self.memory[name].copy_(fresh)

    # The iteration, in the parts that both update rules are made of.

    def _gradients(self) -> None:
        """Every worker's gradient at its own parameters, on its own batch."""
        self.position.add_(1)
        rows = {
            name: table.index_select(0, self.position)[0] for name, table in self.tables.items()
        }
        inputs, targets = self.task.batch(rows)
        self.workers.refresh()
        if self.batching == "vmap":
            self._gradients_at_once(inputs, targets)
            return
        with self._fork() as worker_stream:
            for i in range(self.task.num_workers):
                with worker_stream(i):
                    self._gradient(i, inputs[i], targets[i])

    def _gradient(self, worker: int, inputs: Tensor, targets: Tensor) -> None:
        module, leaves = self.workers.modules[worker], self.workers.leaves[worker]
        with self.autocast():
            loss, carried = self.task.loss(module, inputs, targets, self.carried[worker])
        gradients = torch.autograd.grad(loss, leaves)
        self.workers.store_gradients(worker, gradients)
        self.losses[worker].add_(loss.detach())
        for old, new in zip(self.carried[worker], carried, strict=True):
            old.copy_(new.detach())

    def _gradients_at_once(self, inputs: Tensor, targets: Tensor) -> None:
        leaves = {n: v.detach().requires_grad_() for n, v in self.workers.stacked().items()}
        template = self.workers.template

        def loss_of(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            bound = _Bound(template, parameters)
            return self.task.loss(bound, x, y, ())[0]

        with self.autocast():
            losses = torch.func.vmap(loss_of)(leaves, inputs, targets)
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()))
        for target, gradient in zip(
            self.workers.stacked_updates().values(), gradients, strict=True
        ):
            target.copy_(gradient)
        self.losses.add_(losses.detach())

    def _direct(self) -> None:
        self.optimizer.direct(self.workers.parameters, self.workers.updates, self.memory)

    def _apply(self) -> None:
        rate = self.rates.index_select(0, self.position)
        self.workers.parameters.addcmul_(self.workers.updates, rate, value=-1)

    def _product(self) -> None:
        matrix = self.mixers.index_select(0, self.position)[0]
        mix_product(self.workers.parameters, matrix, self._scratch)

    # Two ways to carry the parts out.

    def _run(self, name: str, part: Callable[[], None]) -> None:
        graph = self._graphs.get(name)
        if graph is None:
            part()
        else:
            graph.replay()

    def _compute(self) -> None:
        self._gradients()
        self._direct()

    def _compute_and_apply(self) -> None:
        if self._fused is None:
            self._compute()
            self._apply()
            return
        self._gradients()
        rate = self.rates.index_select(0, self.position)[0]
        matrices = self.workers.parameters, self.workers.updates, self.memory
        self._fused.step_fused(*matrices, rate)

    def directions(self) -> Tensor:
        """Every worker's last update direction u."""
        if self._fused is None:
            return self.workers.updates
        matrices = self.workers.parameters, self.workers.updates, self.memory
        return self._fused.directions(*matrices)

    def _mix(self, round: Round) -> None:
        if not round:
            return
        if self.on_cuda:
            self._run("mix", self._product)
        else:
            mix_rows(self.workers.parameters, round)

    def begin_epoch(self, epoch: int, rates: Sequence[float], rounds: Sequence[Round]) -> None:
        """Fill the tables that the epoch's iterations read.

        Args:
            epoch: whose examples to draw.
            rates: the learning rate of each iteration.
            rounds: what is exchanged in each iteration.
        """
        steps = self.task.steps_per_epoch
        assert len(rates) == len(rounds) == steps
        self._rounds = list(rounds)
        self.rates.copy_(torch.as_tensor(rates, dtype=self.rates.dtype))
        self._fill(self.task.tables(epoch))
        if self.on_cuda:
            self.mixers.copy_(torch.from_numpy(matrices(rounds, self.task.num_workers)))
        self.position.fill_(-1)
        self.losses.zero_()
        for carried in self.carried:
            for tensor in carried:
                tensor.zero_()
        if self.on_cuda and self.execution.capture and not self._graphs:
            self._capture()

    def _fill(self, tables: dict[str, npt.NDArray[np.generic]]) -> None:
        for name, array in tables.items():
            host = torch.from_numpy(array)
            if name not in self.tables:
                self.tables[name] = host.to(self.device)
            else:
                self.tables[name].copy_(host)

    def step(self, index: int) -> None:
        """Iteration ``index`` of the epoch: gradients, update and mixing by the rule."""
        round = self._rounds[index]
        if self.rule == "eq2":
            self._run("compute", self._compute_and_apply)
            self._mix(round)
        else:
            self._run("compute", self._compute)
            self._mix(round)
            self._run("apply", self._apply)

    def mean_losses(self, steps: int) -> Tensor:
        """Each worker's training loss, averaged over the epoch's first ``steps`` iterations."""
        return self.losses.cpu() / steps

    def _tensors(self) -> dict[str, Tensor]:
        named = {"parameters": self.workers.parameters, "buffers": self.workers.buffers}
        return named | {f"memory.{name}": tensor for name, tensor in self.memory.items()}

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

    # CUDA: streams and capture.

    @contextlib.contextmanager
    def _fork(self) -> Iterator[Callable[[int], contextlib.AbstractContextManager[object]]]:
        """Side streams that start after what was queued before and are joined at the end."""
        if not self.on_cuda or len(self._streams) == 1:
            yield lambda _: contextlib.nullcontext()
            return
        main = torch.cuda.current_stream(self.device)
        for stream in self._streams:
            stream.wait_stream(main)
        yield lambda i: torch.cuda.stream(self._streams[i % len(self._streams)])
        for stream in self._streams:
            main.wait_stream(stream)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The context in which models compute at this execution's precision."""
        if not self.low_precision:
            return contextlib.nullcontext()
        # The weight cache would hand one capture's casts to the next replay.
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    def _capture(self) -> None:
        """Record the parts as CUDA graphs; the state is what it was before."""
        parts: dict[str, Callable[[], None]] = {"mix": self._product}
        if self.rule == "eq2":
            parts["compute"] = self._compute_and_apply
        else:
            parts |= {"compute": self._compute, "apply": self._apply}
        kept = {name: tensor.clone() for name, tensor in self._tensors().items()}
        torch.backends.cudnn.benchmark = True
        side = _stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            # Library handles, workspaces and algorithm choices must exist before capture.
            for _ in range(3):
                self.position.fill_(-1)
                for name in ("compute", "mix", "apply"):
                    if name in parts:
                        parts[name]()
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)
        self.position.fill_(-1)
        pool = torch.cuda.graph_pool_handle()
        for name, part in parts.items():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                part()
            self._graphs[name] = graph
        torch.cuda.synchronize(self.device)
        self.load_state(kept)
        self.position.fill_(-1)
        self.losses.zero_()
        for carried in self.carried:
            for tensor in carried:
                tensor.zero_()


def _stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


class _Bound(nn.Module):
    """A module that answers with other parameters than its own, for batching over workers."""

    def __init__(self, module: nn.Module, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self.__dict__["bound"] = (module, parameters)

    def forward(self, *inputs: Tensor) -> object:
        module, parameters = self.__dict__["bound"]
        return torch.func.functional_call(module, parameters, inputs)


def _compile_blocks(modules: Sequence[nn.Module]) -> None:
    """Compile each repeated block once; all workers and all equal blocks share the code."""
    import torch._dynamo

    name = (
        "recompile_limit"
        if hasattr(torch._dynamo.config, "recompile_limit")
        else "cache_size_limit"
    )
    setattr(torch._dynamo.config, name, 64)
    for module in modules:
        kinds = getattr(module, "compiled_blocks", ())
        for block in module.modules():
            if isinstance(block, kinds):
                block.compile(dynamic=False)
