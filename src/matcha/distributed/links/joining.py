"""Joining: how a worker that was not planned for asks a team to take it in.

It dials any member and shows a certificate of the team's authority, or the team's token. The member
tells it who is there and where; it tries whom it can reach and how fast, and names its links. The
member publishes that and answers when the team has changed; then the worker makes its links.

Both ends speak in short JSON texts, each after its length, on one connection that ends with it.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from matcha._io.keys import Keys
from matcha.distributed.links.link_state import MAX_NEW
from matcha.distributed.links.listener import JoinRequest, RefusedError, Revocations, identity
from matcha.distributed.links.peers import Address, Peers, Team, free_ports, in_words
from matcha.errors import ExchangeError, InputError, MatchaError
from matcha.plans import PlanLike
from matcha.plans.staged import read_plan
from matcha.topology import Topology

__all__ = ["JoinedTeam", "Joining", "Sponsorship", "parse_address"]

_log = logging.getLogger("matcha.links")
_SIZE = struct.Struct("!I")
_MOST = 1 << 28  # bytes of what a member says
_MOST_ASKED = 1 << 16  # bytes of what a worker says that wants to join
_PATIENCE = 20.0  # seconds between two texts of the other end; a member says each second it lives
_ALIVE = 1.0  # seconds between signs of life
_REACH = 2.0  # seconds in which a connection must come about
_MOST_AT_ONCE = 16  # workers that one member sponsors at a time
_MOST_LINKS = 128


def parse_address(text: str, default_host: str = "") -> Address:
    """HOST:PORT as a pair.

    >>> parse_address("a.example:29600"), parse_address("[::1]:29600")
    (('a.example', 29600), ('::1', 29600))
    """
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or default_host
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"{text!r} is not the address of a worker: give HOST:PORT.")
    return host, int(port)


class _Talk:
    """One end of the conversation."""

    def __init__(self, connection: socket.socket, most: int) -> None:
        self._connection, self._most = connection, most
        connection.settimeout(_PATIENCE)

    def say(self, said: Mapping[str, Any]) -> None:
        text = json.dumps(said).encode()
        self._connection.sendall(_SIZE.pack(len(text)) + text)

    def hear(self) -> dict[str, Any]:
        (size,) = _SIZE.unpack(self._read(_SIZE.size))
        if size > self._most:
            raise RefusedError("it says far too much")
        try:
            said = json.loads(self._read(size))
        except (ValueError, RecursionError):
            raise RefusedError("it says nothing that can be read") from None
        if not isinstance(said, dict):
            raise RefusedError("it says nothing that makes sense")
        return said

    def is_gone(self, seconds: float) -> bool:
        """Whether the other end, which has nothing to say, has left within some seconds."""
        self._connection.settimeout(seconds)
        try:
            return not self._connection.recv(1)
        except (TimeoutError, ssl.SSLWantReadError):
            return False
        except OSError:
            return True
        finally:
            self._connection.settimeout(_PATIENCE)

    def close(self) -> None:
        with suppress(OSError):
            self._connection.close()

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = self._connection.recv(min(size - len(data), 1 << 16))
            if not chunk:
                raise RefusedError("it left in the middle")
            data += chunk
        return bytes(data)


# -- the member that is asked ----------------------------------------------------------------------


@dataclass(kw_only=True)
class Sponsorship:
    """One member's part: it speaks for workers that want to join, until they are in the plan."""

    rank: int
    token: str
    """Of the team; without one, and without keys, it takes in no others."""
    has_keys: bool
    greet: Callable[[], dict[str, Any]]
    """What a worker is told first; raises `RefusedError` where none can join now."""
    publish: Callable[[str, str], None]
    """Tells all workers of a request, by its name; an empty one takes it back."""
    find: Callable[[str, int], dict[str, Any] | None]
    """What has become of a request, by its name and worker; None: nothing yet."""
    is_open: Callable[[], bool]
    _busy: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(_MOST_AT_ONCE))

    def __call__(self, request: JoinRequest) -> Callable[[socket.socket, str], None]:
        """For the listener: check a request, and return what goes on with it."""
        if not self.has_keys:
            if not self.token:
                raise RefusedError("this team takes in no others: it has neither keys nor a token")
            if not hmac.compare_digest(request.token.encode(), self.token.encode()):
                raise RefusedError("it does not show this team's token")
        if not self._busy.acquire(blocking=False):
            raise RefusedError("not now: many want to join at once")

        def take_over(connection: socket.socket, where: str) -> None:
            arguments = connection, where, request
            name = "matcha-sponsor"
            threading.Thread(target=self._talk, args=arguments, name=name, daemon=True).start()

        return take_over

    def _talk(self, connection: socket.socket, where: str, request: JoinRequest) -> None:
        talk, name = _Talk(connection, _MOST_ASKED), os.urandom(6).hex()
        try:
            talk.say(self.greet())
            offer = talk.hear()
            worker, entry = self._check(offer, request)
            if entry is not None:
                self.publish(name, json.dumps(entry))
                _log.info("worker %d: a worker from %s wants to join", self.rank, where)
            said = 0.0
            while self.is_open():
                found = self.find(name, worker)
                if found is not None:
                    talk.say(found)
                    break
                if time.monotonic() > said + _ALIVE:
                    talk.say({"wait": True})
                    said = time.monotonic()
                if talk.is_gone(0.02):
                    _log.info("worker %d: who wanted to join from %s is gone", self.rank, where)
                    break
        except RefusedError as refusal:
            _log.warning("refused a worker from %s that wants to join: %s", where, refusal)
            with suppress(OSError):
                talk.say({"refused": str(refusal)})
        except OSError as error:
            _log.info("worker %d: who wanted to join from %s is gone: %s", self.rank, where, error)
        except Exception:
            _log.exception("a worker from %s that wants to join caused an error", where)
        finally:
            self.publish(name, "")
            talk.close()
            self._busy.release()

    def _check(
        self, offer: dict[str, Any], request: JoinRequest
    ) -> tuple[int, dict[str, Any] | None]:
        """The worker's number, or -1, and what is published; None where it is in the plan."""
        greeting = self.greet()
        links, listen = offer.get("links"), offer.get("listen")
        known, plan = len(greeting["peers"]), greeting["there"]
        if not isinstance(links, list) or not all(type(peer) is int for peer in links):
            raise RefusedError("it names no links")
        if request.join >= known + MAX_NEW:
            raise RefusedError(f"{request.join} is far above all other workers' numbers")
        if request.join in greeting["members"]:
            raise RefusedError(f"worker {request.join} is there already")
        if request.join in plan:  # it was lost, or a newcomer that died on the way: it comes back
            return request.join, None
        if not 0 < len(links) <= _MOST_LINKS or not {*links} <= {*plan}:
            raise RefusedError("it needs links to workers that are there")
        address = None
        if listen is not None:
            try:
                host, port = listen
                address = parse_address(f"{host}:{port}" if ":" not in host else f"[{host}]:{port}")
            except (ValueError, TypeError):
                raise RefusedError("it listens nowhere that makes sense") from None
            if connect_seconds(address) is None:  # behind NAT, say: then it dials the others
                address = None
        return request.join, {"rank": request.join, "links": sorted({*links}), "address": address}


# -- the worker that wants to join -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedTeam:
    """What a worker knows that was taken in."""

    rank: int
    team: Team
    plan: PlanLike
    """In force when it was taken in."""


class Joining:
    """A worker's conversation with the member that it asks to be taken in.

    Args:
        where: HOST:PORT of any member.
        rank: The number that it wants; None: the next one that is free, or its certificate's.
        keys: The directory of keys; None is plain TCP.
        token: The team's, without keys.
        listen: HOST:PORT at which others can reach it; None: the host from which it reaches them.

    Attributes:
        given: The plan with which the team started.
        facts: What must be the same on every worker.
        patience: Seconds without a sign of life after which a neighbour counts as lost, if fixed.

    Raises:
        ExchangeError: The member cannot be reached, or refuses.
    """

    def __init__(
        self,
        where: str,
        *,
        rank: int | None = None,
        keys: Keys | None = None,
        token: str = "",
        listen: str | None = None,
    ) -> None:
        self._where, self._listen = where, listen
        self.keys = keys
        self._rank = rank if keys is None else keys.rank
        self._talk = _Talk(self._dial(rank, token), _MOST)
        greeting = self._hear()
        try:
            self.given = read_plan(greeting["given"])
            self.facts: dict[str, str] = greeting["facts"]
            self._members: list[int] = greeting["members"]
            self._addresses = [None if a is None else (a[0], a[1]) for a in greeting["peers"]]
            self._degree = int(greeting["degree"])
            told = greeting["timeout"]
            self.patience = None if told is None else float(told)
            self._there: list[int] = greeting["there"]
        except (KeyError, TypeError, ValueError, MatchaError) as error:
            self._talk.close()
            raise ExchangeError(f"what {where} says of its team makes no sense: {error}") from None

    def check(self, own: Mapping[str, str]) -> None:
        """Give up where this worker would train otherwise than the team.

        Raises:
            InputError: Names what differs.
        """
        for name, value in own.items():
            if self.facts.get(name) != value:
                self._talk.close()
                raise InputError(
                    f"the team has another {name} ({self.facts.get(name)!r}, this worker "
                    f"{value!r}): join with the same choices."
                )

    def finish(self, links: Collection[int] = ()) -> JoinedTeam:
        """Name links, by default to the nearest members, and wait to be taken in."""
        listen, trial = self._own_address()
        try:
            self._say({"links": sorted(links) or self._nearest(), "listen": listen})
            while (answer := self._hear()).get("wait"):
                pass
        finally:
            if trial is not None:
                trial.close()
            self._talk.close()
        try:
            plan = read_plan(answer["plan"])
            addresses = [None if a is None else (a[0], a[1]) for a in answer["peers"]]
            team = Team(
                topology=plan.topology,
                peers=Peers(addresses=tuple(addresses)),
                gone=frozenset(answer["gone"]),
                network=answer["network"],
                stage=answer["stage"],
            )
            return JoinedTeam(rank=answer["rank"], team=team, plan=plan)
        except (KeyError, TypeError, ValueError, MatchaError) as error:
            raise ExchangeError(f"{self._where} answers nonsense: {error}") from None

    def close(self) -> None:
        """Give up."""
        self._talk.close()

    def _dial(self, rank: int | None, token: str) -> socket.socket:
        address = parse_address(self._where)
        try:
            connection = socket.create_connection(address, timeout=_PATIENCE)
            try:
                self._host = connection.getsockname()[0]
                if self.keys is not None:
                    connection = self.keys.context(server=False).wrap_socket(connection)
                    identity(connection, Revocations(self.keys))
                wanted = -1 if rank is None else rank
                connection.sendall(JoinRequest(join=wanted, token=token).encode())
            except BaseException:
                connection.close()
                raise
        except (OSError, RefusedError) as error:
            raise ExchangeError(f"{self._where} cannot be joined: {error}.") from None
        return connection

    def _say(self, said: Mapping[str, Any]) -> None:
        try:
            self._talk.say(said)
        except OSError as error:
            raise ExchangeError(f"{self._where} is gone: {error}.") from None

    def _hear(self) -> dict[str, Any]:
        try:
            said = self._talk.hear()
        except (OSError, RefusedError) as error:
            self._talk.close()
            raise ExchangeError(
                f"{self._where} does not take this worker in: {error}; its log says why."
            ) from None
        if "refused" in said:
            self._talk.close()
            raise ExchangeError(f"{self._where} does not take this worker in: {said['refused']}.")
        return said

    def _own_address(self) -> tuple[Address | None, socket.socket | None]:
        """Where others may reach this worker, and a socket there that a member can try."""
        known = None if self._rank not in self._there else self._addresses[self._rank]
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        while known is None and self._listen is None:
            # A worker that was lost from this host comes back to its own.
            others = {address[1] for address in self._addresses if address is not None}
            own = self._host, free_ports(self._host, 1, others)[0]
            with suppress(OSError):  # another newcomer on this host was quicker: the next port
                return own, socket.create_server(own, family=family)
        # A place that is kept has the address that others know.
        own = parse_address(str(self._listen), self._host) if known is None else known
        try:
            family = socket.AF_INET6 if ":" in own[0] else socket.AF_INET
            return own, socket.create_server(own, family=family)
        except OSError:
            return own, None

    def _nearest(self) -> list[int]:
        """The members that answer first, as many as a member usually has neighbours."""
        known = ((rank, self._addresses[rank]) for rank in self._members)
        open_to = {rank: address for rank, address in known if address is not None}
        with ThreadPoolExecutor(16) as pool:
            seconds = dict(zip(open_to, pool.map(connect_seconds, open_to.values()), strict=True))
        found = sorted((time, rank) for rank, time in seconds.items() if time is not None)
        if not found:
            raise ExchangeError("this worker reaches no member of the team but the one it asked.")
        return sorted(rank for _, rank in found[: self._degree])


def connect_seconds(address: Address) -> float | None:
    """How long it takes to connect; None where none comes about."""
    started = time.perf_counter()
    try:
        socket.create_connection(address, timeout=_REACH).close()
    except OSError:
        _log.debug("%s cannot be reached", in_words(address))
        return None
    return time.perf_counter() - started


def usual_degree(topology: Topology, members: Collection[int]) -> int:
    """How many neighbours a member has, on average and rounded; at least two."""
    links = sum({*link} <= {*members} for link in topology.links)
    return max(2, round(2 * links / max(1, len(members))))
