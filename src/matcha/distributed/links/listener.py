"""Listener: lets neighbours in; all others are refused, logged and cost next to nothing.

A client must finish a handshake and say a short hello within a few seconds, on one thread that
never blocks; only then does it get a stream of frames. A client that dawdles, sends garbage, shows
a foreign, expired or revoked certificate, or claims to be another worker is sent away. What it
says is read only when its certificate is in order, and its fault ends its connection and no other.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import selectors
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, get_type_hints

from matcha._io.keys import Keys, worker_of
from matcha.distributed.links.framing import FrameStream
from matcha.distributed.links.peers import Address, in_words
from matcha.errors import InputError

_log = logging.getLogger("matcha.links")
_MAGIC = b"matcha2\n"
_PREFIX = struct.Struct("!8sH")
_MAX_HELLO = 1024  # bytes
_PATIENCE = 5.0  # seconds from connecting to the end of the hello
_CONNECT = 2.0  # seconds: the wire may be back before TCP asks again, after 1, 3 and 7
_MAX_CLIENTS = 128  # beyond this many at once the longest-waiting goes
_LOGGED_EACH = 5  # refusals of a kind that are logged one by one; then every hundredth


class RefusedError(Exception):
    """A client is not let in; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """A short text after its length."""

    def encode(self) -> bytes:
        """Encode it as it is sent."""
        text = json.dumps(asdict(self)).encode()
        return _PREFIX.pack(_MAGIC, len(text)) + text


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(_Said):
    """What the two ends of a new connection say first."""

    rank: int
    to: int
    """Which worker the sender takes the receiver for."""
    network: str
    """A digest of the topology."""
    running: bool
    """Whether the sender has a state and trains."""
    stage: int = 0
    """How many times the sender's team has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest(_Said):
    """What a worker says first that wants to be taken into the team."""

    join: int
    """Its number; -1: the next one that is free."""
    token: str
    """The team's, where no certificate says who may come in."""


def decode_hello(text: bytes) -> Hello | JoinRequest:
    """Check and read what was received."""
    try:
        said = json.loads(text)
        kind: Any = JoinRequest if "join" in said else Hello
        types = get_type_hints(kind)
        hello: Hello | JoinRequest = kind(**{name: said[name] for name in types})
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RefusedError("its hello is malformed") from None
    if any(type(said[name]) is not of for name, of in types.items()):
        raise RefusedError("its hello is malformed")
    return hello


Admit = Callable[[FrameStream, Hello, Hello], None]
"""Takes over a connection: its stream, this end's hello, and the other's."""
TakeOver = Callable[[socket.socket, str], None]
"""Takes over the connection, and the address, of a worker that wants to join."""
Answer = Callable[[JoinRequest], TakeOver]
"""Checks such a worker's request; raises `RefusedError`."""


def refuse_newcomer(request: JoinRequest) -> TakeOver:
    """The sponsor of a team that takes in no others."""
    raise RefusedError("this team takes in no others")


class Revocations:
    """Fingerprints of revoked certificates, read again each time so that a list can be replaced.

    A list that cannot be read, perhaps because it is being replaced, leaves the last one in force.
    """

    def __init__(self, keys: Keys | None) -> None:
        self._keys, self._last, self._problem = keys, frozenset[str](), ""

    def current(self) -> frozenset[str]:
        """The fingerprints that are refused now."""
        if self._keys is not None:
            try:
                self._last, self._problem = self._keys.revoked(), ""
            except (OSError, ValueError) as error:
                if str(error) != self._problem:
                    self._problem = str(error)
                    text = "revoked.txt in %s cannot be read, and the last list stays in force: %s"
                    _log.error(text, self._keys.directory, error)
        return self._last


def keep_running(step: Callable[[], None], is_open: Callable[[], bool]) -> None:
    """Repeat a step of a thread that must live; what it raises is logged loudly, and it goes on."""
    while is_open():
        try:
            step()
        except Exception:
            _log.exception("%s failed and goes on", threading.current_thread().name)
            time.sleep(0.1)


@dataclass(slots=True, eq=False)
class _Client:
    connection: socket.socket
    where: str
    until: float
    is_secured: bool = False
    fingerprint: str = ""
    worker: int | None = None
    """Which worker its certificate is for."""
    data: bytearray = field(default_factory=bytearray)


class Listener:
    """Listens at an address and hands over the streams of those who may come in.

    Without keys it believes any claim. `welcome` returns the hello to answer with, or raises
    `RefusedError`; `admit` takes over a neighbour's connection; `sponsor` answers newcomers.
    """

    def __init__(
        self,
        address: Address,
        keys: Keys | None,
        revocations: Revocations,
        welcome: Callable[[Hello], Hello],
        admit: Admit,
        sponsor: Answer = refuse_newcomer,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._context = keys.context(server=True) if keys else None
        self._revocations = revocations
        self._welcome, self._admit, self._sponsor = welcome, admit, sponsor
        self._socket = _listen(address)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._clients: dict[socket.socket, _Client] = {}
        self._open = True
        self._thread = threading.Thread(target=self._run, name="matcha-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._open = False
        self._thread.join()

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        keep_running(self._serve, lambda: self._open)
        for client in list(self._clients.values()):
            self._release(client).close()
        self._selector.close()
        self._socket.close()

    def _serve(self) -> None:
        for key, _ in self._selector.select(timeout=0.2):
            if key.fileobj is self._socket:
                self._accept()
            elif (client := self._clients.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                self._advance(client)  # else refused since the call of `select`
        now = time.monotonic()
        for client in [c for c in self._clients.values() if now > c.until]:
            said = "half a hello" if client.is_secured else "no complete handshake"
            self._refuse(client, f"{said} within {_PATIENCE:g} s")

    def _accept(self) -> None:
        try:
            connection, where = self._socket.accept()
        except OSError:  # gone again, or no file handles left: neither is a reason to stop
            time.sleep(0.01)
            return
        connection.setblocking(False)
        if len(self._clients) >= _MAX_CLIENTS:
            oldest = next(iter(self._clients.values()))
            self._refuse(oldest, "too many clients at once")
        until = time.monotonic() + _PATIENCE
        self._attend(_Client(connection, in_words(where), until, self._context is None))

    def _attend(self, client: _Client) -> None:
        self._clients[client.connection] = client
        self._selector.register(client.connection, selectors.EVENT_READ)

    def _advance(self, client: _Client) -> None:
        """Go on with a client as far as its bytes allow."""
        try:
            if not client.is_secured:
                self._shake_hands(client)
            # TLS may hold the rest already, which no selector sees: read until it wants more.
            while (hello := _read_hello(client.connection, client.data)) is None:
                pass
            self._let_in(client, hello)
        except (ssl.SSLWantReadError, BlockingIOError):
            return
        except ssl.SSLWantWriteError:
            self._selector.modify(client.connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
        except RefusedError as refusal:
            self._refuse(client, str(refusal))
        except ssl.SSLCertVerificationError as error:
            self._refuse(client, f"its certificate is not accepted: {error.verify_message}")
        except ssl.SSLError as error:
            reason = (error.reason or "no reason").lower().replace("_", " ")
            self._refuse(client, f"its handshake failed: {reason}")
        except OSError:
            self._refuse(client, "it broke the connection")
        except Exception as error:
            _log.exception("a client from %s caused an error", client.where)
            self._refuse(client, f"it caused {type(error).__name__}")

    def _shake_hands(self, client: _Client) -> None:
        # Only now: TLS costs a hundred times what a client that never says a word costs.
        assert self._context is not None
        if not isinstance(client.connection, ssl.SSLSocket):
            client.connection = self._context.wrap_socket(
                self._release(client), server_side=True, do_handshake_on_connect=False
            )
            self._attend(client)
        secured: Any = client.connection
        secured.do_handshake()
        client.worker, client.fingerprint = identity(secured, self._revocations)
        client.is_secured = True

    def _let_in(self, client: _Client, hello: Hello | JoinRequest) -> None:
        if isinstance(hello, JoinRequest):
            if self._context is not None:
                if client.worker is None or hello.join not in (-1, client.worker):
                    raise RefusedError("its certificate is not for the worker that it wants to be")
                hello = replace(hello, join=client.worker)
            take_over = self._sponsor(hello)
            return take_over(self._release(client), client.where)
        if self._context is not None and client.worker != hello.rank:
            who = f"worker {hello.rank} with the certificate of {client.worker}"
            raise RefusedError(f"it claims to be {who}")
        answer = self._welcome(hello)
        content = answer.encode()
        if client.connection.send(content) != len(content):
            raise RefusedError("it does not read")
        self._admit(FrameStream(self._release(client), client.fingerprint), answer, hello)

    def _release(self, client: _Client) -> socket.socket:
        del self._clients[client.connection]
        self._selector.unregister(client.connection)
        return client.connection

    def _refuse(self, client: _Client, reason: str) -> None:
        self.refused[reason] += 1
        count = self.refused[reason]
        if count <= _LOGGED_EACH or count % 100 == 0:
            harmless = reason.startswith("not now") or "unexpected eof" in reason
            level = logging.INFO if harmless else logging.WARNING
            _log.log(level, "refused a client from %s: %s (%d so far)", client.where, reason, count)
        if client.connection in self._clients:
            self._release(client)
        with suppress(OSError):
            client.connection.close()


def dial(
    address: Address, context: ssl.SSLContext | None, revocations: Revocations, hello: Hello
) -> tuple[FrameStream, Hello]:
    """Connect to a neighbour and exchange hellos; raises `OSError` and `RefusedError`."""
    connection = _connect(address, context)
    connection.settimeout(_PATIENCE)
    try:
        fingerprint = ""
        if isinstance(connection, ssl.SSLSocket):
            connection.do_handshake()
            worker, fingerprint = identity(connection, revocations)
            if worker != hello.to:
                raise RefusedError(f"it has the certificate of worker {worker}")
        connection.sendall(hello.encode())
        data = bytearray()
        while (answer := _read_hello(connection, data)) is None:
            pass
        if not isinstance(answer, Hello):
            raise RefusedError("it wants to join where it should answer")
        if (answer.rank, answer.to, answer.network) != (hello.to, hello.rank, hello.network):
            raise RefusedError(f"it is worker {answer.rank}, or trains on another topology")
        return FrameStream(connection, fingerprint), answer
    except BaseException:
        connection.close()
        raise


def _connect(address: Address, context: ssl.SSLContext | None) -> socket.socket:
    """A connection before any handshake.

    TLS is put around the socket first: `ssl` loses an open one that is reset just before.
    """
    problem = OSError("it has no address")
    for family, kind, protocol, _, where in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        if context is not None:
            connection = context.wrap_socket(connection, do_handshake_on_connect=False)
        try:
            connection.settimeout(_CONNECT)
            connection.connect(where)
        except OSError as error:
            connection.close()
            problem = error
        else:
            return connection
    raise problem


def _read_hello(connection: socket.socket, data: bytearray) -> Hello | JoinRequest | None:
    """The hello, once it is complete; None while more is to come. Reads nothing beyond it."""
    end = _PREFIX.size
    if len(data) >= end:
        end += _PREFIX.unpack_from(data)[1]
    chunk = connection.recv(end - len(data))
    if not chunk:
        raise RefusedError("it left " + ("in the middle of a hello" if data else "without a word"))
    data += chunk
    if not _MAGIC.startswith(bytes(data[: len(_MAGIC)])):
        raise RefusedError("it does not speak our protocol")
    if len(data) < _PREFIX.size:
        return None
    size = _PREFIX.unpack_from(data)[1]
    if size > _MAX_HELLO:
        raise RefusedError("its hello is too long")
    return None if len(data) < _PREFIX.size + size else decode_hello(bytes(data[_PREFIX.size :]))


def identity(connection: ssl.SSLSocket, revocations: Revocations) -> tuple[int | None, str]:
    """The worker that a certificate is for, and its fingerprint, unless it is revoked."""
    worker = worker_of(connection.getpeercert())
    der = connection.getpeercert(binary_form=True) or b""
    fingerprint = hashlib.sha256(der).hexdigest()
    if fingerprint in revocations.current():
        raise RefusedError(f"the certificate of worker {worker} is revoked")
    return worker, fingerprint


def _listen(address: Address) -> socket.socket:
    host, port = address
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        found = []
    for family, *_, own in sorted(found, key=lambda info: info[0] != socket.AF_INET):
        try:
            return socket.create_server(own, family=family, backlog=256)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise InputError(
                    f"this worker cannot listen at {in_words(address)}: {error.strerror}."
                ) from None
    # An address at which others reach us need not be one of this host's own (NAT, a service name).
    if socket.has_dualstack_ipv6():
        everywhere, family = ("::", port), socket.AF_INET6
        return socket.create_server(everywhere, family=family, backlog=256, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=256)
