"""torch's own: DDP with its hooks and PostLocalSGD; Decent-DP where it is installed; silence."""

from peers import PEERS, available

ROWS = {name: PEERS[name] for name in available()}
