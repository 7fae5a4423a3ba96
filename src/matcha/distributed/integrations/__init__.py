"""Gossip inside frameworks that own the training loop; none of them is a dependency.

```python
from matcha.distributed.integrations.lightning import GossipStrategy
from matcha.distributed.integrations.transformers import GossipTrainerMixin
from matcha.distributed.integrations.accelerate import without_ddp
```
"""
