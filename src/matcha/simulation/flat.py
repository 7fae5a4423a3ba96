"""All workers' parameters as one matrix: a row per worker, every module's weights views of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from matcha.wires.wire import BLOCK, Segment

ALIGNMENT = BLOCK
"""Each parameter starts on a multiple of this many numbers: a wire's blocks, and wide loads."""


class Layout:
    """Where each parameter (or buffer) of a module stands in a flat row, one after another.

    Padding is zero and stays zero. With ``channels_last`` convolution kernels are stored output,
    height, width, input: the order GPUs read.

    >>> layout = Layout({"weight": torch.Size([3, 2]), "bias": torch.Size([3])})
    >>> layout.offsets, layout.size
    ((0, 256), 512)
    """

    def __init__(self, shapes: Mapping[str, torch.Size], *, channels_last: bool = False) -> None:
        self.names, self.shapes = tuple(shapes), tuple(shapes.values())
        sizes = (-(-math.prod(shape) // ALIGNMENT) * ALIGNMENT for shape in self.shapes)
        *offsets, self.size = accumulate(sizes, initial=0)
        self.offsets, self.channels_last = tuple(offsets), channels_last

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Every named tensor as a view of ``flat``, a row or a matrix of rows."""
        for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True):
            piece = flat.narrow(-1, offset, math.prod(shape))
            leading = flat.shape[:-1]
            if self.channels_last and len(shape) == 4:
                out, into, height, width = shape
                yield name, piece.view(*leading, out, height, width, into).movedim(-1, -3)
            else:
                yield name, piece.view((*leading, *shape))

    def spans(self, row: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Every named tensor as a one-dimensional piece of ``row``, in storage order."""
        for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True):
            yield name, row.narrow(0, offset, math.prod(shape))

    def ravel(self, value: Tensor) -> Tensor:
        """One parameter's value in the order this layout stores it."""
        if self.channels_last and value.dim() == 4:
            value = value.movedim(-3, -1)
        return value.reshape(-1)


class Workers:
    """m copies of one model whose parameters, gradients and buffers are rows of flat matrices.

    Every worker starts from the template's values. Weights that a model ties (one parameter under
    two names) stay tied. Counters such as BatchNorm's ``num_batches_tracked`` are dropped: nothing
    here reads them, and each costs a kernel per iteration.

    Parameters have the precision ``dtype``, in which the optimizer updates them. Where the forward
    pass reads another, ``compute_dtype``, those with two or more axes are read from a copy that is
    refreshed once per iteration for all workers: what autocast does one weight at a time.
    """

    def __init__(
        self,
        template: nn.Module,
        num_workers: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        compute_dtype: torch.dtype | None = None,
        channels_last: bool = False,
    ) -> None:
        self.num_workers = num_workers
        self.template = template
        shapes = {name: value.shape for name, value in template.named_parameters()}
        buffers = {n: b.shape for n, b in template.named_buffers() if b.is_floating_point()}
        self.layout = Layout(shapes, channels_last=channels_last)
        self.buffer_layout = Layout(buffers)
        self.num_parameters = sum(map(math.prod, shapes.values()))

        self.parameters = torch.zeros(num_workers, self.layout.size, dtype=dtype, device=device)
        self.buffers = torch.zeros(num_workers, self.buffer_layout.size, dtype=dtype, device=device)
        self.shares: Tensor | None = None
        """Push-sum's ω, a row per worker, by which parameters count in averages; None: alike."""
        self.reset(template)
        self.updates = torch.zeros_like(self.parameters)
        """Gradients, which the optimizer turns into update directions in place."""
        low = compute_dtype is not None and compute_dtype != dtype
        self.low = self.parameters.to(compute_dtype) if low else None

        self.modules = [self._module(i) for i in range(num_workers)]
        self.leaves: list[list[nn.Parameter]] = []
        """Each worker's parameters in the layout's order: what gradients are taken by."""
        self._targets: list[list[tuple[list[int], list[Tensor]]]] = []
        for module, row in zip(self.modules, self.updates, strict=True):
            named = dict(module.named_parameters())
            leaves = [named[name] for name in self.layout.names]
            self.leaves.append(leaves)
            spans = [span for _, span in self.layout.spans(row)]
            # One group a dtype: a multi-tensor copy is one kernel only if all dtypes agree.
            groups = [
                [k for k, leaf in enumerate(leaves) if leaf.dtype == kind]
                for kind in dict.fromkeys(leaf.dtype for leaf in leaves)
            ]
            self._targets.append([(group, [spans[k] for k in group]) for group in groups])

    def reset(self, source: nn.Module) -> None:
        """Give every worker the parameters and buffers of ``source``."""
        with torch.no_grad():
            for layout, matrix, values in (
                (self.layout, self.parameters, dict(source.named_parameters())),
                (self.buffer_layout, self.buffers, dict(source.named_buffers())),
            ):
                for name, view in layout.views(matrix):
                    view.copy_(values[name])

    def _module(self, worker: int) -> nn.Module:
        """A copy of the template that shares no tensor with it: all are views of a worker's row."""
        tensors = [*self.template.parameters(), *self.template.buffers()]
        module = copy.deepcopy(self.template, {id(tensor): tensor for tensor in tensors})
        leaves = {n: nn.Parameter(view) for n, view in self._weights(worker).items()}
        first = {id(value): name for name, value in self.template.named_parameters()}
        for name, value in self.template.named_parameters(remove_duplicate=False):
            owner, leaf = _owner(module, name)
            setattr(owner, leaf, leaves[first[id(value)]])
        views = dict(self.buffer_layout.views(self.buffers[worker]))
        for name, _ in self.template.named_buffers():
            owner, leaf = _owner(module, name)
            # `.data` gives each buffer a version counter of its own: compiled code saves running
            # statistics for the backward pass and would take its neighbours' updates for its own.
            owner._buffers[leaf] = views[name].data if name in views else None
        return module.train()

    def _weights(self, rows: int | slice) -> dict[str, Tensor]:
        """Views of parameters, weights from the low-precision copy where there is one."""
        views = dict(self.layout.views(self.parameters[rows]))
        if self.low is not None:
            low = dict(self.layout.views(self.low[rows]))
            shapes = zip(self.layout.names, self.layout.shapes, strict=True)
            views |= {name: low[name] for name, shape in shapes if len(shape) > 1}
        return views

    def stacked(self) -> dict[str, Tensor]:
        """Every parameter of all workers at once, the worker the first axis; views."""
        return self._weights(slice(None))

    def refresh(self) -> None:
        """Bring the low-precision copy of the parameters up to date."""
        if self.low is not None:
            self.low.copy_(self.parameters)

    def store_gradients(self, worker: int, gradients: Sequence[Tensor]) -> None:
        """Write one worker's gradients, in the layout's order, into its row."""
        for group, spans in self._targets[worker]:
            torch._foreach_copy_(spans, [self.layout.ravel(gradients[k]) for k in group])

    def segments(self) -> list[Segment]:
        """Where each parameter lies in a row, for wires; convolution kernels in storage order."""
        places = zip(self.layout.offsets, self.layout.shapes, strict=True)
        return [Segment(offset=offset, shape=tuple(shape)) for offset, shape in places]

    def average(self) -> nn.Module:
        """A new module with the mean of all workers' parameters and buffers, in evaluation mode."""
        module = copy.deepcopy(self.template).to(self.parameters.device, self.parameters.dtype)
        held = dict(module.named_parameters()) | dict(module.named_buffers())
        with torch.no_grad():
            for name, view in self.layout.views(self._mean()):
                held[name].copy_(view)
            for name, view in self.buffer_layout.views(self.buffers.mean(0)):
                held[name].copy_(view)
        if self.layout.channels_last:
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return module.eval()

    def consensus_distance(self) -> float:
        """(1/m) Σᵢ ‖xᵢ − x̄‖²: how far the workers stand from their mean."""
        return mean_squared_deviation(self.parameters, self._mean())

    def _mean(self) -> Tensor:
        """The mean of the workers' parameters; by push-sum's weights Σx/Σω."""
        if self.shares is None:
            return self.parameters.mean(0)
        return (self.parameters * self.shares.to(self.parameters.dtype)).mean(0)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def mean_squared_deviation(rows: Tensor, mean: Tensor | None = None) -> float:
    """(1/m) Σᵢ ‖xᵢ − x̄‖² of a matrix's rows; x̄ is their mean unless given.

    >>> mean_squared_deviation(torch.tensor([[0.0, 1.0], [2.0, 1.0]]))
    1.0
    """
    spread = (rows - (rows.mean(0) if mean is None else mean)).square_().sum(dtype=torch.float64)
    return float(spread) / rows.shape[0]
