"""torchft's DiLoCo, the real package with its real lighthouse: `pip install torchft`."""

import os
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from peers import Method, Plain, sgd
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

WORKERS, PORT, PATIENCE = 8, 29510, timedelta(seconds=600)


class TorchFt(Plain):
    """A replica group per worker; the outer step is DiLoCo's, SGD at 0.7 with Nesterov's 0.9."""

    def __init__(self, model: nn.Module, period: int) -> None:
        super().__init__(model, sgd(model))
        rank, first = dist.get_rank(), os.environ["MASTER_ADDR"]
        own = first.rsplit(".", 1)[0] + f".{rank + 1}"
        self.lighthouse: Any = None
        if rank == 0:
            self.lighthouse = LighthouseServer(bind=f"0.0.0.0:{PORT}", min_replicas=WORKERS)
        dist.barrier()
        # Each replica group has a store of its own.
        self.store = dist.TCPStore(own, 29520, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=PATIENCE),
            load_state_dict=model.load_state_dict,
            state_dict=model.state_dict,
            min_replica_size=WORKERS,
            use_async_quorum=False,
            timeout=PATIENCE,
            quorum_timeout=PATIENCE,
            rank=0,
            world_size=1,
            store_addr=own,
            store_port=29520,
            lighthouse_addr=f"http://{first}:{PORT}",
            replica_id=f"worker{rank}",
            hostname=own,
            init_sync=False,  # all begin with the same weights
        )
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.diloco = DiLoCo(self.manager, [model], self.optimizer, outer, sync_every=period)
        self.diloco.__enter__()

    def close(self) -> None:
        """Leave the quorum."""
        self.diloco.__exit__(None, None, None)
        self.manager.shutdown(wait=False)


def make(period: int, model: nn.Module) -> Method:
    """DiLoCo with an outer step every so many iterations."""
    return TorchFt(model, period)


ROWS = {f"torchft DiLoCo {period}": partial(make, period) for period in (10, 50, 100)}
