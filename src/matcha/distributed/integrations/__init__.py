"""Gossip inside frameworks that own the training loop; none of them is a dependency.

```python
from matcha.distributed.integrations import without_ddp  # for Accelerate
from matcha.distributed.integrations.lightning import GossipStrategy
from matcha.distributed.integrations.transformers import GossipTrainerMixin
```
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar

from matcha.distributed.gossip import Gossip

_Accelerator = TypeVar("_Accelerator")


def without_ddp(accelerator: _Accelerator) -> _Accelerator:
    """Let an `accelerate.Accelerator` prepare models without wrapping them, and return it.

    Devices, mixed precision, compilation, gradient accumulation and the division of data stay as
    they are. Construct `Gossip` from what `prepare` returns.

    Example:
        ```python
        accelerator = without_ddp(Accelerator())
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        gossip = Gossip(model, optimizer, plan, scaler=accelerator.scaler)
        ```
    """
    prepare: Any = accelerator.prepare_model  # type: ignore[attr-defined]

    @wraps(prepare)
    def prepare_model(
        model: Any, device_placement: Any = None, evaluation_mode: bool = True
    ) -> Any:
        # What Accelerate does for models that are only evaluated: all of it, but no wrapper.
        return prepare(model, device_placement=device_placement, evaluation_mode=True)

    accelerator.prepare_model = prepare_model  # type: ignore[attr-defined]
    return accelerator


def average(gossip: Gossip | None) -> AbstractContextManager[object]:
    """Hold the model at the average, if it is exchanged and is not there already."""
    if gossip is None or gossip.state.averaging.is_open:
        return nullcontext()
    return gossip.averaged()
