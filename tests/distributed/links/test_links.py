"""Links of our own carry what any transport carries, between neighbours and nobody else."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.distributed.links.linked import HOST, local_peers, run_linked

from matcha import Topology, families, plan
from matcha._io.keys import new_keys
from matcha.distributed import Gossip, LinkTransport, Message, Peers, read_peers
from matcha.distributed.elastic.membership import ask_state, give_state
from matcha.distributed.launch import placement
from matcha.distributed.links.link_state import LinkVersions
from matcha.distributed.links.peers import dials, free_ports
from matcha.distributed.transports.collectives import barrier, broadcast, gather, mean_
from matcha.errors import ExchangeError, InputError


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "run"
    new_keys(folder, 8)
    return folder


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_large_messages_both_ways_at_once_and_in_any_order(secure, keys) -> None:
    size = 3_000_000

    def work(transport):
        peer = 1 - transport.rank
        leaving = [torch.full((size,), 10.0 * transport.rank + tag) for tag in range(3)]
        arriving = [torch.empty(size) for _ in range(3)]
        order = (0, 1, 2) if transport.rank else (0, 2, 1)
        pending = [
            transport.post([Message(peer=peer, tag=tag, incoming=arriving[tag])]) for tag in order
        ]
        pending += [
            transport.post([Message(peer=peer, tag=tag, outgoing=leaving[tag])])
            for tag in (0, 1, 2)
        ]
        for each in pending:
            each.wait(60)
        return [float(tensor.mean()) for tensor in arriving]

    first, second = run_linked(families.path(2), work, keys=keys if secure else None)
    assert first == [10.0, 11.0, 12.0]
    assert second == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("topology", [families.path(5), families.ring(6), families.star(5)])
def test_collectives_travel_along_links_only(topology) -> None:
    count = topology.num_workers

    def work(transport):
        shared = [torch.full((4,), float(transport.rank + 10)), torch.tensor(transport.rank)]
        broadcast(transport, shared, 60)
        values = [torch.arange(3.0) * transport.rank, torch.tensor([1j * transport.rank])]
        mean_(transport, values, 60)
        barrier(transport, 60)
        sockets = transport.num_sockets() - (transport.listener is not None)
        return shared, values, gather(transport, b"x" * transport.rank, 60), sockets

    results = run_linked(topology, work)
    for rank, (shared, values, gathered, sockets) in enumerate(results):
        assert torch.equal(shared[0], torch.full((4,), 10.0))
        assert shared[1].item() == 0
        assert torch.allclose(values[0], torch.arange(3.0) * (count - 1) / 2)
        assert values[1].item() == 1j * (count - 1) / 2
        assert gathered == [b"x" * other for other in range(count)]
        assert sockets == topology.degrees[rank]


def test_one_way_links_have_one_connection_too() -> None:
    circle = Topology.from_links([(0, 1), (1, 2), (2, 0), (1, 0)], directed=True)

    def work(transport):
        barrier(transport, 150)
        counted = transport.num_sockets() - (transport.listener is not None)
        barrier(transport, 150)  # whoever has counted hangs up, and not before the others have
        return counted

    assert run_linked(circle, work) == [2, 2, 2]


def test_a_stranger_to_the_topology_is_no_neighbour() -> None:
    def work(transport):
        if transport.rank == 0:
            with pytest.raises(ExchangeError, match="rank 2 is not a neighbour"):
                transport.post([Message(peer=2, tag=0, outgoing=torch.zeros(1))])

    run_linked(families.path(3), work)


def test_the_reachable_end_is_dialled(keys) -> None:
    one, three = free_ports(HOST, 2)
    peers = Peers(addresses=(None, (HOST, one), None, (HOST, three)))
    assert [dials(link, peers) for link in ((0, 1), (1, 2), (2, 3), (1, 3))] == [0, 2, 2, 1]

    def work(transport):
        barrier(transport, 60)
        return transport.listener is not None

    assert run_linked(families.path(4), work, peers=peers, keys=keys) == [False, True, False, True]
    with pytest.raises(InputError, match="workers 0 and 2 share a link, but"):
        dials((0, 2), peers)


def test_a_worker_that_never_comes_is_named() -> None:
    topology = families.path(2)
    peers = local_peers(2)

    with pytest.raises(ExchangeError, match=r"rank 1 did not come within 0\.3 s"):
        LinkTransport(topology, 0, peers, start_timeout=0.3)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0 a 1\n0 b 2\n", "line 2 names worker 0 again"),
        ("0 a 1\n2 b 2\n", "does not name worker 1"),
        ("0 a one\n", "line 1 is not `RANK HOST PORT`"),
        ("0 a 1\n1 a 1\n", "two workers have the same address a:1"),
        ("0 a 70000\n", "not the address"),
        ("", "does not name worker 0"),
        ("0 a \u00b25\n", "is not `RANK HOST PORT`"),  # a digit, and no number
        ("0 a 1" + "0" * 5000 + "\n", "is not `RANK HOST PORT`"),
    ],
)
def test_bad_peers_files_are_refused(tmp_path: Path, text, problem) -> None:
    file = tmp_path / "peers"
    file.write_text(text)
    with pytest.raises(InputError, match=problem):
        read_peers(file)


def test_peers_files_come_back_as_written(tmp_path: Path) -> None:
    peers = Peers(addresses=(("a.example", 1), None, ("10.0.0.7", 29600)))
    peers.save(tmp_path / "peers")
    assert read_peers(tmp_path / "peers") == peers
    with pytest.raises(InputError, match="cannot be read"):
        read_peers(tmp_path / "nothing")


def test_the_table_knows_losses_islands_and_returns() -> None:
    tables = [LinkVersions(rank, families.path(4)) for rank in range(4)]
    for i, j in ((0, 1), (1, 2), (2, 3)):
        version = tables[i].raise_link(j, tables[j].versions[i, j])
        assert tables[j].raise_link(i, 1) == version == 2
    for table in tables:
        for other in tables:
            table.merge(other.versions)
    assert {table.members for table in tables} == {(0, 1, 2, 3)}
    assert len({table.tree.digest for table in tables}) == 1
    assert [table.tree.parent for table in tables] == [None, 0, 1, 2]
    # Worker 1 dies: its neighbours say so, and two islands are left.
    news = {(0, 1): tables[0].lower_link(1), (1, 2): tables[2].lower_link(1)}
    tables[3].merge(news)
    assert (tables[0].members, tables[3].members) == ((0,), (2, 3))
    # A new process in its place knows nothing, not even that its links were up; versions go on.
    reborn = LinkVersions(1, families.path(4))
    assert reborn.raise_link(2, tables[2].versions[1, 2]) == tables[2].raise_link(1, 1) == 4
    # What is said of its own link by others who are behind is put right.
    assert reborn.merge({(0, 1): 8}) == {(0, 1): 9}


def test_a_neighbour_that_is_held_up_is_not_the_only_one_asked_for_a_state() -> None:
    topology = families.ring(3)
    peers = local_peers(3)
    met, done = threading.Barrier(3), threading.Event()

    def work(transport):
        transport.start_at(0)
        met.wait(150)
        if transport.rank == 0:  # alive, but between two steps for long: it answers nobody
            assert done.wait(150)
        elif transport.rank == 1:
            while not done.is_set():
                if transport.state_requests:
                    give_state(transport, [b"of worker 1"], [*transport.state_requests])
                time.sleep(0.01)
        else:
            transport.close()
            late = LinkTransport(topology, 2, peers, timeout=90.0, start_timeout=150.0)
            try:
                return ask_state(late, 150.0)
            finally:
                done.set()
                late.close()
        return None

    assert run_linked(topology, work, peers=peers)[2] == (1, b"of worker 1")


def test_those_who_have_no_state_are_not_asked_for_one() -> None:
    def work(transport):
        with pytest.raises(ExchangeError, match="no neighbour gave its state"):
            ask_state(transport, 0.5)
        return transport.state_requests

    assert run_linked(families.complete(4), work) == [set()] * 4


def test_that_a_neighbour_which_has_finished_is_gone_is_no_news(caplog) -> None:
    """Worker 0, which dials, learns the end and finds nobody any more: both for whoever debugs."""
    caplog.set_level(logging.DEBUG, logger="matcha.links")
    together = threading.Barrier(2)

    def work(transport: LinkTransport) -> list[logging.LogRecord]:
        begun, deadline = len(caplog.records), time.monotonic() + 150  # the link is up
        together.wait(150)
        if transport.rank == 1:
            return []
        while not any("cannot be reached" in r.message for r in caplog.records[begun:]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return [r for r in caplog.records[begun:] if r.module == "transport"]

    said, _ = run_linked(families.path(2), work)
    assert any("ended: it finished" in record.message for record in said)
    assert {record.levelno for record in said} == {logging.DEBUG}, said


def test_a_refused_gossip_gives_its_port_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a script may construct it again, as it should be."""
    peers, topology = local_peers(2), families.path(2)
    own = threading.local()
    monkeypatch.setattr(placement, "is_alone", lambda: False)
    monkeypatch.setattr(
        placement,
        "default_transport",
        lambda topology: LinkTransport(topology, own.rank, peers, timeout=90, start_timeout=100),
    )
    chosen = plan(topology, 1.0, "vanilla")

    def work(rank: int) -> int:
        own.rank = rank
        for size in (rank + 1, 3):
            model = torch.nn.Linear(size, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if size < 3:
                with pytest.raises(InputError, match="another model"):
                    Gossip(model, optimizer, chosen, timeout=100)
        with Gossip(model, optimizer, chosen, timeout=100) as gossip:
            return gossip.num_workers

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, range(2))) == [2, 2]
