"""Transfers: the messages of one post, and what waiting for them may end in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from matcha.distributed.links.connection import Connection, LinkState, Transfer
from matcha.distributed.transports.base import Pending
from matcha.errors import PeerLostError


@dataclass(frozen=True, slots=True)
class WaitRules:
    """What a wait needs of the rules."""

    lock: threading.RLock
    changed: threading.Condition
    end_reason: Callable[[int], str]
    lost_error: Callable[[int, str, float], PeerLostError]
    anyone_is_away: Callable[[], bool]
    end: Callable[[Connection, str], None]


class Transfers(Pending):
    """Messages in flight over links of our own."""

    def __init__(self, rules: WaitRules, transfers: list[tuple[int, Transfer | None]]) -> None:
        self.rules = rules
        self.transfers = transfers

    def has_come(self) -> bool:
        """Whether `wait` would return at once."""
        with self.rules.lock:  # of a connection that has ended `wait` tells
            return all(
                each is None or each.done or each.connection.state is LinkState.ENDED
                for _, each in self.transfers
            )

    def wait(self, timeout: float) -> None:
        """Wait for all of them; raises for a neighbour that was lost."""
        patience = min(2.0, 0.2 * timeout)
        self.end = time.monotonic() + timeout - patience
        while self.transfers:
            peer, transfer = self.transfers[0]
            problem = self._wait_for(peer, transfer, timeout, patience)
            if problem is not None:
                if transfer is not None:
                    transfer.connection.join_reader()
                raise self.rules.lost_error(peer, problem, patience)
            self.transfers.pop(0)

    def _wait_for(
        self, peer: int, transfer: Transfer | None, timeout: float, patience: float
    ) -> str | None:
        """What the peer did instead of its part of a transfer; None once that is done."""
        rules = self.rules
        with rules.lock:
            if transfer is None:
                return rules.end_reason(peer)
            while not transfer.is_done:
                if transfer.connection.end_reason is not None:
                    return transfer.connection.end_reason
                if (now := time.monotonic()) <= self.end:
                    rules.changed.wait(self.end - now)
                elif rules.anyone_is_away():
                    self.end = now + timeout - patience
                else:
                    rules.end(transfer.connection, f"did not answer within {timeout:g} s")
        return None
