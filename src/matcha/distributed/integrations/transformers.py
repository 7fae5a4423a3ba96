"""Transformers: a `Trainer` that trains by Gossip and evaluates and saves the average."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matcha.distributed.gossip import Gossip
from matcha.distributed.integrations import average, without_ddp
from matcha.errors import PackageError
from matcha.plans import PlanLike

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise PackageError("this needs Transformers: pip install transformers accelerate.") from error

_log = logging.getLogger("matcha")
_WORKERS = "workers"
"""In a checkpoint's folder: every worker's own state."""


class GossipTrainerMixin:
    """Put it before `Trainer` (or a subclass of it) and give it a plan.

    The model is not wrapped in DistributedDataParallel. `evaluate`, `predict` and `save_model`, and
    so the checkpoints and `load_best_model_at_end`, see the average of all workers' models; these
    calls are collective. A checkpoint also holds each worker's own model, optimizer and place in
    the plan, in its folder `workers`, from which `train(resume_from_checkpoint=...)` continues.

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
        self._resumes_from: Path | None = None
        super().__init__(*args, **kwargs)
        self.add_callback(_Begin(self))  # type: ignore[attr-defined]

    def create_accelerator_and_postprocess(self) -> None:
        """Make an accelerator that wraps no model."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        without_ddp(self.accelerator)  # type: ignore[attr-defined]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the average model."""
        with average(self.gossip):
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict by the average model."""
        with average(self.gossip):
            return super().predict(*args, **kwargs)  # type: ignore[misc]

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the average model."""
        with average(self.gossip):
            super().save_model(*args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(model, trial, *args, **kwargs)  # type: ignore[misc]
        settings: Any = self.args  # type: ignore[attr-defined]
        if self.gossip is not None and not settings.save_only_model:
            step = self.state.global_step  # type: ignore[attr-defined]
            run = Path(self._get_output_dir(trial=trial))  # type: ignore[attr-defined]
            self.gossip.save(run / f"checkpoint-{step}" / _WORKERS, keep=1)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # The optimizer in the checkpoint is rank 0's; each worker's own follows in `begin`.
        self._resumes_from = None if checkpoint is None else Path(checkpoint) / _WORKERS
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def begin(self, model: Any, optimizer: Any) -> None:
        """Construct the Gossip, and continue from each worker's own state when resuming."""
        if self.gossip is not None:
            self.gossip.detach()
        scaler = getattr(self.accelerator, "scaler", None)  # type: ignore[attr-defined]
        options = {"scaler": scaler, **self._gossip_options}
        self.gossip = Gossip(model, optimizer, self.plan, **options)
        folder, self._resumes_from = self._resumes_from, None
        if folder is not None and folder.is_dir():
            self.gossip.load(folder)
        elif folder is not None:
            _log.warning(
                "%s has no workers' states: every worker starts from the checkpoint's model and "
                "optimizer, at round 0.", folder.parent
            )  # fmt: skip


class _Begin(TrainerCallback):  # type: ignore[misc]
    def __init__(self, trainer: GossipTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.begin(kwargs["model"], kwargs["optimizer"])
