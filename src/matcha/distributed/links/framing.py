"""FrameStream: one connection that carries frames both ways, plain or under TLS.

A frame is 20 bytes (kind, tag, size, check sum) and its content. One thread reads and another
writes; neither holds the interpreter's lock while bytes move, and contents move straight from and
into tensors. TCP's own check sum of 16 bits misses one flipped pair in 65536, and network cards
and switches flip bits after it was checked; so plain frames carry a CRC-32. TLS has better.
"""

from __future__ import annotations

import enum
import select
import socket
import ssl
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress

from matcha.distributed.transports.base import Buffer

_HEADER = struct.Struct("!BxxxIQ")
_CHECK = struct.Struct("!I")
_TLS_STEP = 1 << 18  # bytes per write under the lock: the reader gets its turn in between
_FIRST_READ = 1 << 20  # bytes of memory for a content of which nothing has arrived


class Kind(enum.IntEnum):
    """What a frame is about."""

    DATA = 1
    """A tensor of an exchange; its tag says which."""
    HEARTBEAT = 2
    """Nothing: the sender lives."""
    UP = 3
    """The sender takes part from an iteration on, the tag; with all it knows about links."""
    UPDATE = 4
    """Links that came or went, and notes of workers."""
    ASK_STATE = 5
    """The sender has no state (any more) and wants the receiver's."""
    STATE = 6
    """A whole state, for a neighbour that asked."""
    GOODBYE = 7
    """The sender has finished."""
    REDUCE = 8
    """A part of a collective call, towards the root of the tree."""
    MISSED = 9
    """The sender wants the result of a collective call that it missed."""
    RESULT = 10
    """The result of a collective call, away from the root or to a worker that missed it."""


class ClosedError(Exception):
    """The connection is gone, or must go; the text says why, as the end of a sentence."""


def frame_header(
    kind: int, tag: int, size: int, contents: Sequence[Buffer] = (), *, checked: bool = True
) -> bytes:
    """What a frame begins with; its check sum is over kind, tag, size and content."""
    header = _HEADER.pack(kind, tag, size)
    check = 0
    for part in (header, *contents) if checked else ():
        check = zlib.crc32(part, check)
    return header + _CHECK.pack(check)


class FrameStream:
    """Frames over a connected socket.

    OpenSSL allows one thread at a time in a connection: under TLS the socket does not block, both
    threads take turns under a lock, and each waits for the network outside of it.
    """

    def __init__(self, connection: socket.socket, fingerprint: str = "") -> None:
        self._socket = connection
        self.fingerprint = fingerprint  # of the other end's certificate
        self._secure = isinstance(connection, ssl.SSLSocket)
        self._lock = threading.Lock()
        self._is_shut = False
        self._users = 2  # reader and writer: the last one to leave closes the socket
        self.is_checked = not self._secure  # TLS has authenticated every byte
        self._check = self._expected = 0  # of the frame that is read
        self.last_heard = time.monotonic()
        self.longest_gap = 0.0
        """Seconds between two signs of life since it was last set back."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(not self._secure)

    def send(self, kind: Kind, tag: int = 0, contents: Sequence[Buffer] = ()) -> None:
        """Write one frame; returns when the kernel has all of it."""
        views = [memoryview(part).cast("B") for part in contents if len(part)]
        size = sum(len(view) for view in views)
        try:
            header = frame_header(kind, tag, size, views, checked=self.is_checked)
            self._write([memoryview(header), *views])
        except (OSError, ValueError) as error:
            raise ClosedError(f"lost its connection ({error})") from None

    def _write(self, views: list[memoryview]) -> None:
        if not self._secure:
            while views:
                _advance(views, self._socket.sendmsg(views))
            return
        if len(views) > 1 and sum(map(len, views)) <= _TLS_STEP:
            views = [memoryview(b"".join(views))]  # one record for a small frame
        while views:
            with self._lock:
                try:
                    _advance(views, self._socket.send(views[0][:_TLS_STEP]))
                    continue
                except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                    pass
            self._wait(select.POLLOUT)

    def receive_header(self) -> tuple[Kind, int, int]:
        """Read the next frame's kind, tag and size; its content must be read next."""
        header = bytearray(_HEADER.size + _CHECK.size)
        self._fill(memoryview(header))
        kind, tag, size = _HEADER.unpack_from(header)
        (self._expected,) = _CHECK.unpack_from(header, _HEADER.size)
        self._check = zlib.crc32(header[: _HEADER.size]) if self.is_checked else 0
        if not size:
            self._compare()
        try:
            return Kind(kind), tag, size
        except ValueError:
            raise ClosedError(f"sent a frame of unknown kind {kind}") from None

    def receive(self, size: int) -> bytearray:
        """Read a content, in memory that grows with what arrives and not with what is declared."""
        content = bytearray(min(size, _FIRST_READ))
        self._fill(memoryview(content))
        while len(content) < size:
            more = bytearray(min(size - len(content), len(content)))
            self._fill(memoryview(more))
            content += more
        if size:
            self._compare()
        return content

    def receive_into(self, view: memoryview) -> None:
        """Read a content into a view."""
        self._fill(view)
        if len(view):
            self._compare()

    def _compare(self) -> None:
        if self.is_checked and self._check != self._expected:
            raise ClosedError(
                "sent a frame that changed on its way (its check sum is wrong): a network card, "
                "a switch or memory flips bits"
            )

    def _fill(self, view: memoryview) -> None:
        got, end = 0, len(view)
        try:
            while got < end:
                count = 0 if self._is_shut else self._read(view[got:])
                if not count:
                    raise ClosedError("closed its connection: it crashed or was killed")
                if self.is_checked:  # while it is in the cache
                    self._check = zlib.crc32(view[got : got + count], self._check)
                got += count
                now = time.monotonic()
                self.longest_gap = max(self.longest_gap, now - self.last_heard)
                self.last_heard = now
        except (OSError, ValueError) as error:
            raise ClosedError(f"lost its connection ({error})") from None

    def _read(self, view: memoryview) -> int:
        if not self._secure:
            return self._socket.recv_into(view)
        while True:
            with self._lock:
                try:
                    return self._socket.recv_into(view)
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    pass
            self._wait(select.POLLIN)

    def _wait(self, events: int) -> None:
        poll = select.poll()
        poll.register(self._socket.fileno(), events)
        poll.poll()

    def finish(self) -> None:
        """Send nothing more; what arrives is still read.

        Closing at once, with something unread, would take back what the other end has not read.
        """
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)

    def shut(self) -> None:
        """End the connection now; a thread that reads or writes wakes up and learns it."""
        self._is_shut = True
        with suppress(OSError):
            # Not SSLSocket.shutdown, which would forget the TLS layer under the other thread.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def refuse(self) -> None:
        """End a connection that no thread reads or writes yet."""
        self.shut()
        self._socket.close()

    def leave(self) -> None:
        """The reader and the writer call this when they end; the last one closes the socket."""
        with self._lock, suppress(OSError):
            self._users -= 1
            if not self._users:
                self._socket.close()


def _advance(views: list[memoryview], count: int) -> None:
    while count and views:
        if count >= len(views[0]):
            count -= len(views.pop(0))
        else:
            views[0] = views[0][count:]
            count = 0
