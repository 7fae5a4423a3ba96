"""The door: neighbours are let in, everybody else is refused, logged and costs next to nothing.

Whoever connects must finish a handshake and say a short hello within a few seconds, on one thread
that never blocks; only then does it get a channel. A visitor that dawdles, sends garbage, shows a
foreign, expired or revoked certificate, or claims to be somebody else is sent away.
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
from dataclasses import dataclass, field
from typing import Any

from matcha._io.keys import Keys, worker_of
from matcha.distributed.links.framing import Channel
from matcha.distributed.links.peers import Address
from matcha.errors import InputError

__all__ = ["Door", "Hello", "RefusedError", "dial"]

_log = logging.getLogger("matcha.links")
_MAGIC = b"matcha1\n"
_PREFIX = struct.Struct("!8sH")
_PATIENCE = 5.0  # seconds from connecting to the end of the hello
_MAX_VISITORS = 128  # beyond this many at once the longest-waiting goes
_LOGGED_EACH = 5  # refusals of a kind that are logged one by one; then every hundredth

Hello = dict[str, Any]


class RefusedError(Exception):
    """A visitor is not let in; the text says why."""


@dataclass(slots=True)
class _Visitor:
    connection: socket.socket
    where: str
    until: float
    greeted: bool = False
    data: bytearray = field(default_factory=bytearray)


class Door:
    """Listens at an address and hands over the channels of those who may come in.

    Args:
        address: where to listen.
        keys: certificates; None lets anybody say who it is (plain TCP).
        welcome: given a hello, the hello to answer with; raises `RefusedError`.
        admit: given the hello and its channel, takes both over.
    """

    def __init__(
        self,
        address: Address,
        keys: Keys | None,
        welcome: Callable[[Hello], Hello],
        admit: Callable[[Hello, Channel], None],
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._keys = keys
        self._context = keys.context(server=True) if keys else None
        self._welcome, self._admit = welcome, admit
        self._listener = _listen(address)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._visitors: dict[int, _Visitor] = {}
        self._open = True
        self._thread = threading.Thread(target=self._run, name="matcha-door", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    def close(self) -> None:
        """Stop listening."""
        self._open = False
        self._thread.join()

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._open:
            for key, _ in self._selector.select(timeout=0.2):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._advance(self._visitors[key.fd])
            now = time.monotonic()
            for visitor in [v for v in self._visitors.values() if now > v.until]:
                said = "half a hello" if visitor.greeted else "no complete handshake"
                self._refuse(visitor, f"{said} within {_PATIENCE:g} s")
        for visitor in list(self._visitors.values()):
            self._forget(visitor).close()
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, (host, port, *_) = self._listener.accept()
        except OSError:  # gone again, or no file handles left: neither is a reason to stop
            time.sleep(0.01)
            return
        connection.setblocking(False)
        if len(self._visitors) >= _MAX_VISITORS:
            oldest = next(iter(self._visitors.values()))
            self._refuse(oldest, "too many visitors at once")
        visitor = _Visitor(connection, f"{host}:{port}", time.monotonic() + _PATIENCE)
        visitor.greeted = self._context is None
        self._visitors[connection.fileno()] = visitor
        self._selector.register(connection, selectors.EVENT_READ)

    def _advance(self, visitor: _Visitor) -> None:
        """Go on with a visitor as far as its bytes allow."""
        try:
            if not visitor.greeted:
                self._shake_hands(visitor)
            # TLS may hold the rest already, which no selector sees: read until it wants more.
            while (hello := _read_hello(visitor)) is None:
                pass
            self._let_in(visitor, hello)
        except (ssl.SSLWantReadError, BlockingIOError):
            return
        except ssl.SSLWantWriteError:
            self._selector.modify(visitor.connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
        except RefusedError as refusal:
            self._refuse(visitor, str(refusal))
        except ssl.SSLCertVerificationError as error:
            self._refuse(visitor, f"its certificate does not count: {error.verify_message}")
        except (OSError, ValueError) as error:
            self._refuse(visitor, _short(error))

    def _shake_hands(self, visitor: _Visitor) -> None:
        # Only now: TLS costs a hundred times what a visitor who never says a word costs.
        assert self._context is not None
        if not isinstance(visitor.connection, ssl.SSLSocket):
            visitor.connection = self._context.wrap_socket(
                visitor.connection, server_side=True, do_handshake_on_connect=False
            )
        assert isinstance(visitor.connection, ssl.SSLSocket)
        visitor.connection.do_handshake()
        visitor.greeted = True

    def _let_in(self, visitor: _Visitor, hello: Hello) -> None:
        fingerprint = _check_identity(visitor.connection, self._keys, hello.get("rank"))
        answer = _pack(self._welcome(hello))
        if visitor.connection.send(answer) != len(answer):
            raise RefusedError("it does not read")
        self._admit(hello, Channel(self._forget(visitor), fingerprint))

    def _forget(self, visitor: _Visitor) -> socket.socket:
        del self._visitors[visitor.connection.fileno()]
        self._selector.unregister(visitor.connection)
        return visitor.connection

    def _refuse(self, visitor: _Visitor, reason: str) -> None:
        self.refused[reason] += 1
        count = self.refused[reason]
        if count <= _LOGGED_EACH or count % 100 == 0:
            level = logging.INFO if reason.startswith("not now") else logging.WARNING
            _log.log(
                level, "refused a visitor from %s: %s (%d so far)", visitor.where, reason, count
            )
        connection = self._forget(visitor)
        with suppress(OSError):
            connection.close()


def dial(
    address: Address, keys: Keys | None, context: ssl.SSLContext | None, hello: Hello, peer: int
) -> tuple[Channel, Hello]:
    """Connect to a neighbour and exchange hellos.

    Raises:
        OSError: it cannot be reached, or it is not who it should be.
        RefusedError: it is another worker than the one wanted, or answers nonsense.
    """
    connection = socket.create_connection(address, timeout=_PATIENCE)
    try:
        if context is not None:
            connection = context.wrap_socket(connection)
        connection.sendall(_pack(hello))
        visitor = _Visitor(connection, f"{address[0]}:{address[1]}", 0.0, greeted=True)
        while (answer := _read_hello(visitor)) is None:
            pass
        fingerprint = _check_identity(connection, keys, peer)
        if answer.get("rank") != peer:
            raise RefusedError(f"it is worker {answer.get('rank')!r}")
        return Channel(connection, fingerprint), answer
    except BaseException:
        connection.close()
        raise


def _read_hello(visitor: _Visitor) -> Hello | None:
    """The hello, once it is complete; None while more is to come. Reads nothing beyond it."""
    data = visitor.data
    end = _PREFIX.size
    if len(data) >= end:
        end += _PREFIX.unpack_from(data)[1]
    chunk = visitor.connection.recv(end - len(data))
    if not chunk:
        raise RefusedError(
            "it left without a word" if not data else "it left in the middle of a hello"
        )
    data += chunk
    if not _MAGIC.startswith(bytes(data[: len(_MAGIC)])):
        raise RefusedError("it does not speak our protocol")
    if len(data) < _PREFIX.size:
        return None
    if len(data) < _PREFIX.size + _PREFIX.unpack_from(data)[1]:
        return None
    hello = json.loads(data[_PREFIX.size :])
    if not isinstance(hello, dict):
        raise RefusedError("its hello is malformed")
    return hello


def _pack(hello: Hello) -> bytes:
    text = json.dumps(hello).encode()
    return _PREFIX.pack(_MAGIC, len(text)) + text


def _check_identity(connection: socket.socket, keys: Keys | None, claimed: Any) -> str:
    """Refuse a certificate that is revoked or another worker's; its fingerprint otherwise."""
    if keys is None or not isinstance(connection, ssl.SSLSocket):
        return ""
    shown = worker_of(connection.getpeercert())
    if shown is None or shown != claimed:
        raise RefusedError(f"it claims to be worker {claimed!r} with the certificate of {shown!r}")
    der = connection.getpeercert(binary_form=True) or b""
    fingerprint = hashlib.sha256(der).hexdigest()
    if fingerprint in keys.revoked():
        raise RefusedError(f"the certificate of worker {shown} is revoked")
    return fingerprint


def _listen(address: Address) -> socket.socket:
    try:
        return socket.create_server(address, backlog=256)
    except OSError as error:
        foreign = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        if not foreign:
            raise InputError(
                f"this worker cannot listen at {address[0]}:{address[1]}: {error.strerror}."
            ) from None
    # An address that others reach us by need not be one of this host's own (NAT, a service name).
    return socket.create_server(("", address[1]), backlog=256)


def _short(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"its handshake failed: {(error.reason or 'no reason').lower().replace('_', ' ')}"
    if isinstance(error, ConnectionError):
        return "it broke the connection"
    return "its hello is malformed"
