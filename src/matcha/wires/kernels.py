"""Compiled kernels for blocks of 256 float32 on a CPU, one pass each: kernels.c on torch's memory.

They say what `modulo` says with torch. Of what travels, only a value half-way between two points of
the grid may differ: a rotation's sums have another order there, as they do between two torches.
The difference that two messages mean is the same to the last bit, so an end with the library may
meet one without.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from matcha.wires import library, modulo
from matcha.wires.wire import BLOCK, Modulo

_log = logging.getLogger("matcha")


def serving(blocks: Tensor) -> ModuleType | None:
    """The module whose kernels serve these blocks, this one or `gpu`; None: torch does."""
    if blocks.shape[-1] != BLOCK or blocks.dtype not in (torch.float32, torch.float64):
        return None
    if blocks.is_cuda:
        return on_gpu(blocks.device)
    known = blocks.device.type == "cpu" and blocks.dtype == torch.float32
    return sys.modules[__name__] if known and library.load() is not None else None


@cache
def on_gpu(device: torch.device) -> ModuleType | None:
    """The kernels for this GPU, `gpu`, or None, which is logged: Triton also needs a C compiler."""
    if find_spec("triton") is None:
        return None
    gpu = import_module("matcha.wires.gpu")
    try:
        blocks = torch.ones(2, BLOCK, device=device)
        bytes_ = torch.zeros(2, BLOCK, dtype=torch.uint8, device=device)
        ones, checks = blocks[:, 0].contiguous(), bytes_.view(torch.int32)[:, 0].contiguous()
        coded = modulo.Coded(bytes_, bytes_.view(-1), checks, ones)
        gpu.encode(Modulo(bits=8), blocks, ones, coded, lower=True)
    except Exception as error:
        _log.info("coded wires run on torch alone on %s, as Triton fails there: %s", device, error)
        return None
    return gpu


@cache
def _signs() -> Tensor:
    """The rotation's signs and its scale, 1/16."""
    return torch.from_numpy(modulo.signs(BLOCK) / 16).to(torch.float32)


@cache
def _weights() -> Tensor:
    return torch.from_numpy(modulo.check_weights(BLOCK)).to(torch.int16)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the library; it gets tensors as where their memory begins."""
    compiled = library.load()
    assert compiled is not None
    plain = (a.data_ptr() if isinstance(a, Tensor) else a for a in arguments)
    getattr(compiled, f"matcha_{name}")(*plain)


def encode(
    wire: Modulo, values: Tensor, common: Tensor, coded: modulo.Coded, *, lower: bool
) -> None:
    """`modulo.encode`."""
    lengths, finest = torch.empty_like(common), coded.finest
    shift, ratio = 0.0 if lower else wire.shift, wire.clip_range / wire.half
    grid = common, ratio, shift, lower, _signs(), _weights(), wire.bits
    _call("encode", values, len(values), *grid, *coded[:3], lengths)
    modulo.note_lengths(finest, lengths, wire, BLOCK)


def move(
    wire: Modulo, values: Tensor, arrived: modulo.Arrived, *, lower: bool, weight: float
) -> None:
    """`modulo.move`."""
    body, residues, _, common, _ = arrived
    shift, unit = int(wire.shift * (1 << (8 - wire.bits))), 2.0 ** (wire.bits - 8)
    number, raised = len(common), torch.empty_like(residues)
    sums, lengths = torch.empty_like(common, dtype=torch.int32), torch.empty_like(common)
    known = body, residues, number, common, shift, _weights(), wire.bits, lower
    _call("compare", *known, raised, sums, lengths)
    found = sums.to(common.dtype).mul_(unit), lengths.mul_(unit)
    step = modulo.learn(wire, *found, arrived, BLOCK)
    _call("move", raised, number, shift, step, _signs(), weight, values)


class _Wire(ctypes.Structure):
    _fields_ = (
        ("bits", ctypes.c_int),
        *((name, ctypes.c_float) for name in ("ratio", "shift", "widening", "trust", "finest")),
    )


class _End(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("base", "out", "sent", "seen", "finest")),
        ("weight", ctypes.c_float),
    )


def meet(
    known: modulo.Scales,
    base: Tensor,
    out: Tensor,
    partner: Tensor,
    move: Tensor,
    met: Tensor,
    filled: Tensor,
) -> None:
    """One matching of all workers: add their moves to `out`, note what it says of their scales.

    Rows are workers. `partner` and `move` are as in `batched`; `met` is set for workers that had a
    meeting; `filled` says how many values of each block are no padding.
    """
    wire = known.wire
    constants = _Wire(
        bits=wire.bits,
        ratio=wire.clip_range / wire.half,
        shift=wire.shift,
        widening=wire.widening,
        trust=modulo.trusted_share(wire, BLOCK),
        finest=modulo.finest_share(wire, BLOCK),
    )
    weights, partners = move.tolist(), partner.tolist()
    rows = base, out, known.sent, known.seen, known.finest
    for lower in (worker for worker, weight in enumerate(weights) if weight > 0):
        link = lower, partners[lower]
        ends = (_End * 2)(*(_End(*(x[e].data_ptr() for x in rows), weights[e]) for e in link))
        places = _signs(), _weights(), len(filled), filled
        _call("meet", ctypes.byref(constants), *places, ctypes.byref(ends))
        met[list(link)] = True
