"""What a momentum is called and which values it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from matcha.errors import InputError, unknown_name

Kind: TypeAlias = Literal[
    "local",
    "quasi-global",
    "outer",
    "tracking",
    "momentum-tracking",
    "exact-diffusion",
    "shared",
]
MOMENTA = (*get_args(Kind), "auto")


@dataclass(frozen=True, kw_only=True, slots=True)
class Momentum:
    """How momentum and meetings go together."""

    kind: Kind = "local"
    memory: float = 0.9
    """Quasi-global: what the buffer keeps of itself an iteration (μ). Tracking: what the mean of a
    worker's own gradients does; 0: as published, which rare meetings do not survive."""
    follow: float | None = None
    """Quasi-global: the share of a meeting's displacement that the buffer follows; None: as much
    as the plan's meetings can hold."""
    pause: float = 1.0
    """Quasi-global: iterations between a worker's meetings."""
    warmup: float = 30.0
    """Quasi-global: at iteration k the buffer keeps at most k/(k + warmup) of itself, and begins as
    local momentum does; 0: μ from the start, as published, which short trainings regret."""
    outer_rate: float = 0.7
    outer_momentum: float = 0.5
    nesterov: bool = False
    """Outer: step along Δ + βv and not along v, as DiLoCo does."""
    rate_first: bool = False
    """Outer: exchange φ + α(x − φ), as GASLoC does, and not x."""
    correction: float | None = None
    """Exact diffusion: the share of what rounds moved a worker by that each iteration anticipates;
    None: what the plan's rounds hold. 1 is D² as published."""

    def __post_init__(self) -> None:
        if self.kind not in MOMENTA[:-1]:
            raise unknown_name("momentum", str(self.kind), MOMENTA)
        for name in ("memory", "outer_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} must be in [0, 1), not {getattr(self, name)}")
        for name in ("follow", "correction"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise InputError(f"{name} must be between 0 and 1, not {value}")
        if not self.warmup >= 0:
            raise InputError(f"warmup must be 0 or more iterations, not {self.warmup}")

    @property
    def messages(self) -> int:
        """Vectors that a meeting exchanges: some kinds send a second one."""
        return 2 if self.kind in ("tracking", "momentum-tracking", "shared") else 1

    @property
    def steps_first(self) -> bool:
        """Whether it changes what a step did before the round, so that overlap excludes it."""
        kinds = ("momentum-tracking", "exact-diffusion", "shared")
        return self.kind in kinds or (self.kind == "outer" and self.rate_first)


def parse_momentum(name: str | Momentum) -> Momentum | None:
    """A momentum by name, perhaps with values: `outer:outer_rate=0.9`; None for `auto`.

    >>> parse_momentum("quasi-global:follow=0.5").follow
    0.5

    Raises:
        InputError: No momentum has this name, or a value makes no sense.
    """
    if isinstance(name, Momentum):
        return name
    kind, _, rest = name.partition(":")
    if kind not in MOMENTA:
        raise unknown_name("momentum", name, MOMENTA)
    try:
        pairs = (part.split("=") for part in rest.split(",") if part)
        flags = ("nesterov", "rate_first")
        values = {k: bool(int(v)) if k in flags else float(v) for k, v in pairs}
        return None if kind == "auto" else Momentum(kind=kind, **values)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"momentum {name!r} is not a kind with values as name=number") from None
