"""What of a Gossip is saved and loaded: its place in the plan, and checkpoints of all workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from matcha.distributed.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from matcha.distributed.elastic.replanning import Replanning
from matcha.distributed.exchange.background import Asynchrony, Overlap
from matcha.distributed.exchange.clipping import Clipping
from matcha.distributed.exchange.exchange import Exchange
from matcha.distributed.exchange.plan_cursor import PlanCursor
from matcha.distributed.exchange.push_sum import PushSumValues
from matcha.distributed.launch.placement import Placement
from matcha.distributed.momentum import MomentumRules
from matcha.distributed.optimizer_hooks import OptimizerHooks
from matcha.distributed.options import Setup, check_setup
from matcha.distributed.transports.base import Transport
from matcha.errors import InputError

__all__ = ["Savable"]


class Savable(ABC):
    """The calls of a `Gossip` that save and load; it has all the state."""

    modules: nn.Module
    setup: Setup
    optimizers: tuple[torch.optim.Optimizer, ...]
    transport: Transport
    placement: Placement
    exchange: Exchange
    following: MomentumRules
    clipping: Clipping | None
    push_sum: PushSumValues | None
    replanning: Replanning
    rank: int
    deadline: float
    layout: str
    _cursor: PlanCursor
    _hooks: OptimizerHooks
    _asynchrony: Asynchrony | None
    _overlap: Overlap | None

    @property
    def iteration(self) -> int:
        """Of the round that comes next: how many steps this worker has taken."""
        return self._cursor.iteration

    def seek(self, iteration: int) -> None:
        """Go on at another iteration of the plan, as every worker must."""
        self._cursor.seek(iteration)

    @abstractmethod
    def settle(self) -> None:
        """Let the exchange under way end."""

    @abstractmethod
    def forget(self) -> None:
        """Drop the exchange under way."""

    def state_dict(self) -> dict[str, Any]:
        """Where in which plan this worker is, in plain values; for scripts that save by themselves.

        Save it beside the model's and optimizer's own state, and give it to `load_state_dict`.
        """
        return {
            "iteration": self.iteration,
            "num_workers": self.transport.num_workers,
            "plan_digest": self.replanning.given.digest,
            "layout_digest": self.layout,
            "replanning": self.replanning.state(),
            "stepped": self._hooks.stepped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; model and optimizer are the script's to load.

        Raises:
            InputError: it was taken under another plan, model or number of workers.
        """
        for key, value in self.state_dict().items():
            if key not in ("iteration", "replanning", "stepped") and state[key] != value:
                raise InputError(f"the saved state is of another {key}: {state[key]}, not {value}.")
        check_setup(replace(self.setup, call="load_state_dict"))
        self.forget()
        self.follow(state)
        self.seek(int(state["iteration"]))

    def follow(self, state: Mapping[str, Any]) -> None:
        """Go on by the stages that a saved state's plan had."""
        self.replanning.load(state.get("replanning", {"asked_at": 0, "stages": None}))
        self._cursor.follow(self.replanning.plan)
        self._hooks.stepped = state.get("stepped", [])
        self.following.forget_steps()

    def save(
        self,
        directory: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        generators: Mapping[str, torch.Generator] | None = None,
        keep: int = 2,
    ) -> Path:
        """Write a checkpoint of all workers; see `saving.checkpoint`. Collective."""
        self.following.check_saving()
        directory = self.placement.folder(directory)
        return save_checkpoint(self, directory, extra=extra, generators=generators, keep=keep)

    def load(
        self,
        directory: str | Path,
        *,
        iteration: int | None = None,
        average: bool = False,
        generators: Mapping[str, torch.Generator] | None = None,
    ) -> dict[str, Any]:
        """Continue from a checkpoint; see `saving.checkpoint`. Collective."""
        directory = self.placement.folder(directory)
        return load_checkpoint(
            self, directory, iteration=iteration, average=average, generators=generators
        )
