"""LinkTransport: links of our own, one connection each, for networks that nobody vouches for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch

from matcha._io.keys import Keys
from matcha.distributed.links.change import Change
from matcha.distributed.links.connection import Link, Ticket
from matcha.distributed.links.framing import Kind
from matcha.distributed.links.neighborhood import Neighborhood
from matcha.distributed.links.news import News
from matcha.distributed.links.peers import Peers
from matcha.distributed.transports.base import Buffer, Message, Pending, Transport
from matcha.errors import ExchangeError, InputError, PeerLostError
from matcha.topology import Topology

__all__ = ["LinkTransport"]

_ASK_ANOTHER = 2.0  # seconds after which a neighbour that gives no state is not alone asked for it


class LinkTransport(Transport):
    """Messages over one TCP connection a link of the topology, and no other connection.

    Making one waits until all links are up, or until a neighbour says that training is under way
    (`is_late`): then this worker takes a neighbour's state first, as `Gossip` does.

    Args:
        topology: the workers and their links.
        rank: this worker's number.
        peers: where workers can be reached.
        keys: TLS 1.3 with a certificate a worker; None is plain TCP, for networks that are trusted.
        silence: seconds without a sign of life after which a neighbour counts as lost.
        timeout: seconds to wait for all neighbours at the start.

    Raises:
        ExchangeError: neighbours did not come in time; they are named.
    """

    threads = True

    def __init__(
        self,
        topology: Topology,
        rank: int,
        peers: Peers,
        *,
        keys: Keys | None = None,
        silence: float = 1.5,
        timeout: float = 300.0,
    ) -> None:
        if topology.directed:  # a connection carries both ways, whatever messages travel on it
            pairs = {(min(link), max(link)) for link in topology.links}
            topology = Topology.from_links(sorted(pairs), topology.num_workers)
        peers.check(topology)
        if not 0 <= rank < topology.num_workers:
            raise InputError(f"there is no worker {rank} among {topology.num_workers}.")
        self.rank, self.num_workers = rank, topology.num_workers
        self.searches_cause = True
        self.neighborhood = Neighborhood(topology, rank, peers, keys, silence, self.name)
        self.council = self.calls = self.neighborhood.council
        self.asks = self.neighborhood.asks
        try:
            self.neighborhood.wait_for_all(timeout)
        except BaseException:
            self.close()
            raise

    @property
    def members(self) -> tuple[int, ...]:
        """Who is within reach over links that are up, this worker included."""
        with self.neighborhood.lock:
            return self.neighborhood.table.members

    @property
    def changes(self) -> tuple[Change, ...]:
        """Who came and went so far, as this worker learnt it."""
        with self.neighborhood.lock:
            return tuple(self.neighborhood.changes)

    @property
    def is_late(self) -> bool:
        """Whether others train already and this worker needs a state."""
        return self.neighborhood.is_late

    @property
    def is_behind(self) -> bool:
        """Whether this worker was away for so long that it should take another's state."""
        return self.neighborhood.is_behind

    @property
    def most_behind(self) -> float:
        """How many iterations behind its neighbours a worker may go on by itself."""
        return self.neighborhood.most_behind

    @most_behind.setter
    def most_behind(self, iterations: float) -> None:
        self.neighborhood.most_behind = iterations

    # -- messages ---------------------------------------------------------------------------------

    def post(self, messages: Sequence[Message]) -> Pending:
        """Start the messages on their links."""
        with self.neighborhood.lock:
            tickets = [self._post(m, m.incoming) for m in messages if m.incoming is not None]
            tickets += [self._post(m, None) for m in messages if m.outgoing is not None]
        return _Tickets(self, tickets)

    def _post(self, message: Message, incoming: torch.Tensor | None) -> tuple[int, Ticket | None]:
        near = self.neighborhood
        link = near.links.get(message.peer)
        if link is None or not link.is_up:
            if message.peer not in near.speeds:
                raise ExchangeError(f"{self.name(message.peer)} is no neighbour of this worker.")
            return message.peer, None
        if incoming is not None:
            return message.peer, link.receive(message.tag, _bytes(incoming))
        assert message.outgoing is not None
        ticket = Ticket(link)
        link.send(Kind.DATA, message.tag, [_bytes(message.outgoing)], ticket)
        return message.peer, ticket

    def lost_error(self, peer: int, problem: str, patience: float) -> PeerLostError:
        """The error for a neighbour that failed us; in a team that goes on, without a search."""
        if not self.searches_cause:
            return PeerLostError(f"{self.name(peer)} {problem}.", peer)
        return PeerLostError(str(self.failure(peer, problem, patience)), peer)

    def reason(self, peer: int) -> str:
        """Why a neighbour's last link ended, as the end of a sentence."""
        return self.neighborhood.reasons.get(peer, "cannot be reached")

    def report_waiting_on(self, peer: int | None) -> None:
        """Tell everybody within reach."""
        if peer is None:
            return
        with (near := self.neighborhood).lock:
            near.accusations[self.rank] = peer
            near.tell(News(accused={self.rank: peer}))

    def waiting_on(self, rank: int) -> int | None:
        """What the news says."""
        with (near := self.neighborhood).lock:
            return near.accusations.get(rank)

    def set_note(self, what: str, value: str) -> None:
        """Let the news carry it."""
        with (near := self.neighborhood).lock:
            near.note(what, value)

    def get_note(self, rank: int, what: str) -> str:
        """What the news says."""
        with (near := self.neighborhood).lock:
            return near.notes.get((rank, what), (0, ""))[1]

    # -- meetings ---------------------------------------------------------------------------------

    def start_at(self, iteration: int) -> None:
        """Take part from an iteration on: this worker has a state."""
        with (near := self.neighborhood).lock:
            near.next_iteration = iteration
            was_late, near.is_late = near.is_late, False
            near.is_behind = False
            near.is_running = True
            if was_late:  # what was promised on these links belongs to another state
                near.drop_all("starts anew")

    def begin(self, iteration: int) -> None:
        """Say, before its first meeting, that an iteration's round has begun here."""
        with (near := self.neighborhood).lock:
            near.next_iteration = iteration + 1

    def meets(self, peer: int, iteration: int) -> bool:
        """Whether the link to a neighbour is up for the meetings of an iteration; both ends agree.

        While the other end has yet to say from where on it takes part, this waits for it.
        """
        with (near := self.neighborhood).lock:
            while True:
                link = near.links.get(peer)
                if link is None or link.my_next is None:
                    return False
                if link.is_up:
                    return iteration >= link.since
                near.changed.wait(near.silence)

    def connection(self, peer: int) -> object:
        """The link to a neighbour; another one after each break."""
        with (near := self.neighborhood).lock:
            return near.links.get(peer)

    def ask_for_state(self, timeout: float) -> tuple[int, bytearray]:
        """A neighbour's state and that neighbour; for a worker that is late.

        Raises:
            ExchangeError: nobody gave one in time.
        """
        end = time.monotonic() + timeout
        asked: list[Link] = []
        again = 0.0
        with (near := self.neighborhood).lock:
            while (now := time.monotonic()) < end:
                for link in asked:
                    if link.state is not None:
                        return link.peer, link.state
                self._check_not_over(asked)
                asked = [link for link in asked if link.ended is None]
                # Two that come back together have nothing to give each other, and would wait
                # for each other. One who has may be held up: then the next is asked, too.
                able = [link for _, link in sorted(near.links.items()) if link.runs]
                other = next((link for link in able if link not in asked), None)
                is_due = now > again and not any(link.is_giving for link in asked)
                if other is not None and (is_due or not asked):
                    other.send(Kind.ASK)
                    asked.append(other)
                    again = now + _ASK_ANOTHER
                near.changed.wait(0.2)
        raise ExchangeError(f"no neighbour gave its state within {timeout:g} s.")

    def _check_not_over(self, asked: Sequence[Link]) -> None:
        gone = [link for link in asked if link.ended is not None and link.finished is not None]
        if gone and len(gone) == len(asked):
            raise ExchangeError(f"the run is over: {self.name(gone[0].peer)} {gone[0].ended}.")

    def give_state(self, contents: Sequence[Buffer]) -> None:
        """Answer everybody who asked for this worker's state."""
        with (near := self.neighborhood).lock:
            for peer in near.asks:
                link = near.links.get(peer)
                if link is not None and not link.is_up:
                    link.send(Kind.STATE, 0, contents)
            near.asks.clear()

    def leave(self) -> None:
        """Stop taking part: this worker fell far behind and needs a state like a new one."""
        with (near := self.neighborhood).lock:
            near.is_running, near.is_late = False, True
            near.drop_all("takes a newer state")

    def seconds_per_megabyte(self) -> dict[int, float]:
        """What each link's messages took lately, by neighbour; only links that carried some."""
        with (near := self.neighborhood).lock:
            return {p: s.seconds / s.megabytes for p, s in near.speeds.items() if s.megabytes}

    def num_sockets(self) -> int:
        """Connections held, and the door where there is one."""
        with (near := self.neighborhood).lock:
            return len(near.links) + (near.door is not None)

    def cut(self, peer: int) -> None:
        """End a link and keep it from coming back: a fault on purpose."""
        self.neighborhood.cut(peer)

    def mend(self, peer: int) -> None:
        """Let a link that was cut come back."""
        self.neighborhood.mend(peer)

    def close(self) -> None:
        """Say goodbye and end all links."""
        self.neighborhood.close()


class _Tickets(Pending):
    def __init__(
        self, transport: LinkTransport, tickets: Iterable[tuple[int, Ticket | None]]
    ) -> None:
        self.transport = transport
        self.tickets = list(tickets)

    def has_come(self) -> bool:
        with self.transport.neighborhood.lock:  # of a link that has ended `wait` tells
            return all(t is None or t.done or t.link.ended is not None for _, t in self.tickets)

    def wait(self, timeout: float) -> None:
        transport, near = self.transport, self.transport.neighborhood
        patience = min(2.0, 0.2 * timeout)
        end = time.monotonic() + timeout - patience
        while self.tickets:
            peer, ticket = self.tickets[0]
            problem = None
            with near.lock:
                while problem is None and not (ticket is not None and ticket.is_done):
                    if ticket is None or ticket.link.ended is not None:
                        problem = (ticket and ticket.link.ended) or transport.reason(peer)
                    elif time.monotonic() > end and near.anyone_is_away():
                        end = time.monotonic() + timeout - patience
                    elif time.monotonic() > end:
                        problem = f"did not answer within {timeout:g} s"
                        near.lost(ticket.link, problem)
                    else:
                        near.changed.wait(end - time.monotonic())
            if problem is not None:
                if ticket is not None:
                    ticket.link.settle()
                raise transport.lost_error(peer, problem, patience)
            self.tickets.pop(0)


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().view(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
