"""Execution: how the iteration of all workers is carried out on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from matcha.errors import InputError

Batching: TypeAlias = Literal["auto", "loop", "vmap"]
Precision: TypeAlias = Literal["float32", "float64", "bfloat16"]

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}


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
        if self.precision not in DTYPES:
            raise InputError(
                f"precision must be one of {', '.join(DTYPES)}, not {self.precision!r}"
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


class Graphs:
    """Parts of an iteration as CUDA graphs, each captured before its first use and then replayed.

    Parts read and write tensors that stay where they are; nothing else survives a replay, so all
    share one pool of memory.
    """

    def __init__(self, device: torch.device, *, capture: bool) -> None:
        self.device = device
        self._captures = capture and device.type == "cuda"
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None

    def run(self, name: str, part: Callable[[], None]) -> None:
        """Replay a part, or call it where nothing was captured."""
        graph = self._graphs.get(name)
        if graph is None:
            part()
        else:
            graph.replay()

    def keep(self, name: str) -> None:
        """Drop all other parts: their tensors are about to be replaced."""
        self._graphs = {known: graph for known, graph in self._graphs.items() if known == name}

    def missing(self, names: Iterable[str]) -> bool:
        """Whether there is something to capture."""
        return self._captures and any(name not in self._graphs for name in names)

    def capture(self, parts: Mapping[str, Callable[[], None]], begin: Callable[[], None]) -> None:
        """Record what is not recorded yet; the caller keeps and restores the state they change.

        Args:
            parts: in the order of an iteration.
            begin: called before each pass through them.
        """
        torch.backends.cudnn.benchmark = True
        side = new_stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            # Library handles, workspaces and algorithm choices must exist before capture.
            for _ in range(3):
                begin()
                for part in parts.values():
                    part()
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)
        begin()
        for name, part in parts.items():
            if name in self._graphs:
                continue
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                part()
            self._graphs[name] = graph
        torch.cuda.synchronize(self.device)


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A CUDA stream of its own."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


class Bound(nn.Module):
    """A module that answers with other parameters than its own, for batching over workers."""

    def __init__(self, module: nn.Module, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self.__dict__["bound"] = (module, parameters)

    def forward(self, *inputs: Tensor) -> object:
        """What the module says with the other parameters."""
        module, parameters = self.__dict__["bound"]
        return torch.func.functional_call(module, parameters, inputs)


def compile_blocks(modules: Sequence[nn.Module]) -> None:
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
