"""The listener outlives whatever its clients do; identity comes before what they say."""

from __future__ import annotations

import json
import logging
import selectors
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.distributed.elastic.test_membership import wait_until
from tests.distributed.links.linked import HOST, run_linked

from matcha import families
from matcha._io.keys import Keys, new_keys, revoke
from matcha.distributed import Peers, read_peers
from matcha.distributed.links import listener
from matcha.distributed.links import listener as module
from matcha.distributed.links.listener import Hello, Listener, Revocations, keep_running
from matcha.distributed.links.peers import free_ports
from matcha.distributed.transports.collectives import gather

SAID = {"rank": 1, "to": 0, "network": "x", "running": False, "stage": 0}


class Server:
    """A listener of worker 0 that takes what it admits into a list."""

    def __init__(self, keys: Keys | None = None) -> None:
        (port,) = free_ports(HOST, 1)
        self.address = HOST, port
        self.admitted: list[int] = []
        answer = Hello(rank=0, to=1, network="x", running=False)
        self.listener = Listener(
            self.address, keys, Revocations(keys), lambda _: answer, self.admit
        )

    def admit(self, stream, ours: Hello, theirs: Hello) -> None:
        self.admitted.append(theirs.rank)
        stream.refuse()

    def send(self, content: bytes) -> None:
        """Say something and wait for the end."""
        with socket.create_connection(self.address, timeout=60) as client, suppress(OSError):
            client.sendall(content)
            while client.recv(1024):
                pass

    def is_alive(self) -> bool:
        """Whether a neighbour can still come in."""
        before = len(self.admitted)
        self.send(packed(json.dumps(SAID).encode()))
        wait_until(lambda: len(self.admitted) > before, 30.0)
        return True


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.listener.close()


def packed(text: bytes) -> bytes:
    return struct.pack("!8sH", b"matcha2\n", len(text)) + text


def but(**changes: object) -> bytes:
    """A hello with some entries changed, or without those that are `...`."""
    said = {key: value for key, value in {**SAID, **changes}.items() if value is not ...}
    return packed(json.dumps(said).encode())


@pytest.mark.parametrize(
    "content",
    [
        packed(b"[" * 60_000),
        packed(b"[" * 1_000),
        packed(b"[]"),
        packed(b"\xff\xff"),
        packed(b"17"),
        but(running=...),
        but(running="yes"),
        but(rank=[0]),
        but(rank={}),
        but(rank=True),
        but(rank=1.0),
        but(rank=...),
        but(to=[0]),
        but(network=None),
    ],
)
def test_a_hello_that_makes_no_sense_ends_its_client_only(server, content) -> None:
    server.send(content)
    assert server.is_alive()
    assert set(server.listener.refused) <= {"its hello is malformed", "its hello is too long"}
    assert sum(server.listener.refused.values()) == 1


def test_a_client_that_is_pushed_out_while_it_is_ready_ends_itself_only(
    server, monkeypatch, caplog
) -> None:
    """It was in the same answer of `select` as the one that took its place."""
    monkeypatch.setattr(module, "_MAX_CLIENTS", 1)
    gate, waits = threading.Event(), threading.Event()
    gate.set()
    select = server.listener._selector.select

    def gated(timeout: float):
        if not gate.is_set():
            waits.set()
            assert gate.wait(60)
        found = select(timeout)
        return sorted(found, key=lambda ready: ready[0].fileobj is not server.listener._socket)

    monkeypatch.setattr(server.listener._selector, "select", gated)
    oldest = socket.create_connection(server.address)
    wait_until(lambda: len(server.listener._clients) == 1)
    gate.clear()
    assert waits.wait(60)
    oldest.sendall(b"GET /")
    newest = socket.create_connection(server.address)
    with selectors.DefaultSelector() as both:  # the kernel has the bytes and the connection
        both.register(newest, selectors.EVENT_WRITE)
        assert both.select(60)
    gate.set()
    wait_until(lambda: server.listener.refused["too many clients at once"] == 1)
    oldest.close()
    newest.close()
    assert server.is_alive()
    assert "failed and goes on" not in caplog.text


def test_what_admitting_raises_ends_that_client_only(server, caplog) -> None:
    admit = server.listener._admit

    def broken(*_: object) -> None:
        server.listener._admit = admit
        raise ZeroDivisionError("on purpose")

    server.listener._admit = broken
    server.send(packed(json.dumps(SAID).encode()))
    assert server.is_alive()
    assert "caused an error" in caplog.text


def test_a_thread_that_must_live_goes_on_and_says_loudly_what_it_met(caplog) -> None:
    steps: list[int] = []

    def step() -> None:
        steps.append(1)
        if len(steps) == 1:
            raise ZeroDivisionError("on purpose")

    keep_running(step, lambda: len(steps) < 3)
    assert len(steps) == 3
    (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert "failed and goes on" in record.message
    assert record.exc_info is not None


def test_nothing_is_read_from_a_client_without_a_good_certificate(tmp_path, monkeypatch) -> None:
    keys = tmp_path / "keys"
    new_keys(keys, 2)
    revoke(keys, [1])
    decoded: list[bytes] = []
    decode = listener.decode_hello

    def noted(text: bytes) -> Hello | listener.JoinRequest:
        decoded.append(text)
        return decode(text)

    monkeypatch.setattr(listener, "decode_hello", noted)
    server = Server(Keys(directory=keys, rank=0))
    try:
        context = Keys(directory=keys, rank=1).context(server=False)
        with (
            suppress(OSError),
            context.wrap_socket(socket.create_connection(server.address, timeout=60)) as client,
        ):
            client.sendall(but())
            while client.recv(1024):
                pass
        wait_until(lambda: sum(server.listener.refused.values()) == 1)
        assert list(server.listener.refused) == ["the certificate of worker 1 is revoked"]
        assert decoded == []
    finally:
        server.listener.close()


def test_a_list_of_revocations_that_cannot_be_read_leaves_the_last_in_force(
    tmp_path, caplog
) -> None:
    new_keys(tmp_path / "keys", 2)
    revoke(tmp_path / "keys", [1])
    revocations = Revocations(Keys(directory=tmp_path / "keys", rank=0))
    (fingerprint,) = revocations.current()
    file = tmp_path / "keys" / "revoked.txt"
    good = file.read_bytes()
    for spoil in (lambda: file.write_bytes(b"\xff\xfe\xfa"), lambda: (file.unlink(), file.mkdir())):
        spoil()
        assert revocations.current() == revocations.current() == {fingerprint}
    assert caplog.text.count("stays in force") == 2  # once per problem
    file.rmdir()
    file.write_bytes(good + b"more\n")
    assert revocations.current() == {fingerprint, "more"}


def test_neighbours_are_watched_on_while_revocations_cannot_be_read(tmp_path: Path, caplog) -> None:
    folder = tmp_path / "keys"
    new_keys(folder, 2)
    spoilt = threading.Barrier(2)

    def work(transport) -> None:
        if transport.rank == 1:
            (folder / "revoked.txt").write_bytes(b"\xff\xfe\xfa")
        spoilt.wait(60)
        wait_until(lambda: caplog.text.count("stays in force") >= 2)  # both have tried to read it
        spoilt.wait(60)
        if transport.rank == 1:
            (folder / "revoked.txt").unlink()
            revoke(folder, [0])
        wait_until(lambda: transport.members == (transport.rank,))

    run_linked(families.path(2), work, keys=folder, timeout=2.0)


def has_ipv6() -> bool:
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
@pytest.mark.parametrize("hosts", [("::1", "::1"), ("::1", HOST)])
def test_workers_meet_at_ipv6_addresses(hosts, tmp_path: Path) -> None:
    new_keys(tmp_path / "keys", 2)
    ports = [free_ports(host, 2)[n] for n, host in enumerate(hosts)]
    Peers(addresses=tuple(zip(hosts, ports, strict=True))).save(tmp_path / "peers")
    peers = read_peers(tmp_path / "peers")
    assert peers.addresses[0] == ("::1", ports[0])
    found = run_linked(
        families.path(2),
        lambda transport: gather(transport, bytes([transport.rank]), 60),
        peers=peers,
        keys=tmp_path / "keys",
    )
    assert found == [[b"\0", b"\1"]] * 2


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
def test_a_name_that_is_not_this_hosts_is_listened_for_on_both_protocols(monkeypatch) -> None:
    (port,) = free_ports(HOST, 1)
    made = module._listen(("192.0.2.1", port))  # an address for documentation: nobody has it
    try:
        for host in (HOST, "::1"):
            socket.create_connection((host, port), timeout=60).close()
    finally:
        made.close()


def test_a_handshake_that_fails_is_counted_by_its_reason(tmp_path: Path) -> None:
    new_keys(tmp_path / "keys", 2)
    server = Server(Keys(directory=tmp_path / "keys", rank=0))
    try:
        server.send(b"GET / HTTP/1.1\r\n\r\n")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with (
            suppress(OSError),
            context.wrap_socket(  # without a certificate
                socket.create_connection(server.address, timeout=60)
            ) as client,
        ):
            while client.recv(1024):
                pass
        wait_until(lambda: sum(server.listener.refused.values()) == 2)
        assert all("handshake failed" in reason for reason in server.listener.refused)
    finally:
        server.listener.close()
