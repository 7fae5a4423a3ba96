"""Rounds applied to all workers' rows: in pairs on the host, as products or meetings on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from matcha.rounds import Round
from matcha.simulation.execution import Graphs
from matcha.topology import Link
from matcha.training.clipping import kept_share, renewed_reach
from matcha.wires import Float, TopK, Wire
from matcha.wires.batched import Meetings, meetings_of
from matcha.wires.topk import TopKRows, spread
from matcha.wires.wire import Segment

Parts = dict[str, Callable[[], None]]


def mix_rows(parameters: Tensor, round: Round) -> None:
    """Apply a round in place on the host: :meth:`Round.mix` itself, on the tensor's own memory.

    Only rows that exchange are touched, and the bits are the definition's by construction.

    >>> x = torch.tensor([[0.0], [2.0], [5.0]])
    >>> mix_rows(x, Round(matchings=(((0, 1),),), indices=(0,), mixing="pairwise", weight=0.5))
    >>> x.flatten().tolist()
    [1.0, 1.0, 5.0]
    """
    if not round:
        return
    rows, active = parameters.numpy(), _active(round)
    with np.errstate(over="ignore", invalid="ignore"):  # the loss tells of divergence
        if len(active) == len(rows):
            rows[:] = round.mix(rows)
        else:
            rows[active] = round.renumber(active).mix(rows[active])


def _active(round: Round) -> list[int]:
    """The workers that take part in a round."""
    return sorted({worker for link in round.links for worker in link})


def matrices(
    rounds: Sequence[Round], num_workers: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """W(k) of several rounds, stacked; each distinct round is worked out once."""
    known = {round: round.matrix(num_workers) for round in set(rounds)}
    return np.stack([known[round] for round in rounds])


def mix_product(parameters: Tensor, matrix: Tensor, scratch: Tensor) -> None:
    """Apply W(k) in place as one small product; ``scratch`` is as large as the parameters."""
    torch.mm(matrix, parameters, out=scratch)
    parameters.copy_(scratch)


class Mixing:
    """Applies an epoch's rounds to the workers' rows; what differs is how, and what is remembered.

    The rows are the parameters, and what travels with them; those of some kinds, which send nothing
    else, the parameters alone.
    """

    mixes_always = False
    """Whether iterations without a round are mixed too."""

    def __init__(self, rows: Sequence[Tensor], graphs: Graphs | None = None) -> None:
        self.rows, self.graphs = rows, graphs
        self.rounds: Sequence[Round] = ()
        self.state: dict[str, Tensor] = {}
        """What workers remember, a row per worker."""
        self.link_state: dict[str, Tensor] = {}
        """What links remember."""

    def reset(self) -> None:
        """Start again from what the rows hold now."""

    def forget(self, links: Collection[Link]) -> None:
        """Drop what some links remember: their connections are new."""

    def fill(self, rounds: Sequence[Round]) -> None:
        """Take an epoch's rounds."""
        self.rounds = rounds

    def parts(self) -> Parts:
        """What a GPU captures; nothing where the host has a say."""
        return {}

    def mix(self, index: int) -> None:
        """Mix by the round of iteration ``index`` of the epoch; all parts, unless overridden."""
        for name, part in self.parts().items():
            self._run(name, part)

    def _run(self, name: str, part: Callable[[], None]) -> None:
        assert self.graphs is not None
        self.graphs.run(name, part)


class WholeMixing(Mixing):
    """Whole values: rows in pairs on the host, one small product on a GPU.

    `position` is the current iteration of `steps` per epoch, on the device.
    """

    def __init__(self, rows: Sequence[Tensor], steps: int, position: Tensor, graphs: Graphs):
        super().__init__(rows, graphs)
        self.position, self.on_cuda = position, rows[0].is_cuda
        if self.on_cuda:
            m = len(rows[0])
            self.mixers = torch.eye(m, dtype=rows[0].dtype, device=rows[0].device)
            self.mixers = self.mixers.repeat(steps, 1, 1)
            self._scratch = torch.empty_like(rows[0])

    def fill(self, rounds: Sequence[Round]) -> None:
        self.rounds = rounds
        if self.on_cuda:
            self.mixers.copy_(torch.from_numpy(matrices(rounds, len(self.rows[0]))))

    def parts(self) -> Parts:
        return {"mix": self._product}

    def mix(self, index: int) -> None:
        if self.on_cuda:
            super().mix(index)
        else:
            for rows in self.rows:
                mix_rows(rows, self.rounds[index])

    def _product(self) -> None:
        matrix = self.mixers.index_select(0, self.position)[0]
        for rows in self.rows:
            mix_product(rows, matrix, self._scratch)


class WireMixing(Mixing):
    """Rounds over a wire, which may remember something of each link, a matching after another."""

    def __init__(
        self,
        wire: Wire,
        segments: Sequence[Segment],
        rows: Sequence[Tensor],
        links: Sequence[Link],
        graphs: Graphs,
    ) -> None:
        super().__init__(rows, graphs)
        self._number = {frozenset(link): number for number, link in enumerate(links)}
        self.meetings: list[Meetings] = [meetings_of(wire, segments, x, links) for x in rows]
        for k, meetings in enumerate(self.meetings):
            self.state |= {f"{k}.{name}": tensor for name, tensor in meetings.state.items()}
            self.link_state |= {f"{k}.{name}": t for name, t in meetings.link_state.items()}
        # Row 0 holds each worker's partner in the current matching, row 1 its signed weight.
        self._now = torch.zeros(2, len(rows[0]), dtype=rows[0].dtype, device=rows[0].device)
        self._now[0] = torch.arange(len(rows[0]))
        self._base: list[Tensor] = []
        self._table = self._now[None]
        self._begins: list[int] = []  # where each round's matchings stand in the table
        self._mixing = "pairwise"

    def reset(self) -> None:
        for meetings, x in zip(self.meetings, self.rows, strict=True):
            meetings.reset(x)

    def forget(self, links: Collection[Link]) -> None:
        numbers = [self._number[frozenset(link)] for link in links]
        for meetings in self.meetings if numbers else ():
            meetings.forget(numbers)

    def fill(self, rounds: Sequence[Round]) -> None:
        now = self._now
        self._begins = [*accumulate((len(round.matchings) for round in rounds), initial=0)]
        if not self._begins[-1]:
            return
        table = np.zeros((self._begins[-1], *now.shape))
        table[:, 0] = np.arange(now.shape[1])
        rows = iter(table)
        for round in rounds:
            for position, matching in enumerate(round.matchings):
                partner, move = next(rows)
                i, j = np.array(matching).T
                w = np.array(round.shares(position))
                partner[i], partner[j], move[i], move[j] = j, i, w, -w
        self._table = torch.from_numpy(table).to(now.device, now.dtype)
        self._mixing = next(round.mixing for round in rounds if round)
        if self._mixing == "laplacian" and not self._base:
            self._base = [torch.empty_like(x) for x in self.rows]

    def parts(self) -> Parts:
        kind = self._mixing
        return {f"open {kind}": self._open, f"meet {kind}": self._meet, "close": self._close}

    def mix(self, index: int) -> None:
        self._run(f"open {self._mixing}", self._open)
        for number in range(*self._begins[index : index + 2]):
            self._now.copy_(self._table[number])
            self._run(f"meet {self._mixing}", self._meet)
        self._run("close", self._close)

    def _open(self) -> None:
        if self._mixing == "laplacian":
            for base, x in zip(self._base, self.rows, strict=True):
                base.copy_(x)
        for meetings in self.meetings:
            meetings.begin()

    def _meet(self) -> None:
        partner, move = self._now[0].to(torch.long), self._now[1]
        bases = self._base if self._mixing == "laplacian" else self.rows
        for meetings, base, x in zip(self.meetings, bases, self.rows, strict=True):
            meetings.meet(base, x, partner, move)

    def _close(self) -> None:
        for meetings in self.meetings:
            meetings.end()


class TopKMixing(Mixing):
    """Exact averages of the largest movements, with error feedback (`matcha.wires.topk`)."""

    def __init__(
        self, wire: TopK, segments: Sequence[Segment], rows: Sequence[Tensor], graphs: Graphs
    ) -> None:
        super().__init__(rows, graphs)
        (self._x,) = rows
        self._feedback = TopKRows(wire, segments, self._x)
        self.state = {"anchor": self._feedback.anchor, "error": self._feedback.error}

    def reset(self) -> None:
        self._feedback.reset(self._x)

    def parts(self) -> Parts:
        return {"average": self._average}

    def _average(self) -> None:
        sent = self._feedback.send(self._x)
        for part, chosen in zip(self._feedback.parts(self._x), sent, strict=True):
            part.add_(spread(chosen, part.shape[1], part.dtype).mean(0))
        self._feedback.settle(self._x)


class PushMixing(Mixing):
    """Push-sum (`matcha.rounds.PushSum`): rows are z = x/ω; x and ω are kept and mixed beside.

    After a step of the optimizer x takes the step that z took, also where no round follows.
    """

    mixes_always = True

    def __init__(self, rows: Sequence[Tensor]) -> None:
        super().__init__(rows)
        self.x = [row.clone() for row in rows]
        self.omega = torch.ones(len(rows[0]), 1, dtype=torch.float64, device=rows[0].device)
        self.state = {"omega": self.omega, **{f"x{k}": x for k, x in enumerate(self.x)}}

    def reset(self) -> None:
        self.omega.fill_(1.0)
        for x, row in zip(self.x, self.rows, strict=True):
            x.copy_(row)

    def mix(self, index: int) -> None:
        round, omega = self.rounds[index], self.omega
        before = omega.clone()
        if round:
            omega.copy_(self._mixed(round, omega))
        for x, z in zip(self.x, self.rows, strict=True):
            x.add_(z - x / before.to(x.dtype))
            if round:
                x.copy_(self._mixed(round, x))
            z.copy_(x / omega.to(x.dtype))

    def _mixed(self, round: Round, values: Tensor) -> Tensor:
        if not values.is_cuda:
            return torch.from_numpy(round.mix(values.numpy()))
        matrix = torch.from_numpy(round.matrix(len(values)))
        return matrix.to(values.device, values.dtype) @ values


class RelayMixing(Mixing):
    """Relayed sums (`matcha.rounds.Relay`) over the links of a tree, for all as products."""

    def __init__(self, rows: Sequence[Tensor], links: Sequence[Link], graphs: Graphs) -> None:
        super().__init__(rows, graphs)
        (self._x,) = rows
        m, arrows = len(self._x), [a for i, j in links for a in ((i, j), (j, i))]
        self._sums = self._x.new_zeros(len(arrows), self._x.shape[1])
        self._counts = self._x.new_zeros(len(arrows), 1)
        self._sends = self._x.new_tensor([[i == k for k in range(m)] for i, _ in arrows])
        self._arrives = self._x.new_tensor([[j == k for _, j in arrows] for k in range(m)])
        relays = [[to == i and k != j for k, to in arrows] for i, j in arrows]
        self._relays = self._x.new_tensor(relays)
        self.link_state = {"sums": self._sums, "counts": self._counts}

    def reset(self) -> None:
        self._sums.zero_()
        self._counts.zero_()

    def parts(self) -> Parts:
        return {"relay": self._relay}

    def _relay(self) -> None:
        x, m = self._x, len(self._x)
        self._sums.copy_(self._sends @ x + self._relays @ self._sums)
        self._counts.copy_(1 + self._relays @ self._counts)
        x.mul_(m - self._arrives @ self._counts).add_(self._arrives @ self._sums).div_(m)


class ClippedMixing(Mixing):
    """Whole values in meetings that are clipped; `matcha.training.clipping` defines it.

    `allowance` is how many times its reach a worker's difference to a partner may be.
    """

    def __init__(self, rows: Sequence[Tensor], allowance: float) -> None:
        super().__init__(rows)
        (self._x,), self._allowance = rows, allowance
        self._after = self._x.clone()
        self._reach = torch.zeros(len(self._x), dtype=torch.float64, device=self._x.device)
        self.state = {"after": self._after, "reach": self._reach}

    def reset(self) -> None:
        self._after.copy_(self._x)
        self._reach.zero_()

    def mix(self, index: int) -> None:
        round, x = self.rounds[index], self._x
        met = _active(round)
        moved = (x[met] - self._after[met]).double().square().sum(1).tolist()
        before = self._reach[met].tolist()
        renewed = [renewed_reach(r, way) for r, way in zip(before, moved, strict=True)]
        self._reach[met] = torch.tensor(renewed, dtype=torch.float64, device=x.device)
        base = x.clone() if round.mixing == "laplacian" else x
        for position in range(len(round.matchings)):
            self._meet(round, position, base)
        self._after[met] = x[met]

    def _meet(self, round: Round, position: int, base: Tensor) -> None:
        x = self._x
        i, j = torch.tensor(round.matchings[position], device=x.device).T
        weights = torch.tensor(round.shares(position), dtype=x.dtype, device=x.device)
        move = weights[:, None] * (base[j] - base[i])
        lengths = move.double().square().sum(1).sqrt().tolist()
        reach = torch.minimum(self._reach[i], self._reach[j]).sqrt()
        limits = (weights.double() * self._allowance * reach).tolist()
        shares = [kept_share(a, b) for a, b in zip(lengths, limits, strict=True)]
        kept = torch.tensor(shares, dtype=x.dtype, device=x.device)[:, None]
        move = torch.where(kept > 0, kept * move, 0.0)  # moves that are not finite are dropped
        x[i] += move
        x[j] -= move


def is_whole(wire: Wire) -> bool:
    """Whether messages hold the values as they are."""
    return isinstance(wire, Float) and wire.name == "float32"
