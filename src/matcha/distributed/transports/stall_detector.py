"""StallDetector: waits for a peer that does not come, and finds the reason while there is time.

A short wait costs nothing here. In a long one this worker publishes which peer it waits for and in
which call, and reads what others published: a peer that said that it is away is waited for beyond
the timeout, one that has finished is not waited for at all, and workers that wait for one another
in different calls are told so at once.
"""

from __future__ import annotations

import time

from matcha.distributed.transports.base import Transport
from matcha.errors import ExchangeError

__all__ = ["StallDetector"]

_SPIN = 1e-3  # seconds of looking without a pause: most answers are near
_LONG = 1.0  # seconds after which a wait is published


class StallDetector:
    """One wait of this worker for one peer.

    Args:
        transport: Where notes are written and read.
        peer: The peer to wait for.
        timeout: Seconds of silence that are an error.
    """

    def __init__(self, transport: Transport, peer: int, timeout: float) -> None:
        self._transport = transport
        self._peer = peer
        self._timeout = timeout
        self._patience = min(2.0, 0.2 * timeout)  # the rest is for finding the cause
        self._started = time.monotonic()
        self._end = self._started + timeout - self._patience
        self.slice = min(_LONG, 0.2 * timeout)
        self._next_look = self._started + self.slice
        self._noted = False
        self._cycle: tuple[str, ...] | None = None

    def pause(self) -> None:
        """Sleep for a moment, longer the longer it has taken; look at the notes now and then.

        Raises:
            ExchangeError: Waiting longer is of no use.
        """
        now = time.monotonic()
        if now >= self._next_look:
            self.look()
        waited = now - self._started
        time.sleep(0.0 if waited < _SPIN else min(5e-3, waited / 50))

    def look(self) -> None:
        """Read what the others have published."""
        now = time.monotonic()
        self._next_look = now + self.slice
        transport = self._transport
        if not self._noted and not transport.asynchronous:
            self._noted = True
            transport.report_waiting_on(self._peer)
            transport.set_note("in", transport.doing)
        transport.probe(self._peer)
        chain = self._chain()
        if transport.get_note(chain[-1], "away"):
            self._end = now + self._timeout - self._patience
        if transport.get_note(self._peer, f"finished/{transport.period}"):
            raise transport.failure(self._peer, "has finished", 0.0)
        self._check_cycle(chain)
        if now > self._end:
            problem = f"did not answer within {self._timeout:g} s"
            raise transport.failure(self._peer, problem, self._patience)

    def end(self) -> None:
        """The peer came: remove what was published."""
        if self._noted:
            self._transport.report_waiting_on(None)
            self._transport.set_note("in", "")

    def _chain(self) -> list[int]:
        """The peer, the one for which it waits, and so on, up to one that waits for none."""
        chain = [self._peer]
        while True:
            following = self._transport.waiting_on(chain[-1])
            if following is None or following in chain:
                return chain
            chain.append(following)

    def _check_cycle(self, chain: list[int]) -> None:
        """Workers that wait for one another in one call are only slow; in two calls they never end.

        Notes may be a moment old, so the same must be found twice.
        """
        transport = self._transport
        calls = None
        if transport.rank in chain:
            around = chain[: chain.index(transport.rank) + 1]
            calls = tuple(str(transport.get_note(rank, "in")) for rank in around)
        if calls is None or len({*calls, transport.doing}) == 1 or "" in calls:
            self._cycle = None
        elif calls != self._cycle:
            self._cycle = calls
        else:
            transport.failed = True
            said = ", ".join(
                f"{transport.name(rank)} is in {call}"
                for rank, call in zip(around, calls, strict=True)
            )
            raise ExchangeError(
                f"the workers wait for one another in different calls: {said}; every worker must "
                "make collective calls, like averaged(), at the same iteration."
            )
