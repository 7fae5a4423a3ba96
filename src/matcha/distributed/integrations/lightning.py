"""Lightning: a strategy that trains by Gossip, validates and saves the average."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from shutil import rmtree
from typing import Any

from matcha.distributed.gossip import Gossip
from matcha.distributed.integrations import average
from matcha.errors import PackageError
from matcha.plans import PlanLike

try:
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise PackageError("this needs Lightning: pip install lightning.") from error


class GossipStrategy(DDPStrategy):  # type: ignore[misc]
    """One worker per process, as with DDP, but no all-reduce of gradients: consensus by a plan.

    Validation, and what callbacks save after it, sees the average of all workers' models; after
    `fit` the module holds it, for `test` and `predict`. A checkpoint holds the average; beside it,
    in `NAME.workers`, lie each worker's own model, optimizer and place in the plan, from which
    `fit(ckpt_path=...)` continues.

    Args:
        plan: who talks when, for as many workers as there are processes.
        gossip: further arguments of `Gossip`.
        kwargs: those of Lightning's `DDPStrategy`: `process_group_backend`, `timeout`, ...

    Attributes:
        gossip: the `Gossip`, while fitting.

    Example:
        ```python
        Trainer(devices=4, strategy=GossipStrategy(plan, gossip={"overlap": True}))
        ```
    """

    def __init__(
        self, plan: PlanLike, *, gossip: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.plan = plan
        self.gossip: Gossip | None = None
        self._gossip_options = dict(gossip or {})
        self._average = ExitStack()  # holds the model at the average while it is open
        self._resumes_from: Path | None = None

    # -- training ---------------------------------------------------------------------------------

    def configure_ddp(self) -> None:
        """Leave the model as it is: nothing reduces its gradients."""

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning does, then make the Gossip: optimizers and device are known."""
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._detach()
            scaler = getattr(self.precision_plugin, "scaler", None)
            options = {"scaler": scaler, **self._gossip_options}
            module: Any = self.lightning_module
            self.gossip = Gossip(module, self.optimizers, self.plan, **options)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Gossip makes workers equal when it begins: what is loaded must come later."""
        return True

    def on_train_start(self) -> None:
        """Take up each worker's own state, where the checkpoint has it."""
        super().on_train_start()
        if self._resumes_from is not None and self.gossip is not None:
            self.gossip.load(self._resumes_from)
            self._resumes_from = None

    def on_train_end(self) -> None:
        """Leave the average in the module: `test`, `predict` and exports after `fit` see it."""
        super().on_train_end()
        if self.gossip is not None:
            self.lightning_module.load_state_dict(self.gossip.averaged_state_dict())

    def teardown(self) -> None:
        """Let the optimizers go, while the others are still there."""
        self._detach()
        super().teardown()

    def _detach(self) -> None:
        if self.gossip is not None:
            self._average.close()
            self.gossip.detach()
            self.gossip = None

    # -- the average ------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Validate the average."""
        super().on_validation_start()
        self._average.enter_context(average(self.gossip))

    def on_validation_end(self) -> None:
        """Each worker has its own values again; callbacks have saved what they wanted by now."""
        self._average.close()
        super().on_validation_end()

    # -- checkpoints ------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The average model's, on every worker."""
        if self.gossip is None or self.gossip.state.averaging.is_open:
            state: dict[str, Any] = super().lightning_module_state_dict()
            return state
        return self.gossip.averaged_state_dict()

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        """The average by worker 0, and each worker's own state beside it."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.gossip is not None:
            shown = self.gossip.state.averaging.is_open
            self._average.close()
            self.gossip.save(_workers(filepath), keep=1)
            if shown:
                self._average.enter_context(average(self.gossip))

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load as Lightning does, and note where the workers' own states are."""
        folder = _workers(checkpoint_path)
        self._resumes_from = folder if folder.is_dir() else None
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove the workers' own states too."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero and _workers(filepath).is_dir():
            rmtree(_workers(filepath))


def _workers(path: Any) -> Path:
    return Path(f"{path}.workers")
