"""Wires: what a message holds. Values that a plan carries; the kernels stand beside them."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

from matcha.errors import InputError, unknown_name
from matcha.timing import LinkSeconds, RandomLinks, Scaled, Timing, Wired
from matcha.topology import Topology

BLOCK = 256
"""Values that share one scale and one check."""
CHUNK = 4096
"""Values among which a top-k wire chooses."""
FACTOR_BLOCK = 64
"""The same for the factors of a low-rank message, which are short."""
Shape: TypeAlias = Sequence[int]
_OVERHEAD = 6  # bytes per block: its scale in bfloat16 and its check modulo 2**32


class _Messages(ABC):
    """What there is to know of a wire's messages."""

    __slots__ = ()
    _typical: ClassVar[tuple[Shape, ...]] = ((BLOCK,),)
    """Parameters to speak of where there is no model yet."""

    @property
    def residual(self) -> float:
        """The share of a squared difference that a pairwise meeting leaves, as measured."""
        return 0.0

    @property
    def num_phases(self) -> int:
        """Messages one after another in a meeting."""
        return 1

    @abstractmethod
    def message_bytes(self, shapes: Iterable[Shape]) -> int:
        """What one worker sends in a meeting for parameters of these shapes."""

    def size_ratio(self, shapes: Iterable[Shape] | None = None) -> float:
        """Bytes of a message over those of a whole float32 model."""
        known = self._typical if shapes is None else tuple(shapes)
        return self.message_bytes(known) / Float().message_bytes(known)


@dataclass(frozen=True, kw_only=True, slots=True)
class Float(_Messages):
    """Whole values as floating-point numbers; bfloat16 keeps 8 of float32's 24 digits.

    >>> Float(name="bfloat16").size_ratio()
    0.5
    """

    name: Literal["float32", "bfloat16"] = "float32"

    def message_bytes(self, shapes: Iterable[Shape]) -> int:
        return sum(math.prod(shape) for shape in shapes) * (4 if self.name == "float32" else 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Modulo(_Messages):
    """Values on a grid as fine as the two workers' difference allows, modulo 2^bits.

    Noise is in proportion to what two workers differ by, not to the size of their values, and no
    worker remembers another. docs/wires.md derives it.

    >>> Modulo(bits=3).name, round(1 / Modulo(bits=3).size_ratio(), 1)
    ('modulo:3', 10.0)
    """

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in _RESIDUAL:
            raise InputError(
                f"a modulo wire has {', '.join(map(str, _RESIDUAL))} bits, not {self.bits!r}"
            )

    @property
    def name(self) -> str:
        return f"modulo:{self.bits}"

    @property
    def half(self) -> int:
        """Half the modulus: differences of fewer grid steps than this come through."""
        return 1 << (self.bits - 1)

    @property
    def clip_range(self) -> float:
        """How many times its scale a difference may be; beyond, it wraps."""
        return _CLIP_RANGE[self.bits]

    @property
    def widening(self) -> float:
        """How much wider a block's scale becomes after a failed check; spare bits make it cheap."""
        return _WIDENING[self.bits]

    @property
    def failure_trust(self) -> float:
        """How much of a scale that failed checks tell is believed: with four levels, none.

        A window that is too wide costs more there than one that is too narrow.
        """
        return 0.0 if self.bits == 2 else 1.0

    @property
    def shift(self) -> float:
        """What the upper end's grid is shifted by: with four levels, half a step centres them."""
        return 0.5 if self.bits == 2 else 0.0

    @property
    def residual(self) -> float:
        """The share of a squared difference that meetings in a network leave, as measured."""
        return _RESIDUAL[self.bits]

    def block_bytes(self, block: int = BLOCK) -> int:
        """Bytes of one block on the wire, its scale and check included."""
        return block * self.bits // 8 + _OVERHEAD

    def message_bytes(self, shapes: Iterable[Shape]) -> int:
        return sum(-(-math.prod(shape) // BLOCK) for shape in shapes) * self.block_bytes()


# A wider reach makes the grid coarser, a narrower one wraps more. What is left was measured among
# workers that drift by noise and meet in turn (benchmarks/wires.py): a scale is a worker's largest
# recent difference, so its other meetings leave more than those of two workers alone.
_CLIP_RANGE = {8: 12.0, 4: 5.0, 3: 4.5, 2: 3.5}
_WIDENING = {8: 4.0, 4: 2.0, 3: 1.5, 2: 1.5}
_RESIDUAL = {8: 0.007, 4: 0.22, 3: 0.5, 2: 0.83}


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRank(_Messages):
    """The strongest directions of each weight matrix's difference, found by power iteration.

    Factors, vectors and matrices too small to gain travel as `modulo:8`.

    >>> LowRank(rank=4).name, LowRank(rank=4).is_factored((10, 3))
    ('lowrank:4', False)
    """

    _typical = ((256, 1152), (256,), (256,))  # a layer in the middle of a network
    rank: int

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 64:
            raise InputError(f"a low-rank wire has a rank from 1 to 64, not {self.rank!r}")

    @property
    def name(self) -> str:
        return f"lowrank:{self.rank}"

    @property
    def factors(self) -> Modulo:
        """How factors, vectors and small matrices travel."""
        return Modulo(bits=8)

    @property
    def residual(self) -> float:
        return 0.97 - 0.07 * math.sqrt(min(self.rank, 8))

    @property
    def num_phases(self) -> int:
        return 2  # one per factor

    def is_factored(self, shape: Shape) -> bool:
        """Whether a parameter of this shape gains by being sent as two factors."""
        rows, columns = matrix_shape(shape)
        blocks = -(-rows * self.rank // FACTOR_BLOCK) - (-columns * self.rank // FACTOR_BLOCK)
        return len(shape) > 1 and 2 * blocks * FACTOR_BLOCK < rows * columns

    def message_bytes(self, shapes: Iterable[Shape]) -> int:
        blocks = 0
        for shape in shapes:
            rows, columns = matrix_shape(shape)
            factored = self.is_factored(shape)
            parts = (rows * self.rank, columns * self.rank) if factored else (rows * columns,)
            blocks += sum(-(-part // FACTOR_BLOCK) for part in parts)
        return blocks * self.factors.block_bytes(FACTOR_BLOCK)


@dataclass(frozen=True, kw_only=True, slots=True)
class TopK(_Messages):
    """The largest values of each 4,096, in two bits and with error feedback, for exact averages.

    Each worker sends what it moved by since the last average, Q(top-k(e)), to all others; what it
    did not send stays in e, of which `memory` is left an average later (SparseLoCo).

    >>> TopK(kept=64).name, round(1 / TopK(kept=64).size_ratio(), 1)
    ('topk:64', 141.2)
    >>> parse_wire("topk:40@1")
    TopK(kept=40, memory=1.0)
    """

    _typical = ((CHUNK,),)
    kept: int
    memory: float = 0.95
    """β: what is left of the error at the next average; the name has it after an @ if another."""

    def __post_init__(self) -> None:
        if not (8 <= self.kept <= CHUNK // 8 and self.kept % 8 == 0):
            raise InputError(
                f"a top-k wire keeps a multiple of 8, from 8 to {CHUNK // 8}, of each {CHUNK} "
                f"values, not {self.kept!r}"
            )
        if not 0 <= self.memory <= 1:
            raise InputError(f"the memory of a top-k wire is from 0 to 1, not {self.memory!r}")

    @property
    def name(self) -> str:
        return f"topk:{self.kept}" + ("" if self.memory == 0.95 else f"@{self.memory:.12g}")

    def kept_of(self, size: int) -> int:
        """How many values of a chunk are sent, for a parameter of a size."""
        return min(self.kept, -(-size // 8) * 8)

    def message_bytes(self, shapes: Iterable[Shape]) -> int:
        """What one worker tells each other one: places in 12 bits, values in two, two levels."""
        sizes = [math.prod(shape) for shape in shapes]
        return sum(-(-n // CHUNK) * (self.kept_of(n) * 14 // 8 + 4) for n in sizes)


Wire: TypeAlias = Float | Modulo | LowRank | TopK


def needs_meetings(wire: Wire) -> bool:
    """Whether a wire's messages are about the difference of two workers."""
    return not isinstance(wire, TopK) and wire != Float()


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """A parameter as a matrix: its first axis, and all others together.

    >>> matrix_shape((64, 16, 3, 3)), matrix_shape((10,))
    ((64, 144), (1, 10))
    """
    return (int(shape[0]), math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


WIRES = (
    *("float32", "bfloat16", "modulo:8", "modulo:4", "modulo:3", "modulo:2"),
    *("topk:64", "lowrank:4"),
)
"""Wires to choose from; a low-rank one may have any rank, a top-k one any number."""
_TOP_K = re.compile(r"topk:(\d+)(?:@(\d+(?:\.\d+)?))?", re.ASCII)


def parse_wire(name: str | Wire) -> Wire:
    """The wire of a name, or the wire itself.

    >>> parse_wire("modulo:3")
    Modulo(bits=3)

    Raises:
        InputError: No wire has this name.
    """
    if isinstance(name, Wire):
        return name
    if not isinstance(name, str):
        raise InputError(
            f"the wire is {name!r}, but it is one of {', '.join(WIRES)}; leave it out for float32."
        )
    kind, _, number = name.partition(":")
    if name == "float32":
        return Float()
    if name == "bfloat16":
        return Float(name="bfloat16")
    top = _TOP_K.fullmatch(name)
    if top:
        return TopK(kept=int(top[1]), memory=float(top[2] or 0.95))
    if kind not in ("modulo", "lowrank") or not number.isdecimal():
        raise unknown_name("wire", name, WIRES)
    return Modulo(bits=int(number)) if kind == "modulo" else LowRank(rank=int(number))


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A parameter's place in a flat row; places start at multiples of `BLOCK`."""

    offset: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)


# -- what a wire saves on a network ---------------------------------------------------------------


def timing_over(timing: Timing, wire: Wire) -> Timing:
    """A delay model of whole float32 models as it is with a wire's messages."""
    ratio = wire.size_ratio()
    if ratio == 1:
        return timing
    if isinstance(wire, TopK):
        if isinstance(timing, LinkSeconds):
            timing, ratio = replace(timing, size_ratio=ratio), 1.0
        return Wired(base=timing, size_ratio=ratio, is_gathered=True)
    if isinstance(timing, LinkSeconds):
        return replace(timing, size_ratio=ratio, num_phases=wire.num_phases)
    if isinstance(timing, Scaled):
        return Scaled(lambda n: ratio * timing.t(n), timing.num_matchings)
    if isinstance(timing, RandomLinks):
        rows = tuple(tuple(ratio * v for v in row) for row in timing.samples)
        return replace(timing, samples=rows)
    return Wired(base=timing, size_ratio=ratio)


def budget_over(topology: Topology, timing: Timing, wire: Wire, budget: float) -> float:
    """The share of vanilla's rounds that a budget of vanilla's time buys over a wire.

    >>> from matcha.timing import Units
    >>> ring = Topology.from_links([(0, 1), (1, 2), (2, 0)])
    >>> budget_over(ring, Units(), Float(name="bfloat16"), 0.2)
    0.4
    """
    wired = timing_over(timing, wire)
    if wired is timing:
        return budget
    whole = sum(timing.matching_time((link,)) for link in topology.links)
    small = sum(wired.matching_time((link,)) for link in topology.links)
    # To ten digits, so that a tenth of the bytes is ten times the rounds and not almost.
    return min(1.0, float(f"{budget * whole / small:.10g}"))
