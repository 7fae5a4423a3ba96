"""Joining: how a worker that was not planned for asks a team to take it in.

It dials any member and shows a certificate of the team's authority, or the team's token. The member
tells it who is there and where; it tries whom it can reach and how fast, and names its links. The
member publishes that and answers when the team has changed; then the worker makes its links. A
member that has yet to begin, or is busy, asks it to come again.

Both ends speak in short JSON texts, each after its length, on one connection that ends with it.
`matcha.distributed.elastic.sponsor` is the member's side.
"""

from __future__ import annotations

import json
import logging
import socket
import ssl
import struct
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from matcha._io.keys import Keys
from matcha.distributed.links.listener import JoinRequest, RefusedError, Revocations, identity
from matcha.distributed.links.peers import Address, Peers, Team, free_ports, in_words
from matcha.errors import ExchangeError, InputError, MatchaError
from matcha.plans.staged import read_plan

_log = logging.getLogger("matcha.links")
_SIZE = struct.Struct("!I")
_MOST = 1 << 28  # bytes of what a member says
_PATIENCE = 20.0  # seconds between two texts of the other end; a member says each second it lives
_REACH = 2.0  # seconds in which a connection must come about
_COMES_AGAIN = 300.0  # seconds in which a member should have begun
_PAUSE = 1.0  # seconds between two attempts


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


class Talk:
    """One end of the conversation."""

    def __init__(self, connection: socket.socket, most: int) -> None:
        self._connection, self._most = connection, most
        connection.settimeout(_PATIENCE)
        self._file = connection.makefile("rb")

    def say(self, said: Mapping[str, Any]) -> None:
        """Send a text."""
        text = json.dumps(said).encode()
        self._connection.sendall(_SIZE.pack(len(text)) + text)

    def hear(self) -> dict[str, Any]:
        """Wait for a text; raises `RefusedError` for nonsense."""
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
        """End it."""
        with suppress(OSError):
            self._file.close()
            self._connection.close()

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise RefusedError("it left in the middle")
        return data


def come_again(connection: socket.socket, where: str) -> None:
    """Ask a worker that wants to join to come again: none can answer it now."""
    _log.debug("a worker from %s wants to join, and is asked to come again", where)
    talk = Talk(connection, 0)
    with suppress(OSError):
        talk.say({"later": "it has yet to begin, or many want to join at once"})
    talk.close()


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
        self._where, self._listen, self.keys = where, listen, keys
        self._rank = rank if keys is None else keys.rank
        request = JoinRequest(join=-1 if rank is None else rank, token=token)
        end = time.monotonic() + _COMES_AGAIN
        self._talk = Talk(self._dial(request), _MOST)
        while "later" in (greeting := self._hear()):
            self._talk.close()
            if time.monotonic() > end:
                raise self._refused(greeting["later"])
            _log.info("%s asks to come again: %s", where, greeting["later"])
            time.sleep(_PAUSE)
            self._talk = Talk(self._dial(request), _MOST)
        try:
            self.given = read_plan(greeting["given"])
            self.facts: dict[str, str] = greeting["facts"]
            self._members: list[int] = greeting["members"]
            self._addresses = Peers.from_json(greeting["peers"]).addresses
            self._degree = int(greeting["degree"])
            told = greeting["timeout"]
            self.patience = None if told is None else float(told)
            self._there: list[int] = greeting["there"]
        except (LookupError, TypeError, ValueError, MatchaError) as error:
            self._talk.close()
            raise ExchangeError(f"what {where} says of its team makes no sense: {error}") from None

    def check(self, own: Mapping[str, str]) -> None:
        """Raise `InputError`, which names what differs, where this worker would train otherwise."""
        for name, value in own.items():
            if self.facts.get(name) != value:
                self._talk.close()
                raise InputError(
                    f"the team has another {name} ({self.facts.get(name)!r}, this worker "
                    f"{value!r}): join with the same choices."
                )

    def finish(self, links: Collection[int] = ()) -> tuple[int, Team]:
        """Name links, by default to the nearest members, and wait to be taken in: rank and team."""
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
            topology = read_plan(answer["plan"]).topology
            return answer["rank"], Team.from_json(answer, topology, answer["network"])
        except (LookupError, TypeError, ValueError, MatchaError) as error:
            raise ExchangeError(f"{self._where} answers nonsense: {error}") from None

    def close(self) -> None:
        """Give up."""
        self._talk.close()

    def _dial(self, request: JoinRequest) -> socket.socket:
        address = parse_address(self._where)
        try:
            connection = socket.create_connection(address, timeout=_PATIENCE)
            try:
                self._host = connection.getsockname()[0]
                if self.keys is not None:
                    connection = self.keys.context(server=False).wrap_socket(connection)
                    identity(connection, Revocations(self.keys))
                connection.sendall(request.encode())
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
            raise self._refused(f"{error}; its log says why") from None
        if "refused" in said:
            self._talk.close()
            raise self._refused(said["refused"])
        return said

    def _refused(self, why: str) -> ExchangeError:
        return ExchangeError(f"{self._where} does not take this worker in: {why}.")

    def _own_address(self) -> tuple[Address | None, socket.socket | None]:
        """Where others may reach this worker, and a socket there that a member can try."""
        known = None if self._rank not in self._there else self._addresses[self._rank]
        while known is None and self._listen is None:
            # A worker that was lost from this host comes back to its own.
            others = {address[1] for address in self._addresses if address is not None}
            own = self._host, free_ports(self._host, 1, others)[0]
            with suppress(OSError):  # another newcomer on this host was quicker: the next port
                return own, _server(own)
        # A place that is kept has the address that others know.
        own = parse_address(str(self._listen), self._host) if known is None else known
        try:
            return own, _server(own)
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


def _server(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    return socket.create_server(address, family=family)


def connect_seconds(address: Address) -> float | None:
    """How long it takes to connect; None where none comes about."""
    started = time.perf_counter()
    try:
        socket.create_connection(address, timeout=_REACH).close()
    except OSError:
        _log.debug("%s cannot be reached", in_words(address))
        return None
    return time.perf_counter() - started
