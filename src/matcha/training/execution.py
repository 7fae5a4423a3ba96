"""Execution: on which device and in which precision an iteration is computed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from matcha.errors import InputError

Batching: TypeAlias = Literal["auto", "loop", "vmap", "stacked"]
Precision: TypeAlias = Literal["float32", "float64", "bfloat16"]

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """How the iteration is carried out; it changes speed, and results only in the last bits."""

    device: str = "cpu"
    precision: Precision = "float32"
    """``bfloat16`` keeps float32 parameters and computes under autocast."""
    batching: Batching = "auto"
    """Simulation: workers' passes one by one, or as one batched computation: by ``vmap``, or
    ``stacked``, for models that compute with the parameters of several workers themselves."""
    streams: int = 8
    """Simulation on CUDA: how many workers' passes may overlap."""
    capture: bool = True
    """Simulation on CUDA: replay captured graphs instead of launching kernel by kernel."""
    compile: bool = False
    """Simulation: compile the model's blocks first; pays on CUDA for long trainings."""

    def __post_init__(self) -> None:
        if self.precision not in _DTYPES:
            raise InputError(
                f"precision must be one of {', '.join(_DTYPES)}, not {self.precision!r}"
            )
        if self.batching not in get_args(Batching):
            raise InputError(
                f"batching must be one of {', '.join(get_args(Batching))}, not {self.batching!r}"
            )
        if self.streams < 1:
            raise InputError(f"streams must be 1 or more, not {self.streams}")
        kind = self.device.partition(":")[0]
        if kind not in ("cpu", "cuda"):
            raise InputError(f"device must be cpu or cuda, not {self.device!r}")
        if kind == "cuda" and not torch.cuda.is_available():
            raise InputError("device 'cuda' asks for an NVIDIA GPU, and PyTorch sees none here")

    @property
    def low_precision(self) -> bool:
        """Whether models compute in fewer bits than their parameters have."""
        return self.precision == "bfloat16"

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters that the optimizer updates."""
        return _DTYPES[self.precision]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of what models compute with."""
        return torch.bfloat16 if self.low_precision else self.dtype

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The context in which models compute at this precision."""
        if not self.low_precision:
            return contextlib.nullcontext()
        # The weight cache would hand one captured graph's casts to its next replay.
        kind = torch.device(self.device).type
        return torch.autocast(kind, torch.bfloat16, cache_enabled=False)
