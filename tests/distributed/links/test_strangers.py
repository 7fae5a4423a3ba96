"""Who is not a neighbour with a certificate in order is refused and logged; training goes on."""

from __future__ import annotations

import json
import re
import resource
import shutil
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from tests.distributed.links.linked import HOST, local_peers, run_linked

from matcha import families
from matcha._io.keys import issue, new_keys, revoke
from matcha.distributed import Keys, LinkTransport, Message
from matcha.distributed.links.framing import Kind
from matcha.distributed.links.listener import refuse_newcomer
from matcha.errors import ExchangeError

TOPOLOGY = families.path(3)
GUARDED = 2  # whose door the strangers knock at; its only neighbour is worker 1


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "run"
    new_keys(folder, 3)
    return folder


def copy_of(keys: Path, folder: Path) -> Path:
    shutil.copytree(keys, folder)
    return folder


def hello(rank: int, to: int = GUARDED) -> bytes:
    return said({"rank": rank, "to": to, "network": "?", "running": False, "stage": 0})


def said(document: dict[str, object]) -> bytes:
    text = json.dumps(document).encode()
    return struct.pack("!8sH", b"matcha2\n", len(text)) + text


def knock(address, keys: Keys | None, say: bytes) -> None:
    """Connect, perhaps with a certificate, say something, and wait to be sent away."""
    with ExitStack() as stack, suppress(OSError):
        connection = stack.enter_context(socket.create_connection(address, timeout=30))
        if keys is not None:
            context = keys.context(server=False)
            context.verify_mode = ssl.CERT_NONE  # a stranger cares little who it talks to
            connection = stack.enter_context(context.wrap_socket(connection))
        connection.sendall(say)
        while connection.recv(1024):
            pass


class Proxy(threading.Thread):
    """Carries one connection to an address and keeps what its client said."""

    def __init__(self, address) -> None:
        super().__init__(daemon=True)
        self.address, self.recorded = address, bytearray()
        self.listener = socket.create_server((HOST, 0))
        self.here = self.listener.getsockname()
        self.start()

    def run(self) -> None:
        client, _ = self.listener.accept()
        server = socket.create_connection(self.address)
        with self.listener, client, server:
            self.carry(client, server)

    def carry(self, client: socket.socket, server: socket.socket) -> None:

        def back() -> None:
            with suppress(OSError):
                while data := server.recv(65536):
                    client.sendall(data)
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

        thread = threading.Thread(target=back, daemon=True)
        thread.start()
        with suppress(OSError):
            while data := client.recv(65536):
                self.recorded += data
                server.sendall(data)
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        thread.join(30)


def attack(address, keys: Path, old: Path, scratch: Path) -> dict[str, str]:
    """Every stranger of the list; returns what each should have been told."""
    own = Keys(directory=keys, rank=1)
    new_keys(scratch / "foreign", 3)
    expired = copy_of(keys, scratch / "expired")
    issue(expired, 1, days=-1)
    knock(address, None, b"")  # no certificate, not even a handshake
    knock(address, None, b"GET / HTTP/1.1\r\n\r\n")
    knock(address, Keys(directory=scratch / "foreign", rank=1), hello(1))
    knock(address, Keys(directory=expired, rank=1), hello(1))
    knock(address, Keys(directory=old, rank=0), hello(0))
    knock(address, Keys(directory=keys, rank=0), hello(1))
    knock(address, own, b"\x00" * 100)
    knock(address, own, hello(1))
    knock(address, own, said({"join": 2, "token": ""}))
    knock(address, own, said({"join": "7", "token": 3}))
    knock(address, own, said({"join": 1, "token": ""}))
    proxy = Proxy(address)
    knock(proxy.here, own, hello(1))
    proxy.join(30)
    knock(address, None, bytes(proxy.recorded))  # a replayed recording
    return {
        "left without a word or a handshake": "handshake failed|broke the connection|left",
        "garbage": "wrong version number|http request|handshake failed",
        "another authority": "unable to get local issuer|self.signed|certificate signature",
        "expired": "certificate has expired",
        "revoked": "certificate of worker 0 is revoked",
        "wrong rank": "claims to be worker 1 with the certificate of 0",
        "no hello": "does not speak our protocol",
        "another topology": "worker 1 comes with another topology",
        "joins as another": "certificate is not for the worker that it wants to be",
        "joins with nonsense": "its hello is malformed",
        "joins what takes in no others": "this team takes in no others",
    }


@pytest.fixture
def many_files() -> Iterator[None]:
    """A thousand connections at one end are a thousand open files, which shells rarely allow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 4096:
        if hard != resource.RLIM_INFINITY and hard < 4096:
            pytest.skip(f"this process may open {hard} files, and the test needs 4096")
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_strangers_are_refused_and_training_goes_on(keys, tmp_path, caplog) -> None:
    peers = local_peers(3)
    address = peers.addresses[GUARDED]
    done = threading.Event()
    wanted: dict[str, str] = {}
    shared, old = copy_of(keys, tmp_path / "keys"), copy_of(keys, tmp_path / "old")
    issue(shared, 0)  # its certificate of before is revoked

    def besiege() -> None:
        idle = [socket.create_connection(address) for _ in range(1000)]
        half = socket.create_connection(address)
        half.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")  # the start of a ClientHello
        wanted.update(attack(address, shared, old, tmp_path))
        for connection in (*idle, half):
            connection.close()
        done.set()

    def work(transport):
        rounds, ended = 0, torch.zeros(1)
        transport.sponsor = refuse_newcomer  # as where training ends with the first loss
        if transport.rank == GUARDED:
            threading.Thread(target=besiege, daemon=True).start()
        while not ended.item():
            # Worker 2 says when the siege is over; 1 tells 0.
            for i, j in ((1, 2), (0, 1)):
                if transport.rank in (i, j):
                    peer = i + j - transport.rank
                    over = done.is_set() if transport.rank == GUARDED else ended.item()
                    mine = torch.tensor([float(transport.rank), float(over)])
                    theirs = torch.empty(2)
                    message = Message(peer=peer, tag=1, incoming=theirs, outgoing=mine)
                    transport.post([message]).wait(120)
                    assert theirs[0].item() == peer
                    ended[0] = max(ended.item(), theirs[1].item(), float(over))
            rounds += 1
        refused = transport.listener.refused if transport.rank == GUARDED else None
        return rounds, refused, transport.changes

    results = run_linked(TOPOLOGY, work, peers=peers, keys=shared)
    rounds, refused, _ = results[GUARDED]
    assert rounds > 1
    assert len({r for r, _, _ in results}) == 1
    for stranger, reason in wanted.items():
        assert any(re.search(reason, text) for text in refused), (stranger, dict(refused))
    assert sum(refused.values()) >= 800  # of the idle ones all but the last few
    assert "refused a client from" in caplog.text
    # Nobody was lost on the way.
    for rank, (_, _, changes) in enumerate(results):
        lost = [c.worker for c in changes if not c.is_member and c.worker != rank]
        assert len(lost) <= 2, "neighbours are lost only when they have finished"


def test_a_revoked_neighbour_is_dropped_while_it_is_linked(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    new_keys(folder, 2)
    peers = local_peers(2)

    def work(transport):
        if transport.rank == 1:
            revoke(folder, [0])
        end = time.monotonic() + 60
        while transport.members != (transport.rank,):
            assert time.monotonic() < end, "the revoked worker is still there"
            time.sleep(0.02)

    run_linked(families.path(2), work, peers=peers, keys=folder, timeout=2.0)


def test_a_neighbour_that_sends_nonsense_loses_its_link_only() -> None:
    def work(transport):
        if transport.rank == 0:
            with transport.lock:
                transport.connections[1].send(Kind.UP, 0, [b"{nonsense"])
            return None
        end = time.monotonic() + 60
        while "malformed" not in transport.end_reason(0):
            assert time.monotonic() < end
            time.sleep(0.01)
        return transport.end_reason(0)

    assert "malformed" in run_linked(families.path(2), work)[1]


def test_a_message_of_another_size_ends_the_link() -> None:
    def work(transport):
        sizes = (4, 6) if transport.rank else (6, 4)
        message = Message(
            peer=1 - transport.rank,
            tag=0,
            incoming=torch.empty(sizes[0]),
            outgoing=torch.empty(sizes[0]),
        )
        with pytest.raises(ExchangeError, match=r"bytes where|connection"):
            transport.post([message]).wait(60)

    run_linked(families.path(2), work)


def test_a_worker_of_another_topology_is_refused() -> None:
    peers = local_peers(3)

    def body() -> None:
        with suppress(ExchangeError):
            LinkTransport(families.ring(3), 0, peers, start_timeout=1.0)

    stranger = threading.Thread(target=body)
    stranger.start()
    with pytest.raises(ExchangeError, match="did not come within"):
        LinkTransport(families.path(3), 1, peers, start_timeout=1.0)
    stranger.join()


def test_keys_of_tls_are_really_used(keys) -> None:
    looked = threading.Barrier(2)

    def work(transport):
        with transport.lock:
            (link,) = list(transport.connections.values())
        connection = link.stream._socket
        assert isinstance(connection, ssl.SSLSocket)
        version = connection.version()
        looked.wait(150)  # who hangs up takes the other's link with it
        return version

    assert run_linked(families.path(2), work, keys=keys) == ["TLSv1.3", "TLSv1.3"]
