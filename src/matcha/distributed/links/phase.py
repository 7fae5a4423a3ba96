"""Phase: where a worker over links of our own is between its start and its end.

By these ways, which all workers go:

                  a neighbour trains already
    STARTING ──────────────────────────────▶ NEEDS_STATE
        │                                      │      ▲
        │ start_at        start_at             │      │ leave: it fell far behind
        └──────────────▶  RUNNING  ◀───────────┘      │
                             └────────────────────────┘
    and from each of them, by close(), to CLOSED.

    STARTING     No worker trains yet. The first collective call ends once all links have been up.
    NEEDS_STATE  Others train: this worker takes a neighbour's state first.
    RUNNING      It has a state and takes part.
    CLOSED       It has said goodbye to its neighbours.
"""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """Where this worker is between its start and its end."""

    STARTING = "starting"
    NEEDS_STATE = "needs a state"
    RUNNING = "running"
    CLOSED = "closed"
