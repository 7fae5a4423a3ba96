"""Relayed sums: what one worker remembers, and what it sends, where sums go along a tree."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from matcha.distributed.exchange.codecs import is_finite
from matcha.distributed.transports.base import Message, Tag, Transport

__all__ = ["RelayedSums"]


class RelayedSums:
    """One worker's part of RelaySum; `matcha.rounds.Relay` defines it.

    Args:
        transport: carries the messages.
        values: flat tensors that are averaged, in place.
        neighbors: in the tree.
        any_value: which of the values may hold what is not finite.
    """

    def __init__(
        self,
        transport: Transport,
        values: Sequence[torch.Tensor],
        neighbors: Collection[int],
        any_value: Collection[int] = (),
    ) -> None:
        self._transport = transport
        self._values, self._any_value = list(values), frozenset(any_value)
        # What a sum is over is counted by a sum itself.
        self._parts = [*values, torch.ones(1, dtype=torch.float64)]
        self._sums = {j: [torch.zeros_like(p) for p in self._parts] for j in sorted(neighbors)}

    def state(self) -> Mapping[str, torch.Tensor]:
        """The sums that neighbors sent last."""
        named = {j: enumerate(sums) for j, sums in self._sums.items()}
        return {f"{j}.{k}": part for j, parts in named.items() for k, part in parts}

    def reset(self) -> None:
        """Start again: nothing has come yet."""
        for tensor in self.state().values():
            tensor.zero_()

    def mix(self, timeout: float) -> int:
        """Send and take sums, and average; how many bytes this worker sent.

        Args:
            timeout: seconds to wait for any one message.

        Raises:
            PeerLostError: a neighbour is gone, late, or sent a sum that is not finite.
        """
        m, sent = self._transport.num_workers, 0
        for k in reversed(range(len(self._parts))):  # counts first: means need them
            part = self._parts[k]
            before = {j: sums[k] for j, sums in self._sums.items()}
            device = self._transport.device or part.device
            arriving = {j: torch.empty_like(part, device=device) for j in before}
            messages = []
            for j in before:
                out = part.clone()
                for i, other in before.items():
                    if i != j:
                        out.add_(other)
                sent += out.nbytes
                incoming, out = arriving[j], out.to(device)
                messages += [Message(peer=j, tag=Tag.RELAY, incoming=incoming, outgoing=out)]
            self._transport.post(messages).wait(timeout)
            for j, into in before.items():
                if k not in self._any_value and not is_finite(arriving[j]):
                    raise self._transport.refuse(j, "sent a sum that is not finite")
                into.copy_(arriving[j])
            if k < len(self._values):
                part.mul_(m - float(sum(sums[-1] for sums in self._sums.values())))
                for into in before.values():
                    part.add_(into)
                part.div_(m)
        return sent
