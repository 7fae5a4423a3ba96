"""What a neighbour says may end its link, with a logged reason, and never a worker."""

from __future__ import annotations

import hashlib
import json
import random
import socket
import ssl
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.elastic.test_membership import wait_until
from tests.distributed.links.linked import local_peers

from matcha import families
from matcha._io.keys import new_keys
from matcha.distributed import Keys, LinkTransport, Message, Peers
from matcha.distributed.links import connection as connection_module
from matcha.distributed.links import transport as transport_module
from matcha.distributed.links.connection import Connection, LinkState
from matcha.distributed.links.framing import ClosedError, FrameStream, Kind, frame_header
from matcha.distributed.links.link_state import LinkVersions, Update
from matcha.distributed.links.listener import Hello
from matcha.distributed.transports.collectives import mean_

TOPOLOGY = families.path(3)
HOSTILE = 2  # it dials worker 1, its only neighbour; worker 0 is out of its reach
DIGEST = LinkVersions(HOSTILE, TOPOLOGY).tree.digest.encode()


@pytest.fixture(autouse=True)
def no_return_is_hoped_for(monkeypatch) -> None:
    """The stranger stays away once its link has ended: do not hold every test up for it."""
    monkeypatch.setattr(transport_module, "_RETURNS", 0.2)


def said(links: Any = (), notes: Any = ()) -> bytes:
    return json.dumps({"links": links, "notes": notes}).encode()


class Stranger:
    """A process with worker 2's place that says whatever it likes."""

    def __init__(self, address: tuple[str, int], network: str, keys: Keys | None = None) -> None:
        self.address, self.network, self.keys = address, network, keys

    def dial(self, *, running: bool) -> None:
        """Connect and say hello."""
        self.socket = socket.create_connection(self.address, timeout=60)
        if self.keys is not None:
            self.socket = self.keys.context(server=False).wrap_socket(self.socket)
        hello = Hello(rank=HOSTILE, to=1, network=self.network, running=running)
        self.socket.sendall(hello.encode())
        prefix = self._read(10)
        self._read(int.from_bytes(prefix[8:], "big"))

    def _read(self, size: int) -> bytes:
        content = b""
        while len(content) < size:
            content += self.socket.recv(size - len(content))
        return content

    def send(self, kind: int, tag: int = 0, content: bytes = b"", size: int | None = None) -> None:
        """Send a frame, perhaps with less than it announces."""
        announced = len(content) if size is None else size
        header = frame_header(kind, tag, announced, [content])
        with suppress(OSError):  # it may have been sent away already
            self.socket.sendall(header + content)

    def come_up(self, iteration: int = 0) -> None:
        """Agree on an iteration as a neighbour does."""
        self.send(Kind.UP, iteration, said([[1, 2, 1]]))

    def close(self) -> None:
        self.socket.close()


@contextmanager
def besieged(
    keys: Path | None = None, timeout: float | None = 90.0
) -> Iterator[tuple[LinkTransport, LinkTransport, Stranger]]:
    """Two honest workers in a row and a stranger in the place of the third, all of them started."""
    found = local_peers(3).addresses
    peers = Peers(addresses=(found[0], found[1], None))  # nobody dials the third
    honest: dict[int, LinkTransport] = {}

    def start(rank: int) -> None:
        own = Keys(directory=keys, rank=rank) if keys else None
        honest[rank] = LinkTransport(
            TOPOLOGY, rank, peers, keys=own, timeout=timeout, start_timeout=150
        )

    threads = [threading.Thread(target=start, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    address = found[1]
    assert address is not None
    network = hashlib.sha256(repr(TOPOLOGY.links).encode()).hexdigest()[:16]
    stranger = Stranger(address, network, Keys(directory=keys, rank=HOSTILE) if keys else None)

    def is_there() -> bool:
        with suppress(OSError):
            stranger.dial(running=False)
            return True
        return False

    wait_until(is_there)
    stranger.come_up()
    stranger.send(Kind.REDUCE, 0, DIGEST)  # its part of the first collective call
    for thread in threads:
        thread.join(150)
    zero, one = honest[0], honest[1]
    try:
        wait_until(lambda: zero.members == one.members == (0, 1, 2))
        yield zero, one, stranger
    finally:
        stranger.close()
        for transport in honest.values():
            transport.close()


def exchange(zero: LinkTransport, one: LinkTransport) -> None:
    """The honest two still hear each other, and average what they have."""
    into = torch.zeros(1)
    pending = zero.post([Message(peer=1, tag=3, incoming=into)])
    one.post([Message(peer=0, tag=3, outgoing=torch.ones(1))]).wait(60)
    pending.wait(60)
    assert into.item() == 1.0
    values = [torch.tensor([2.0]), torch.tensor([4.0])]
    threads = [
        threading.Thread(target=mean_, args=(transport, [value], 60.0))
        for transport, value in zip((zero, one), values, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert values[0].item() == values[1].item() == 3.0


NONSENSE: dict[str, Callable[[Stranger], None]] = {
    "unknown kind": lambda s: s.send(99),
    "heartbeat with content": lambda s: s.send(Kind.HEARTBEAT, 0, b"x" * 100),
    "update of 3 GiB": lambda s: s.send(Kind.UPDATE, 0, b"{", size=3 << 30),
    "state of 3 GiB": lambda s: s.send(Kind.STATE, 0, b"{", size=3 << 30),
    "part beyond any model": lambda s: s.send(Kind.REDUCE, 1, b"x", size=1 << 40),
    "state that nobody asked for": lambda s: s.send(Kind.STATE, 0, b"x"),
    "goodbye without an iteration": lambda s: s.send(Kind.GOODBYE, 0, b"never"),
    "negative goodbye": lambda s: s.send(Kind.GOODBYE, 0, b"-1"),
    "up again": lambda s: s.come_up(5),
    "tag too large": lambda s: s.send(Kind.DATA, 40_000, b"1234"),
    "not JSON": lambda s: s.send(Kind.UPDATE, 0, b"{nonsense"),
    "not UTF-8": lambda s: s.send(Kind.UPDATE, 0, b"\xff\xfe\xfa"),
    "deep JSON": lambda s: s.send(Kind.UPDATE, 0, b"[" * 60_000),
    "a list": lambda s: s.send(Kind.UPDATE, 0, b"[]"),
    "no notes": lambda s: s.send(Kind.UPDATE, 0, b'{"links": []}'),
    "float version": lambda s: s.send(Kind.UPDATE, 0, said([[0, 1, 3.5]])),
    "infinite version": lambda s: s.send(
        Kind.UPDATE, 0, b'{"links": [[0, 1, Infinity]], "notes": []}'
    ),
    "text for a version": lambda s: s.send(Kind.UPDATE, 0, said([[0, 1, "9"]])),
    "true for a version": lambda s: s.send(Kind.UPDATE, 0, said([[0, 1, True]])),
    "negative version": lambda s: s.send(Kind.UPDATE, 0, said([[0, 1, -7]])),
    "digits without end": lambda s: s.send(
        Kind.UPDATE, 0, b'{"links": [[0, 1, %s]], "notes": []}' % (b"9" * 5000)
    ),
    "no such link": lambda s: s.send(Kind.UPDATE, 0, said([[0, 2, 4]])),
    "float workers": lambda s: s.send(Kind.UPDATE, 0, said([[0.0, 1.0, 4]])),
    "lists for workers": lambda s: s.send(Kind.UPDATE, 0, said([[[0], [1], 4]])),
    "note of no worker": lambda s: s.send(Kind.UPDATE, 0, said((), [[7, "away", 1, "yes"]])),
    "note of half a worker": lambda s: s.send(Kind.UPDATE, 0, said((), [[0.5, "away", 1, ""]])),
    "note that is a number": lambda s: s.send(Kind.UPDATE, 0, said((), [[0, "away", 1, 5]])),
    "note with a list as key": lambda s: s.send(Kind.UPDATE, 0, said((), [[0, ["a"], 1, ""]])),
    "endless note": lambda s: s.send(Kind.UPDATE, 0, said((), [[0, "away", 1, "x" * 5000]])),
    "half a tree": lambda s: s.send(Kind.REDUCE, 1, b"\xff" * 30),
    "neither known nor unknown": lambda s: s.send(Kind.RESULT, 1, b"?"),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_ends_the_link_it_came_on_and_nothing_else(what, caplog) -> None:
    caplog.set_level("INFO", logger="matcha.links")
    with besieged() as (zero, one, stranger):
        NONSENSE[what](stranger)
        wait_until(lambda: zero.members == one.members == (0, 1))
        assert "link to worker 2 ended: it " in caplog.text
        assert set(one.connections) == {0}
        exchange(zero, one)


def test_a_flood_of_messages_for_which_nobody_asked_ends_the_link(monkeypatch) -> None:
    monkeypatch.setattr(connection_module, "_MAX_EARLY", 100)
    with besieged() as (zero, one, stranger):
        for tag in range(150):
            stranger.send(Kind.DATA, tag)
        wait_until(lambda: zero.members == (0, 1))
        assert "sent far more" in one.end_reason(HOSTILE)
        exchange(zero, one)


def test_a_version_that_nobody_can_have_counted_up_is_ignored() -> None:
    with besieged() as (zero, one, stranger):
        stranger.send(Kind.UPDATE, 0, said([[0, 1, 1 << 50]], [[0, "away", 1 << 50, "yes"]]))
        stranger.send(Kind.UPDATE, 0, said((), [[2, "away", 1, "yes"]]))  # comes after it
        wait_until(lambda: zero.get_note(2, "away") == "yes")
        assert zero.members == one.members == (0, 1, 2)
        assert one.versions.versions[0, 1] < 1 << 40
        assert (0, "away") not in one._notes.all


def test_notes_of_a_worker_are_few() -> None:
    with besieged() as (zero, one, stranger):
        for n in range(40):
            notes = [[0, f"key {n}-{each}", 1, "x"] for each in range(10)]
            stranger.send(Kind.UPDATE, 0, said((), notes))
        stranger.send(Kind.UPDATE, 0, said((), [[2, "last", 1, "yes"]]))
        wait_until(lambda: zero.get_note(2, "last") == "yes")
        assert sum(rank == 0 for rank, _ in one._notes.all) <= 64


def test_a_larger_part_than_the_model_explains_ends_the_link() -> None:
    with besieged() as (zero, one, stranger):
        one.expect_model(1000)
        stranger.send(Kind.REDUCE, 1, b"x", size=100_000_000)
        wait_until(lambda: zero.members == (0, 1))
        assert "announced 100000000 bytes of REDUCE" in one.end_reason(HOSTILE)


def tcp_pair() -> tuple[FrameStream, FrameStream]:
    """The two ends of a connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return FrameStream(near), FrameStream(far)


def test_memory_grows_with_what_arrives_and_not_with_what_is_announced() -> None:
    near, far = tcp_pair()
    far._socket.sendall(b"some bytes")
    far.refuse()
    tracemalloc.start()
    try:
        with pytest.raises(ClosedError, match="closed its connection"):
            near.receive(3 << 30)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()
        near.refuse()


def test_a_content_of_many_pieces_arrives_whole() -> None:
    near, far = tcp_pair()
    content = random.Random(1).randbytes(5_000_001)
    sender = threading.Thread(target=far.send, args=(Kind.STATE, 0, [content]), daemon=True)
    sender.start()
    assert near.receive_header() == (Kind.STATE, 0, len(content))
    assert near.receive(len(content)) == content
    sender.join()
    far.refuse()
    near.refuse()


def read(stream: FrameStream) -> bytes:
    _, _, size = stream.receive_header()
    return bytes(stream.receive(min(size, 1000)))


def test_each_flipped_bit_of_a_plain_frame_is_noticed() -> None:
    near, far = tcp_pair()
    content = b"a message"
    frame = frame_header(Kind.DATA, 3, len(content), [content]) + content
    near.send(Kind.DATA, 3, [content])
    assert read(far) == content
    far.refuse()
    near.refuse()
    for bit in range(8 * len(frame)):
        near, far = tcp_pair()
        changed = bytearray(frame)
        changed[bit // 8] ^= 1 << bit % 8
        near._socket.sendall(changed)
        near.finish()
        with pytest.raises(ClosedError):
            read(far)
        far.refuse()
        near.refuse()


def test_a_neighbour_that_never_says_up_holds_nobody_up() -> None:
    with besieged(timeout=1.0) as (zero, one, stranger):
        zero.start_at(0)
        one.start_at(0)
        stranger.close()
        wait_until(lambda: zero.members == (0, 1))
        stranger.dial(running=True)
        over = threading.Event()

        def live() -> None:
            while not over.wait(0.1):
                stranger.send(Kind.HEARTBEAT)

        beats = threading.Thread(target=live)
        beats.start()
        try:
            wait_until(lambda: HOSTILE in one.connections)
            answers: list[bool] = []
            asks = threading.Thread(target=lambda: answers.append(one.meets(HOSTILE, 5)))
            asks.start()
            asks.join(60)
            assert answers == [False]
            assert "did not say from which iteration" in one.end_reason(HOSTILE)
            exchange(zero, one)
        finally:
            over.set()
            beats.join()


def test_a_state_and_a_result_are_sent_once_however_often_they_are_asked_for() -> None:
    with besieged() as (_, one, stranger):
        for _ in range(50):
            stranger.send(Kind.ASK_STATE)
        stranger.send(Kind.UPDATE, 0, said((), [[2, "last", 1, "yes"]]))
        wait_until(lambda: one.get_note(2, "last") == "yes")
        assert one.state_requests == {HOSTILE}
        connection = one.connections[HOSTILE]
        with one.lock:  # the writer waits for this lock
            for _ in range(50):
                one.collectives.on_frame(connection, Kind.MISSED, 0, bytearray())
            queued = [kind for kind, *_ in connection._queue]
        assert queued.count(Kind.RESULT) <= 2  # one may be on its way


def mutated(rng: random.Random) -> tuple[int, int, bytes, int]:
    """Kind, tag, content and announced size of a frame, some of which made sense once."""
    kind = rng.choice(list(Kind))
    content = {
        Kind.DATA: b"8 bytes.",
        Kind.UP: said([[1, 2, 3]]),
        Kind.UPDATE: said(
            [[0, 1, rng.randint(1, 9)], [1, 2, 2]], [[rng.randint(0, 2), "away", 3, "yes"]]
        ),
        Kind.STATE: b"a state",
        Kind.GOODBYE: b"17",
        Kind.REDUCE: DIGEST + b"part",
        Kind.RESULT: b"1" + b"result",
    }.get(kind, b"")
    changed = bytearray(content)
    for _ in range(rng.randint(0, 3)):
        where = rng.randrange(len(changed) + 1)
        how = rng.randrange(3)
        if how == 0:
            changed[where:where] = rng.choice([b"9", b"-", b".", b"[", b"null", b"1e999", b"\xff"])
        elif how == 1 and changed:
            changed[where % len(changed)] = rng.randrange(256)
        else:
            del changed[where : where + rng.randint(1, 5)]
    size = len(changed) if rng.random() < 0.9 else rng.choice([0, 5, 1 << 20, 1 << 33, 1 << 63])
    number = int(kind) if rng.random() < 0.98 else rng.randrange(256)
    return number, rng.choice([0, 1, 2, 40_000, 2**32 - 1]), bytes(changed), size


class Fed(FrameStream):
    """A plain stream that reads from memory."""

    def __init__(self) -> None:
        self.is_checked, self.data, self.last_heard, self.longest_gap = True, b"", 0.0, 0.0
        self._is_shut = self._secure = False
        self._check = self._expected = 0

    def _read(self, view: memoryview) -> int:
        count = min(len(view), len(self.data))
        view[:count] = self.data[:count]
        self.data = self.data[count:]
        return count  # 0 at the end, as of a connection that the other end has closed

    def leave(self) -> None:
        """Nothing to close."""


def test_mutated_frames_leave_a_worker_as_it_was(monkeypatch, caplog) -> None:
    play_mutated_frames(4_000, monkeypatch, caplog)


@pytest.mark.long("a million frames take two minutes; the first thousands are always played")
def test_a_million_mutated_frames_leave_a_worker_as_it_was(monkeypatch, caplog) -> None:
    play_mutated_frames(1_000_000, monkeypatch, caplog)


def play_mutated_frames(count: int, monkeypatch, caplog) -> None:
    """Read as from a socket, by the reader of a connection that is up; a fault never ends it."""
    caplog.set_level("CRITICAL", logger="matcha.links")
    monkeypatch.setattr(connection_module, "_SMALL", 1 << 64)  # wait for no receive to be posted
    monkeypatch.setattr(connection_module, "_MAX_EARLY", 100)
    rng, stream, ends = random.Random(7), Fed(), Counter[str]()
    with besieged() as (zero, one, _):
        before = one.connections[HOSTILE]
        guard = one.lock, one.changed, one._limits, one._on_frame
        connection = Connection(
            HOSTILE, stream, *guard, lambda _, reason: ends.update([reason.split(" (")[0]])
        )
        connection.state = LinkState.UP
        with one.lock:
            one.connections[HOSTILE] = connection
            for n in range(count):
                kind, tag, content, size = mutated(rng)
                stream.data = frame_header(kind, tag, size, [content]) + content
                if rng.random() < 0.02:
                    where = rng.randrange(8 * len(stream.data))
                    data = bytearray(stream.data)
                    data[where // 8] ^= 1 << where % 8
                    stream.data = bytes(data)
                connection.finished_at, connection.is_asked = None, rng.random() < 0.5
                connection._read()  # until there is no more: a fault, or the end of the frame
                if n % 100 == 0:  # what would be sent on makes sense
                    update = connection._untold | one.connections[0]._untold
                    assert Update.decode(update.encode(), TOPOLOGY) == update
                    connection._early.clear()
                    connection._num_early = connection._early_bytes = 0
                    connection._queue.clear()
            one.connections[HOSTILE] = before
        most = {"closed its connection: it crashed or was killed", "sent something malformed"}
        assert most <= set(ends)
        assert any("changed on its way" in reason for reason in ends)
        assert 0.2 * count < ends["closed its connection: it crashed or was killed"] < 0.8 * count
        assert all(type(version) is int for version in one.versions.versions.values())
        assert one.versions.versions[0, 1] % 2 == 0  # its own link, which it knows best
        one._end(before, "was mutated")
        wait_until(lambda: 1 in zero.members and 0 in one.members)
        number = max(zero.collectives.number, one.collectives.number)
        zero.collectives.number = one.collectives.number = number
        exchange(zero, one)


@pytest.mark.parametrize(("secure", "count"), [(False, 200), (True, 100)])
def test_mutated_frames_over_a_real_connection_end_links_and_never_workers(
    secure, count, tmp_path
) -> None:
    send_mutated_frames(secure, count, tmp_path)


@pytest.mark.long("a thousand handshakes; a hundred are always made")
def test_a_thousand_mutated_frames_over_tls_end_links_and_never_workers(tmp_path) -> None:
    send_mutated_frames(True, 1000, tmp_path)


def send_mutated_frames(secure: bool, count: int, tmp_path: Path) -> None:
    keys = None
    if secure:
        keys = tmp_path / "keys"
        new_keys(keys, 3)
    rng = random.Random(3)
    with besieged(keys) as (zero, one, stranger):
        for _ in range(count):
            stranger.send(*mutated(rng))
            if HOSTILE not in one.connections:
                stranger.close()
                with suppress(OSError, ssl.SSLError):
                    stranger.dial(running=False)
                    stranger.come_up()
        stranger.close()
        wait_until(lambda: zero.members == one.members == (0, 1))
        number = max(zero.collectives.number, one.collectives.number)
        zero.collectives.number = one.collectives.number = number
        exchange(zero, one)


def mean_of(transport: LinkTransport, value: float, found: dict[int, float]) -> threading.Thread:
    """Average in a thread."""

    def body() -> None:
        tensor = torch.tensor([value])
        mean_(transport, [tensor], 90.0)
        found[transport.rank] = tensor.item()

    thread = threading.Thread(target=body)
    thread.start()
    return thread


@pytest.mark.parametrize("part", [b"", b"12345", b"x" * 4000])
def test_a_part_that_cannot_be_used_ends_its_link_and_the_call_goes_on(part) -> None:
    with besieged() as (zero, one, stranger):
        found: dict[int, float] = {}
        threads = [mean_of(zero, 2.0, found), mean_of(one, 4.0, found)]
        stranger.send(Kind.REDUCE, 1, DIGEST + part)
        for thread in threads:
            thread.join(120)
        assert found == {0: 3.0, 1: 3.0}
        assert "a part" in one.end_reason(HOSTILE)


@pytest.mark.parametrize("result", [b"1", b"112345", b"1" + b"x" * 4000])
def test_a_result_that_cannot_be_used_ends_its_link_and_the_call_goes_on(result) -> None:
    with besieged() as (zero, one, stranger):
        found: dict[int, float] = {}
        stranger.send(Kind.RESULT, 1, result)
        stranger.send(Kind.UPDATE, 0, said((), [[2, "last", 1, "yes"]]))
        wait_until(lambda: one.get_note(2, "last") == "yes")
        threads = [mean_of(one, 4.0, found), mean_of(zero, 2.0, found)]
        for thread in threads:
            thread.join(120)
        assert found == {0: 3.0, 1: 3.0}
        assert "a result" in one.end_reason(HOSTILE)
