"""How the iteration of all workers is carried out on a device: batched, captured, compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from matcha.errors import InputError
from matcha.training.settings import Batching, Execution


def prefers_vmap(model: nn.Module) -> bool:
    """Whether one batched computation beats a loop over models on a CPU.

    Measured: vmap wins on linear models and perceptrons (many tiny products become one), loses on
    convolutions (they become grouped ones); modules that change buffers cannot be batched.
    """
    unsuitable = (nn.modules.conv._ConvNd, nn.RNNBase, nn.modules.batchnorm._BatchNorm, nn.Dropout)
    return not any(isinstance(module, unsuitable) for module in model.modules())


def choose_batching(model: nn.Module, execution: Execution) -> Batching:
    """How workers' passes are computed: as asked for, or as fits the model and the device."""
    stacks = getattr(model, "stacks", False)
    if execution.batching == "stacked" and not stacks:
        raise InputError(
            "batching='stacked' needs a model that computes with several workers' parameters, as "
            f"the transformers do; {type(model).__name__} takes one worker's: choose 'loop'."
        )
    if execution.batching != "auto":
        return execution.batching
    if execution.device.startswith("cuda"):
        return "stacked" if stacks else "loop"
    return "vmap" if prefers_vmap(model) else "loop"


class Graphs:
    """Parts of an iteration as CUDA graphs, each captured before its first use and then replayed.

    Parts read and write tensors that stay where they are; nothing else survives a replay, so all
    share one pool of memory.
    """

    def __init__(self, device: torch.device, *, capture: bool, compiles: bool = False) -> None:
        self.device = device
        self._compiles = compiles
        self._captures = capture and device.type == "cuda"
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None

    def run(self, name: str, part: Callable[[], None]) -> None:
        """Replay a part, or call it where nothing was captured."""
        graph = self._graphs.get(name)
        if graph is not None:
            graph.replay()
            return
        with compiling() if self._compiles else nullcontext():
            part()

    def keep(self, name: str) -> None:
        """Drop all other parts: their tensors are about to be replaced."""
        self._graphs = {known: graph for known, graph in self._graphs.items() if known == name}

    def missing(self, names: Iterable[str]) -> bool:
        """Whether there is something to capture."""
        return self._captures and any(name not in self._graphs for name in names)

    def capture(self, parts: Mapping[str, Callable[[], None]], begin: Callable[[], None]) -> None:
        """Capture parts that are not captured yet; the caller restores the state they change."""
        side, main = new_stream(self.device), torch.cuda.current_stream(self.device)
        with choosing_algorithms(), compiling() if self._compiles else nullcontext():
            side.wait_stream(main)
            with torch.cuda.stream(side):
                # Library handles, workspaces and algorithm choices must exist before capture.
                for _ in range(3):
                    begin()
                    for part in parts.values():
                        part()
            main.wait_stream(side)
            torch.cuda.synchronize(self.device)
            begin()
            for name in [name for name in parts if name not in self._graphs]:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool):
                    parts[name]()
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
    """Let each repeated block be compiled at its first call; all equal blocks share the code."""
    for module in modules:
        kinds = getattr(module, "compiled_blocks", ())
        for block in module.modules():
            if isinstance(block, kinds):
                block.compile(dynamic=False)


@contextmanager
def compiling() -> Iterator[None]:
    """Room for one compiled version a kind of block, where PyTorch's limit is for one function."""
    import torch._dynamo

    settings = torch._dynamo.config
    name = "recompile_limit" if hasattr(settings, "recompile_limit") else "cache_size_limit"
    with settings.patch({name: max(64, getattr(settings, name))}):
        yield


@contextmanager
def choosing_algorithms() -> Iterator[None]:
    """Let cuDNN time its algorithms while graphs are captured: a graph keeps what it was given."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
