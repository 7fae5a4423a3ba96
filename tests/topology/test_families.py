from __future__ import annotations

import networkx as nx
import pytest

import matcha
from matcha import families
from matcha.errors import InputError, TopologyError
from matcha.matchings import check_decomposition
from matcha.topology.families import as_topology


@pytest.mark.parametrize(
    ("topology", "graph"),
    [
        (families.ring(7), nx.cycle_graph(7)),
        (families.path(5), nx.path_graph(5)),
        (families.star(6), nx.star_graph(5)),
        (families.complete(5), nx.complete_graph(5)),
        (families.barbell(8), nx.barbell_graph(4, 0)),
        (families.hypercube(3), nx.hypercube_graph(3)),
        (families.torus(3, 4), nx.grid_2d_graph(3, 4, periodic=True)),
    ],
    ids=lambda value: getattr(value, "name", None) or None,
)
def test_families_are_what_networkx_calls_them(topology, graph):
    assert nx.is_isomorphic(topology.to_networkx(), graph)


def test_small_tori_have_no_double_links():
    assert len(families.torus(2, 3).links) == 9
    assert len(families.torus(2, 2).links) == 4


@pytest.mark.parametrize("make", [families.erdos_renyi, families.geometric])
def test_random_families_are_decided_by_their_seed(make):
    assert make(16, 0.3, seed=5) == make(16, 0.3, seed=5)
    assert make(16, 0.3, seed=5).links != make(16, 0.3, seed=6).links


def test_random_families_are_redrawn_until_connected():
    sparse = families.erdos_renyi(10, 0.15, seed=0)
    assert nx.is_connected(sparse.to_networkx())
    with pytest.raises(InputError, match="raise the density"):
        families.geometric(50, 1e-6, seed=0)


@pytest.mark.parametrize(
    ("name", "workers", "degree"),
    [
        ("er8", 8, 5),
        ("geometric16-d5", 16, 5),
        ("geometric16-d10", 16, 10),
        ("geometric16-d13", 16, 13),
        ("er16", 16, 8),
    ],
)
def test_the_papers_graphs_and_matchings(name, workers, degree):
    topology = families.paper(name)
    assert (topology.num_workers, topology.max_degree) == (workers, degree)
    check_decomposition(topology, families.paper_matchings(name))


def test_command_line_names():
    assert families.parse("torus:3x4").num_workers == 12
    assert families.parse("hypercube:4").max_degree == 4
    assert families.parse("geometric:16:0.4:1") == families.geometric(16, 0.4, 1)
    assert families.parse("erdos-renyi:16:0.3") == families.erdos_renyi(16, 0.3, 0)
    assert families.parse("paper:er8") == families.paper("er8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rign:8", "did you mean 'ring'"),
        ("ring:x", "ring:WORKERS"),
        ("ring", "ring:WORKERS"),
        ("ring:2", "at least 3"),
        ("torus:4", "ROWSxCOLUMNS"),
        ("paper:er9", "did you mean 'er8'"),
        ("erdos-renyi:8:1.5:0", "probability"),
        ("geometric:8:-1:0", "radius"),
        ("nowhere.json", "no topology file"),
    ],
)
def test_bad_names_say_what_is_wrong(text, message):
    with pytest.raises(InputError, match=message):
        families.parse(text)


@pytest.mark.parametrize(
    "name",
    [
        "ring:1000000000",
        "path:1000000000",
        "hypercube:40",
        "hypercube:100000000000",
        "complete:3000",
        "star:99999999999",
        "torus:100000x100000",
        "barbell:100000",
        "erdos-renyi:1000000:0.5",
        "erdos-renyi:10000000:0.000001",
        "geometric:100000:0.9",
    ],
)
def test_graphs_that_no_memory_could_hold_are_refused_at_once(name):
    with pytest.raises(InputError, match="choose fewer workers"):
        families.parse(name)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_some_links_carry_one_way(share):
    topology = families.paper("geometric16-d10")
    directed = families.one_way(topology, share, seed=1)
    lost = 2 * len(topology.links) - len(directed.links)
    assert lost == round(share * len(topology.links))
    assert directed.directed
    assert {(min(e), max(e)) for e in directed.links} == set(topology.links)
    assert families.one_way(topology, share, seed=1) == directed
    with pytest.raises(TopologyError, match="cannot lose a way"):
        families.one_way(families.path(4), 0.5)


def test_whatever_stands_for_a_topology_is_one(tmp_path):
    ring = families.ring(4)
    ring.save(tmp_path / "ring.json")
    for given in (ring, "ring:4", str(tmp_path / "ring.json"), tmp_path / "ring.json"):
        assert as_topology(given) == ring
    assert as_topology(ring.to_networkx()).links == ring.links
    for links in (ring.links, list(map(list, ring.links)), iter(ring.links), ring.link_array):
        assert as_topology(links).links == ring.links
    assert as_topology([("a", "b", 0.5), ("b", "c", 0.25)]).link_times == (0.5, 0.25)


@pytest.mark.parametrize("given", [None, 3, {}, {"links": [[0, 1]]}, ["ring:4"], [3], [[0]]])
def test_what_stands_for_no_topology_is_refused(given):
    with pytest.raises(InputError, match=r"a Topology, a name such as|pair of workers"):
        as_topology(given)


def test_every_planner_takes_what_stands_for_a_topology():
    ring, networkx = families.ring(4), nx.cycle_graph(4)
    assert matcha.plan("ring:4", 0.5, "periodic") == matcha.plan(ring, 0.5, "periodic")
    links = [(0, 1), (1, 2), (2, 3), (3, 0)]
    digest = matcha.plan(ring, 0.5, "greedy").digest
    assert matcha.plan(networkx, 0.5, "greedy").digest == digest
    assert matcha.plan(links, 0.5, "greedy").digest == digest
    assert matcha.staged_plan("ring:4", {0: 0.5}, "periodic").topology == ring
    assert matcha.sweep("ring:4", [0.5], ["periodic"]).topology == ring
    found = matcha.tune(
        "ring:4", compute_time=1, link_time=1, strategies=["vanilla"], wires=["float32"]
    )
    assert found.plan.topology == ring
