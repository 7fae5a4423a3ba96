"""Collectives on top of any transport, for the rare moments when all workers meet.

None of these is in the hot path: agreement, the first broadcast, checkpoints, the average model.
Where a worker reaches only its neighbours, they travel along a tree of links, with the workers that
are there; elsewhere they take a binomial tree of all workers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from matcha.distributed.transports.base import Buffer, Message, Tag, Transport
from matcha.errors import ExchangeError, InputError


def is_of_ring(message: Message) -> bool:
    """Whether a message is a piece of an average that goes round a ring of all workers."""
    return message.tag == Tag.RING


def broadcast(transport: Transport, tensors: list[torch.Tensor], timeout: float) -> None:
    """Overwrite every worker's tensors with worker 0's, or with the lowest rank's that is there."""
    if transport.has_tree:
        own, read = _join(tensors), partial(_overwrite, tensors)
        return transport.tree_call(lambda _: (), lambda *_: own, read, timeout)
    parent, children = _tree(transport.rank, transport.num_workers)
    for moved in _moved(transport, tensors):
        if parent is not None:
            transport.post([Message(peer=parent, tag=Tag.BROADCAST, incoming=moved)]).wait(timeout)
        sends = [Message(peer=child, tag=Tag.BROADCAST, outgoing=moved) for child in children]
        if sends:
            transport.post(sends).wait(timeout)


def mean_(transport: Transport, tensors: list[torch.Tensor], timeout: float) -> None:
    """Overwrite every worker's tensors with their mean over the workers; of whole numbers the sum.

    The sum runs up a fixed tree and the result comes back down it, so all workers hold the same
    bits, run after run.
    """
    if transport.has_tree:
        return _mean_by_tree(transport, tensors, timeout)
    parent, children = _tree(transport.rank, transport.num_workers)
    for total in _moved(transport, tensors):
        arriving = torch.empty_like(total)
        # Largest subtree last in `children` order: small subtrees are ready first.
        for child in reversed(children):
            transport.post([Message(peer=child, tag=Tag.REDUCE, incoming=arriving)]).wait(timeout)
            total.add_(arriving)
        if parent is not None:
            transport.post([Message(peer=parent, tag=Tag.REDUCE, outgoing=total)]).wait(timeout)
        else:
            _divide(total, transport.num_workers)
    broadcast(transport, tensors, timeout)


def ring_mean_(transport: Transport, tensors: list[torch.Tensor], timeout: float) -> int:
    """Overwrite every worker's tensors with their mean, by a ring all-reduce, as DDP does.

    Every worker sends 1/m of the values to the next and takes 1/m from the one before, 2(m − 1)
    times: first sums go round, then means. Unlike `mean_` it is made for the hot path. All workers
    hold the same bits. Where a worker reaches only its neighbours, it is `mean_`. Returns how many
    bytes this worker sent.
    """
    m, rank, sent = transport.num_workers, transport.rank, 0
    if transport.has_tree:
        mean_(transport, tensors, timeout)
        return sum(tensor.nbytes for tensor in tensors)
    for moved in _moved(transport, tensors):
        parts = torch.tensor_split(moved.view(-1), m)
        arriving = torch.empty_like(parts[0])
        for step in range(2 * (m - 1)):
            out, into = parts[(rank - step) % m], parts[(rank - step - 1) % m]
            here = arriving[: into.numel()]
            sent += _pass_on(transport, out, here, 1, timeout)
            if step >= m - 1:
                into.copy_(here)
            else:
                into.add_(here)
                if step == m - 2:
                    into.div_(m)
    return sent


def ring_gather(transport: Transport, own: torch.Tensor, timeout: float) -> list[torch.Tensor]:
    """Every worker's message of bytes, all of one size, on every worker, in the order of ranks.

    Each message goes once around the ring, so a worker sends m − 1 of them.
    """
    m, rank = transport.num_workers, transport.rank
    if transport.has_tree:
        found = gather(transport, own.cpu().numpy().tobytes(), timeout)
        return [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in found]
    parts = [torch.empty_like(own) for _ in range(m)]
    parts[rank] = own
    for step in range(m - 1):
        _pass_on(transport, parts[(rank - step) % m], parts[(rank - step - 1) % m], 1, timeout)
    return parts


def window_mean_(
    transport: Transport, tensors: list[torch.Tensor], to: Sequence[int | None], timeout: float
) -> int:
    """Overwrite every worker's tensors with their mean, by sums that hop: ⌈log2 m⌉ messages each.

    `matcha.rounds.Round` defines it (mixing `windows`); this follows its order to the bit. `to` is
    whom this worker sends to, message by message; it hears from as far behind. Returns how many
    bytes it sent.
    """
    m, rank, sent = transport.num_workers, transport.rank, 0
    hops = [(peer - rank) % m for peer in to if peer is not None]
    for whole in _moved(transport, tensors):
        behind, arriving, count = torch.zeros_like(whole), torch.empty_like(whole), 0
        for hop in hops:
            sent += _pass_on(transport, whole if hop > count else behind, arriving, hop, timeout)
            whole.add_(arriving)
            behind.add_(arriving)
            count += hop
        whole.div_(m)
    return sent


def _pass_on(
    transport: Transport, out: torch.Tensor, into: torch.Tensor, hop: int, timeout: float
) -> int:
    """Send to the worker `hop` places on, receive from the one as far behind; the bytes sent."""
    m, rank = transport.num_workers, transport.rank
    messages = [Message(peer=(rank - hop) % m, tag=Tag.RING, incoming=into)]
    messages.append(Message(peer=(rank + hop) % m, tag=Tag.RING, outgoing=out))
    transport.post(messages).wait(timeout)
    return out.nbytes


def gather(transport: Transport, value: bytes, timeout: float) -> list[bytes]:
    """Every worker's value, on every worker, in the order of ranks; of those who are there."""
    if transport.has_tree:
        return _gather_by_tree(transport, value, timeout)
    sizes = torch.zeros(transport.num_workers, dtype=torch.int64)
    sizes[transport.rank] = len(value)
    # A single number first: a sign of life, for which transports wait while a worker is away.
    total = torch.tensor([len(value)])
    mean_(transport, [total, sizes], timeout)
    parts = torch.split(torch.zeros(int(total), dtype=torch.uint8), sizes.tolist())
    parts[transport.rank].copy_(torch.tensor(list(value), dtype=torch.uint8))
    joined = torch.cat(parts)
    mean_(transport, [joined], timeout)
    return [bytes(part.tolist()) for part in torch.split(joined, sizes.tolist())]


def agree(transport: Transport, facts: Mapping[str, str], timeout: float) -> None:
    """Compare facts with all workers, and fill in the transport's `hosts`. A collective call.

    Raises:
        InputError: on every worker, naming which rank differs in what.
    """
    me = {"rank": transport.rank, "host": transport.host(), "facts": dict(facts)}
    answers = [json.loads(answer) for answer in gather(transport, json.dumps(me).encode(), timeout)]
    hosts = {answer["rank"]: answer["host"] for answer in answers}  # some may be missing already
    transport.hosts = tuple(hosts.get(r, "unknown") for r in range(transport.num_workers))
    found = differences([answer["facts"] for answer in answers])
    if found:
        ranks = [answer["rank"] for answer in answers]
        listed = "; ".join(f"{transport.name(ranks[place])} has {what}" for place, what in found)
        raise InputError(f"the workers do not agree: {listed}.")


def differences(facts: Sequence[Mapping[str, str]]) -> list[tuple[int, str]]:
    """Return who differs from the majority, and in what; in a tie the lowest rank's side wins.

    >>> differences([{"plan": "a"}, {"plan": "a"}, {"plan": "b"}])
    [(2, "another plan ('b', others 'a')")]
    """
    found = []
    for name in {name: None for worker in facts for name in worker}:
        values = [worker.get(name, "nothing") for worker in facts]
        usual, _ = Counter(values).most_common(1)[0]
        found += [
            (rank, f"another {name} ({value!r}, others {usual!r})")
            for rank, value in enumerate(values)
            if value != usual
        ]
    return sorted(found)


def roll_call(transport: Transport, call: str, timeout: float) -> None:
    """Return once every worker is in the same call; large messages need not wait then.

    Raises:
        ExchangeError: a worker is in another call, or does not come.
    """
    transport.doing = call
    if transport.has_tree:  # it knows who takes part in which call
        return
    calls = gather(transport, call.encode(), timeout)
    others = {c.decode() for c in calls} - {call}
    if others:
        raise ExchangeError(
            f"this worker is in {call}, but others are in {', '.join(sorted(others))}: every "
            "worker must make the same calls at the same iteration."
        )


def barrier(transport: Transport, timeout: float) -> None:
    """Return once every worker has called this."""
    gather(transport, b".", timeout)


# -- parts -----------------------------------------------------------------------------------------


def _mean_by_tree(transport: Transport, tensors: list[torch.Tensor], timeout: float) -> None:
    def total(parts: dict[int, memoryview]) -> list[torch.Tensor]:
        sums = [tensor.detach().cpu().clone() for tensor in tensors]
        for part in parts.values():  # by rank: the same bits for the same tree
            for mine, theirs in zip(sums, _split(part, sums), strict=True):
                mine.add_(theirs)
        return sums

    def mean(parts: dict[int, memoryview], count: int) -> Buffer:
        sums = total(parts)
        for tensor in sums:
            _divide(tensor, count)
        return _join(sums)

    read = partial(_overwrite, tensors)
    transport.tree_call(lambda parts: (_join(total(parts)),), mean, read, timeout)


def _gather_by_tree(transport: Transport, value: bytes, timeout: float) -> list[bytes]:
    known = {str(rank) for rank in range(transport.num_workers)}

    def read(content: Buffer) -> dict[str, str]:
        values = json.loads(bytes(content))
        if not isinstance(values, dict) or not known.issuperset(values):
            raise ValueError("values of workers that do not exist")
        for text in values.values():
            text.encode("latin-1")
        return values

    def joined(parts: dict[int, memoryview]) -> bytes:
        values = {str(transport.rank): value.decode("latin-1")}  # a character per byte
        for part in parts.values():
            values |= read(part)
        return json.dumps(values).encode()

    values = transport.tree_call(
        lambda parts: (joined(parts),), lambda parts, _: joined(parts), read, timeout
    )
    return [values[rank].encode("latin-1") for rank in sorted(values, key=int)]


def _divide(total: torch.Tensor, count: int) -> None:
    if total.is_floating_point() or total.is_complex():
        total.div_(count)


def _join(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(
        t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() for t in tensors
    )


def _split(content: Buffer, like: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    if len(content) != sum(tensor.nbytes for tensor in like):
        raise InputError("the workers do not agree on what they average: their sizes differ.")
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    for part, tensor in zip(torch.split(flat, [t.nbytes for t in like]), like, strict=True):
        yield part.clone().view(tensor.dtype).view(tensor.shape)


def _overwrite(tensors: list[torch.Tensor], content: Buffer) -> None:
    for tensor, value in zip(tensors, _split(content, tensors), strict=True):
        tensor.copy_(value)


def _tree(rank: int, size: int) -> tuple[int | None, list[int]]:
    # Binomial tree: the parent clears the lowest set bit, children set lower bits, largest first.
    low = rank & -rank if rank else 1 << (size - 1).bit_length()
    parent = rank - low if rank else None
    bits = [1 << k for k in reversed(range(low.bit_length() - 1))]
    return parent, [rank + bit for bit in bits if rank + bit < size]


def _moved(transport: Transport, tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Each tensor on the device of messages; what is made of it there is copied back after."""
    for tensor in tensors:
        moved = tensor if transport.device is None else tensor.to(transport.device)
        yield moved
        if moved is not tensor:
            tensor.copy_(moved)
