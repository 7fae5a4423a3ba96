"""The exchange: carries out one worker's part of a round on its values, whatever the wire.

The definition is `Round.mix`; this does the same operations in the same order on one worker's row,
so that float64 results agree to the bit, while messages, coding and arithmetic overlap.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import NamedTuple

import torch

from matcha.distributed.exchange.buckets import Bucket
from matcha.distributed.exchange.codecs import (
    Codec,
    FloatCodec,
    LowRankCodec,
    ModuloCodec,
    Piece,
    RelayedSums,
    ScaledCodec,
    SpareMemory,
    TopKAverage,
    Transfer,
    is_finite,
)
from matcha.distributed.exchange.meeting import RUNNING, Handshake, Meeting, MeetingHook
from matcha.distributed.transports.base import Transport, meeting_tag
from matcha.distributed.transports.collectives import ring_mean_, window_mean_
from matcha.errors import ModelError, PeerLostError
from matcha.records import Span, SpanKind
from matcha.rounds import Round
from matcha.wires import Float, LowRank, Modulo, TopK, Wire
from matcha.wires.wire import BLOCK, Segment


class _Part(NamedTuple):
    """One of the messages that every meeting has."""

    number: int
    codec: Codec
    piece: Piece
    phase: int


@dataclass(slots=True)
class _RoundState:
    """The state of the round that is being carried out."""

    iteration: int
    is_sequential: bool
    """Whether a matching sees the result of the one before it."""
    keeps_originals: bool
    """Whether several partners get the values before the round."""
    last: Meeting
    has_begun: bool = False
    """Whether codecs know of it: not before the first meeting begins."""
    content: torch.Tensor | None = None
    """What handshakes carry."""
    handshakes: dict[int, Handshake] = field(default_factory=dict)
    """By the position of their meeting."""
    originals: dict[Piece, torch.Tensor] = field(default_factory=dict)
    """Memory that holds the values of pieces before the round."""


class Exchange:
    """Mixes flat tensors with the partners of a round, in place.

    Laplacian rounds send the values before the round to every partner and add up in the order of
    the matchings. Pairwise and push rounds take one matching after the other, each seeing the
    result of the one before; a piece moves on to the next matching while later pieces are still on
    the wire.

    No order of waiting can deadlock. All workers start and finish messages in one common order:
    matching, codec, phase, piece where matchings follow one another; codec, phase, piece, matching
    for Laplacian rounds. So the earliest unfinished message always has both its ends waiting for
    nothing else.

    Codecs say what messages hold, each for some of the values; at most one has scales. What is
    `gathered` rounds average by messages to all. The timeout is for any one message.
    """

    takes_all = False
    """Whether values that are not finite are left to a hook that bounds meetings."""

    def __init__(
        self,
        transport: Transport,
        codecs: Sequence[Codec],
        *,
        timeout: float,
        gathered: TopKAverage | None = None,
    ) -> None:
        self.transport, self.codecs, self.timeout = transport, tuple(codecs), timeout
        self.relay: RelayedSums | None = None
        """Averages in place of all else, where the plan does."""
        self._gathered = gathered
        self.hooks: list[MeetingHook] = []
        self.wait_seconds, self.bytes_sent = 0.0, 0
        """Spent waiting for partners, and sent, so far."""
        self.finished_at = RUNNING
        """The iteration at which training ended here; partners hear it with every meeting."""
        self.finished: set[int] = set()
        """Partners that had finished, as this worker had, when they met last."""
        phases = [(codec, phase) for codec in self.codecs for phase in range(codec.num_phases)]
        parts = [(codec, piece, phase) for codec, phase in phases for piece in codec.pieces]
        self._parts = [_Part(number, *part) for number, part in enumerate(parts)]
        self._scaled = next((c for c in self.codecs if isinstance(c, ScaledCodec)), None)
        self._spare = SpareMemory()
        self._largest = {c: max(piece.values.nbytes for piece in c.pieces) for c in self.codecs}

    @property
    def spare_bytes(self) -> int:
        """Memory held between rounds, beyond the values and what codecs remember."""
        return self._spare.nbytes

    def state(self) -> Mapping[str, torch.Tensor]:
        """What later rounds depend on."""
        found = {name: value for codec in self.codecs for name, value in codec.state().items()}
        return found if self._gathered is None else found | dict(self._gathered.state())

    def forget(self, peer: int) -> None:
        """Drop what is remembered of a link: its two ends must remember the same."""
        for codec in self.codecs:
            codec.forget(peer)

    def run(self, round: Round, met: Sequence[Meeting], iteration: int) -> int:
        """Carry out this worker's part of a round: its `meetings` in it, at least one.

        The iteration travels with the messages; a partner at another one is an error. Returns how
        many of the meetings took place: all, unless a hook leaves some out.

        Raises:
            ExchangeError: a partner is gone, late, or at another iteration. The values are then
                partly mixed and must not be used.
            ModelError: a value is not finite; nothing was sent.
        """
        self.transport.doing = f"the round of iteration {iteration}"
        if self.relay is not None:
            self._check_finite(iteration)
            self.bytes_sent += self.relay.mix(self.timeout)
            return len(met)
        if round.is_exact:
            self._check_finite(iteration)
            self._average(round, met)
            return len(met)
        is_sequential = round.mixing != "laplacian"
        keeps_originals = len(met) > 1 and not is_sequential
        state = _RoundState(iteration, is_sequential, keeps_originals, met[-1])
        for hook in self.hooks:
            hook.begin_round(iteration)
        num_held = 0
        for group in [[meeting] for meeting in met] if self.hooks else [met]:
            try:
                if all(hook.before(group[0], iteration) for hook in self.hooks):
                    self._hold(group, state)
                    for hook in reversed(self.hooks):
                        hook.after(group[0])
                    num_held += len(group)
            except PeerLostError as error:
                if not any(hook.undo(group[0], error) for hook in self.hooks):
                    raise
        if state.has_begun:
            for codec in self.codecs:
                codec.end_round()
        for hook in self.hooks:
            hook.end_round(num_held)
        return num_held

    def _average(self, round: Round, met: Sequence[Meeting]) -> None:
        """Take the mean of all workers, which is no meeting of two."""
        values = [piece.values for codec in self.codecs for piece in codec.pieces]
        if self._gathered is not None:
            self.bytes_sent += self._gathered.take(self.transport, self.timeout)
        if round.is_all_reduce:
            self.bytes_sent += ring_mean_(self.transport, values, self.timeout)
            return
        to = [meeting.role.to for meeting in met if meeting.role]
        self.bytes_sent += window_mean_(self.transport, values, to, self.timeout)

    def _check_finite(self, iteration: int) -> None:
        if not all(is_finite(values) for codec in self.codecs for values in codec.finite):
            raise ModelError(
                f"{self.transport.name(self.transport.rank)} holds a parameter that is not "
                f"finite at iteration {iteration}: training diverged; a lower learning "
                "rate may help."
            )

    # -- meetings ---------------------------------------------------------------------------------

    def _hold(self, met: Sequence[Meeting], state: _RoundState) -> None:
        """Hold meetings together, several transfers under way at a time."""
        if not state.has_begun:
            self._check_finite(state.iteration)
            state.content = self._scaled.begin_round() if self._scaled else None
            state.has_begun = True
        for meeting in met if self._scaled else ():  # which the first message needs
            self._greet(meeting, state)
        under_way: deque[Transfer] = deque()
        by_meeting = ((part, meeting) for meeting in met for part in self._parts)
        by_part = ((part, meeting) for part in self._parts for meeting in met)
        for part, meeting in by_meeting if state.is_sequential else by_part:
            window = part.codec.window(several=state.keeps_originals)
            # A piece leaves for its next partner with the last one's values mixed in, and a phase
            # begins when the one before it is over.
            while len(under_way) >= window or any(
                other.piece is part.piece and (state.is_sequential or other.meeting is meeting)
                for other in under_way
            ):
                self._land(under_way.popleft(), state)
            self._greet(meeting, state)
            under_way.append(self._launch(part, meeting, state))
        while under_way:
            self._land(under_way.popleft(), state)

    def _greet(self, meeting: Meeting, state: _RoundState) -> None:
        """Post the handshake of a meeting, once."""
        if meeting.position not in state.handshakes:
            tag, content = self._tag(meeting, len(self._parts)), state.content
            handshake = state.handshakes[meeting.position] = Handshake(
                self.transport, meeting, tag, state.iteration, self.finished_at, content
            )
            handshake.pending = self.transport.post(handshake.messages)
            self.bytes_sent += 0 if content is None else len(content)

    def _await(self, meeting: Meeting, state: _RoundState) -> Handshake:
        """The handshake of a meeting, once it has come."""
        handshake = state.handshakes[meeting.position]
        if not handshake.has_come:
            # It comes as soon as the partner is there: waiting ends and exchanging begins.
            started = time.perf_counter()
            handshake.wait(self.timeout)
            self.wait_seconds += time.perf_counter() - started
            if handshake.both_finished:
                self.finished.add(meeting.peer)
            if self._scaled is not None and handshake.answer is not None:
                handshake.scales = self._scaled.agree(handshake.answer)
        return handshake

    def _tag(self, meeting: Meeting, number: int) -> int:
        return meeting_tag(meeting.position * (len(self._parts) + 1) + number)

    # -- one message ------------------------------------------------------------------------------

    def _launch(self, part: _Part, meeting: Meeting, state: _RoundState) -> Transfer:
        codec, piece, own = part.codec, part.piece, part.piece.values.device
        transfer = Transfer(
            codec=codec,
            piece=piece,
            phase=part.phase,
            meeting=meeting,
            is_lower=self.transport.rank < meeting.peer,
            is_sequential=state.is_sequential,
            original=self._original(codec, piece, state),
            scales=self._await(meeting, state).scales if codec is self._scaled else (),
            memory=codec.memory(self._spare, own, self.transport.device or own),
        )
        message = codec.encode(transfer)
        memory = transfer.memory.incoming
        transfer.message = message = message.to(memory.device)
        transfer.arrived = memory[: message.nbytes]
        if message.nbytes:
            outgoing = message.view(-1).view(torch.uint8)
            messages = meeting.messages(self._tag(meeting, part.number), transfer.arrived, outgoing)
            transfer.pending = self.transport.post(messages)
            self.bytes_sent += message.nbytes if meeting.sends else 0
        return transfer

    def _land(self, transfer: Transfer, state: _RoundState) -> None:
        codec, piece, meeting = transfer.codec, transfer.piece, transfer.meeting
        self._await(meeting, state)
        if transfer.pending is not None:
            transfer.pending.wait(self.timeout)
        if not self.takes_all and not codec.is_sound(transfer):
            source = meeting.peer if meeting.role is None else meeting.role.source
            assert source is not None
            raise self.transport.refuse(source, "sent a value that is not finite")
        codec.apply(transfer)
        self._spare.give(transfer.memory.blocks)
        is_over = meeting is state.last and transfer.phase == codec.num_phases - 1
        if is_over and piece in state.originals:
            self._spare.give([state.originals.pop(piece)])

    def _original(self, codec: Codec, piece: Piece, state: _RoundState) -> torch.Tensor:
        """The values that messages are made of; those before the round are copied once."""
        values = piece.values
        if not state.keeps_originals:
            return values
        is_new = piece not in state.originals
        if is_new:
            state.originals[piece] = self._spare.take(self._largest[codec], values.device)
        original = state.originals[piece][: values.nbytes].view(values.dtype).view_as(values)
        return original.copy_(values) if is_new else original


class Stopwatch:
    """Times exchanges; tells computing, waiting and exchanging apart where spans are asked for."""

    def __init__(self, worker: int, on_span: Callable[[Span], None] | None) -> None:
        self._worker, self._listeners = worker, [on_span] if on_span else []
        self.exchange_seconds = 0.0
        """Spent in exchanges so far, waiting for partners included."""
        self.restart()

    def restart(self) -> None:
        """Count the next stretch of computing from now."""
        self.free_since = time.perf_counter()

    def listen(self, on_span: Callable[[Span], None]) -> None:
        """Tell another listener as well, before the others."""
        self._listeners.insert(0, on_span)

    def end_computing(self, iteration: int) -> None:
        """A stretch of computing ends here."""
        self._emit("compute", iteration, self.free_since, time.perf_counter())

    @contextmanager
    def exchanging(self, exchange: Exchange, iteration: int) -> Iterator[None]:
        """An exchange runs inside."""
        started, waited = time.perf_counter(), exchange.wait_seconds
        yield
        ended = time.perf_counter()
        ready = started + (exchange.wait_seconds - waited)
        self.exchange_seconds += ended - started
        self._emit("wait", iteration, started, ready)
        self._emit("exchange", iteration, ready, ended)

    def _emit(self, kind: SpanKind, iteration: int, start: float, end: float) -> None:
        for on_span in self._listeners:
            on_span(Span(worker=self._worker, iteration=iteration, kind=kind, start=start, end=end))


def alignment(wire: Wire) -> int:
    """Parameters begin at multiples of this many values of a bucket."""
    return 1 if isinstance(wire, Float) else BLOCK


def make_exchange(
    wire: Wire,
    transport: Transport,
    buckets: Sequence[Bucket],
    values: Sequence[torch.Tensor],
    besides: Sequence[tuple[Bucket, torch.Tensor]],
    bucket_bytes: int,
    timeout: float,
) -> Exchange:
    """The exchange for a wire.

    `values` are mixed, one tensor laid out like each of the buckets and push-sum's weight last;
    `besides` travel with them, laid out like their buckets.
    """
    pairs = [*zip(cycle(buckets), values, strict=False), *besides]
    coded = [p for p in pairs if not isinstance(wire, Float) and _is_coded(p[0])]
    whole = [p for p in pairs if isinstance(wire, Float) or not _is_coded(p[0])]
    chosen, segments = [v for _, v in coded], [_segments(bucket) for bucket, _ in coded]
    codecs: list[Codec] = []
    gathered = None
    if chosen and isinstance(wire, TopK):
        gathered = TopKAverage(chosen, segments, wire)
    elif chosen and isinstance(wire, LowRank):
        codecs.append(LowRankCodec(chosen, segments, wire, transport.num_workers))
    elif chosen and isinstance(wire, Modulo):
        codecs.append(ModuloCodec(chosen, segments, wire, bucket_bytes=bucket_bytes))
    if whole:
        dtype = torch.bfloat16 if wire == Float(name="bfloat16") else None
        volatile = [k for k, (bucket, _) in enumerate(whole) if bucket.volatile]
        tensors = [v for _, v in whole]
        codecs.append(
            FloatCodec(tensors, bucket_bytes=bucket_bytes, dtype=dtype, any_value=volatile)
        )
    return Exchange(transport, codecs, timeout=timeout, gathered=gathered)


def _is_coded(bucket: Bucket) -> bool:
    """Statistics, whole numbers and half precision are sent whole: few, or small already."""
    exact = bucket.data.dtype in (torch.float32, torch.float64)
    return exact and bool(bucket.slots) and not bucket.volatile


def _segments(bucket: Bucket) -> list[Segment]:
    places = {}
    for slot in bucket.slots:
        is_plain = slot.dtype == bucket.data.dtype
        size = slot.shape.numel() * slot.dtype.itemsize // bucket.data.element_size()
        shape = tuple(slot.shape) if is_plain and slot.shape else (size,)
        places[slot.offset] = Segment(offset=slot.offset, shape=shape)
    return list(places.values())
