"""One worker per process: transports, exchanges, and the hooks on the optimizer.

```python
from matcha.distributed import Gossip
gossip = Gossip(model, optimizer, plan)     # consensus now follows every optimizer.step()
```
"""

from matcha.errors import missing_package

try:
    import torch as _  # noqa: F401
except ImportError as error:
    raise (missing_package(error) or error) from None

from matcha._io.keys import Keys
from matcha.distributed.gossip import Gossip
from matcha.distributed.launch.placement import default_transport
from matcha.distributed.links.peers import Peers, read_peers
from matcha.distributed.links.transport import LinkTransport
from matcha.distributed.options import GossipOptions
from matcha.distributed.recorder import Recorder
from matcha.distributed.train import Network, Training, run_worker, train
from matcha.distributed.transports.base import Message, Pending, Transport
from matcha.distributed.transports.emulation import SlowLinks
from matcha.distributed.transports.mpi import MpiTransport
from matcha.distributed.transports.torch import TorchTransport

__all__ = [
    "Gossip",
    "GossipOptions",
    "Keys",
    "LinkTransport",
    "Message",
    "MpiTransport",
    "Network",
    "Peers",
    "Pending",
    "Recorder",
    "SlowLinks",
    "TorchTransport",
    "Training",
    "Transport",
    "default_transport",
    "read_peers",
    "run_worker",
    "train",
]
