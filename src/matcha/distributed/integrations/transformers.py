"""Transformers: a `Trainer` that trains by Gossip and evaluates and saves the average."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from matcha.distributed.gossip import Gossip
from matcha.distributed.integrations.accelerate import without_ddp
from matcha.errors import PackageError
from matcha.plans import PlanLike

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise PackageError("this needs Transformers: pip install transformers accelerate.") from error

__all__ = ["GossipTrainerMixin"]


class GossipTrainerMixin:
    """Put it before `Trainer` (or a trainer made of it) and give it a plan.

    The model is not wrapped in DistributedDataParallel. `evaluate` and `save_model`, and so the
    checkpoints and `load_best_model_at_end`, see the average of all workers' models; these calls
    are collective, as they are under `torchrun` in any case.

    Args:
        args: the trainer's.
        plan: who talks when.
        gossip: further arguments of `Gossip`.
        kwargs: the trainer's.

    Attributes:
        gossip: the `Gossip`, once training has begun.

    Example:
        ```python
        class MyTrainer(GossipTrainerMixin, Trainer): ...

        MyTrainer(model=model, args=args, train_dataset=data, plan=plan).train()
        ```
    """

    def __init__(
        self, *args: Any, plan: PlanLike, gossip: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self.plan = plan
        self.gossip: Gossip | None = None
        self._gossip_options = dict(gossip or {})
        self._shows_average = False
        super().__init__(*args, **kwargs)
        self.add_callback(_Begin(self))  # type: ignore[attr-defined]

    def create_accelerator_and_postprocess(self) -> None:
        """As the trainer, with an accelerator that wraps no model."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        without_ddp(self.accelerator)  # type: ignore[attr-defined]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer, of the average model."""
        with self._average():
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer, by the average model."""
        with self._average():
            return super().predict(*args, **kwargs)  # type: ignore[misc]

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As the trainer, of the average model."""
        with self._average():
            super().save_model(*args, **kwargs)  # type: ignore[misc]

    def begin(self, model: Any, optimizer: Any) -> None:
        """Construct the Gossip; the trainer's optimizer is final now."""
        if self.gossip is not None:
            self.gossip.detach()
        self.gossip = Gossip(model, optimizer, self.plan, **self._gossip_options)

    @contextmanager
    def _average(self) -> Iterator[None]:
        if self.gossip is None or self._shows_average:
            yield
            return
        self._shows_average = True
        try:
            with self.gossip.averaged():
                yield
        finally:
            self._shows_average = False


class _Begin(TrainerCallback):  # type: ignore[misc]
    def __init__(self, trainer: GossipTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.begin(kwargs["model"], kwargs["optimizer"])
