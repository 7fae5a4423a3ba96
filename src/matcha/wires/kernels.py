"""Compiled kernels for blocks of 256 float32 on a CPU, one pass each: kernels.c on torch's memory.

They say what `coding` says with torch. Of what travels, only a value half-way between two points of
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

import torch
from torch import Tensor

from matcha.wires import library, modulo
from matcha.wires.shared import check_weights, signs
from matcha.wires.wire import BLOCK, Modulo

_log = logging.getLogger("matcha")


def serve(blocks: Tensor) -> bool:
    """Whether these blocks can be coded by kernels."""
    return blocks.dtype == torch.float32 and for_meetings(blocks) is not None


def for_meetings(blocks: Tensor) -> ModuleType | None:
    """The module whose `meet` serves these workers × blocks, or None: torch does."""
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
        ones, checks = (
            torch.ones(2, device=device),
            torch.zeros(2, dtype=torch.int32, device=device),
        )
        gpu.encode(Modulo(bits=8), blocks, ones, bytes_, bytes_.view(-1), checks, ones, lower=True)
    except Exception as error:
        _log.info("coded wires run on torch alone on %s, as Triton fails there: %s", device, error)
        return None
    return gpu


@cache
def _signs() -> Tensor:
    """The rotation's signs and its scale, 1/16."""
    return torch.from_numpy(signs(BLOCK) / 16).to(torch.float32)


@cache
def _weights() -> Tensor:
    return torch.from_numpy(check_weights(BLOCK)).to(torch.int16)


def encode(
    values: Tensor,
    common: Tensor,
    wire: Modulo,
    residues: Tensor,
    body: Tensor,
    checks: Tensor,
    *,
    lower: bool,
) -> Tensor:
    """Write blocks' residues, their packed bytes and their checks; returns the blocks' lengths."""
    compiled, lengths = library.load(), torch.empty_like(common)
    assert compiled is not None
    compiled.matcha_encode(
        values.data_ptr(),
        len(values),
        common.data_ptr(),
        wire.clip_range / wire.half,
        0.0 if lower else wire.shift,
        lower,
        _signs().data_ptr(),
        _weights().data_ptr(),
        wire.bits,
        residues.data_ptr(),
        body.data_ptr(),
        checks.data_ptr(),
        lengths.data_ptr(),
    )
    return lengths


def compare(
    body: Tensor, residues: Tensor, common: Tensor, wire: Modulo, raised: Tensor, *, lower: bool
) -> tuple[Tensor, Tensor]:
    """Write upper minus lower end into the upper bits of bytes; returns check sums and lengths."""
    compiled = library.load()
    assert compiled is not None
    sums, lengths = torch.empty_like(common, dtype=torch.int32), torch.empty_like(common)
    compiled.matcha_compare(
        body.data_ptr(),
        residues.data_ptr(),
        len(common),
        common.data_ptr(),
        _raised_shift(wire),
        _weights().data_ptr(),
        wire.bits,
        lower,
        raised.data_ptr(),
        sums.data_ptr(),
        lengths.data_ptr(),
    )
    return sums, lengths


def move(values: Tensor, raised: Tensor, steps: Tensor, wire: Modulo, weight: float) -> None:
    """Add the weight times a difference, in units of `steps` (one per block), to the values."""
    compiled = library.load()
    assert compiled is not None
    compiled.matcha_move(
        raised.data_ptr(),
        len(steps),
        _raised_shift(wire),
        steps.data_ptr(),
        _signs().data_ptr(),
        weight,
        values.data_ptr(),
    )


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
    wire: Modulo,
    base: Tensor,
    out: Tensor,
    partner: Tensor,
    move: Tensor,
    sent: Tensor,
    seen: Tensor,
    finest: Tensor,
    met: Tensor,
    filled: Tensor,
) -> None:
    """One matching of all workers; the arguments are `gpu.meet`'s."""
    compiled = library.load()
    assert compiled is not None
    constants = _Wire(
        bits=wire.bits,
        ratio=wire.clip_range / wire.half,
        shift=wire.shift,
        widening=wire.widening,
        trust=modulo.trusted_share(wire, BLOCK),
        finest=modulo.finest_share(wire, BLOCK),
    )
    weights, partners = move.tolist(), partner.tolist()
    rows = base, out, sent, seen, finest
    for lower in (worker for worker, weight in enumerate(weights) if weight > 0):
        link = lower, partners[lower]
        ends = (_End * 2)(*(_End(*(x[e].data_ptr() for x in rows), weights[e]) for e in link))
        places = _signs().data_ptr(), _weights().data_ptr(), sent.shape[1], filled.data_ptr()
        compiled.matcha_meet(ctypes.byref(constants), *places, ctypes.byref(ends))
        met[list(link)] = True


def _raised_shift(wire: Modulo) -> int:
    return int(wire.shift * (1 << (8 - wire.bits)))
