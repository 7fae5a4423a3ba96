from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from matcha import Topology, families
from matcha._numerics.spectra import laplacian
from matcha.errors import TopologyError


def test_links_are_sorted_and_numbers_kept():
    topology = Topology.from_links([(2, 0), (1, 2), (0, 1), (3, 1)])
    assert topology.links == ((0, 1), (0, 2), (1, 2), (1, 3))
    assert topology.labels == (0, 1, 2, 3)
    assert topology.degrees == (2, 3, 2, 1)
    assert topology.max_degree == 3
    assert topology.neighbors(1) == (0, 2, 3)


def test_labels_of_any_kind_are_kept():
    topology = Topology.from_links([(("rack", 1), "b"), ("b", 7)])
    assert set(topology.labels) == {("rack", 1), "b", 7}
    assert topology.degrees[topology.labels.index("b")] == 2


def test_integers_with_gaps_become_labels():
    topology = Topology.from_links([(10, 20), (20, 30)])
    assert topology.labels == (10, 20, 30)
    assert topology.links == ((0, 1), (1, 2))


def test_link_times_follow_their_links():
    times = {("c", "b"): 3.0, ("a", "b"): 1.0}
    topology = Topology.from_links([("c", "b"), ("b", "a")], link_times=times)
    by_link = dict(zip(topology.links, topology.link_times, strict=True))
    assert by_link == {(0, 1): 1.0, (1, 2): 3.0}
    assert topology.with_link_times([5.0, 6.0]).link_times == (5.0, 6.0)


def test_laplacian_equals_networkx():
    topology = families.erdos_renyi(12, 0.4, seed=3)
    expected = nx.laplacian_matrix(topology.to_networkx(), nodelist=range(12)).toarray()
    np.testing.assert_array_equal(topology.laplacian().toarray(), expected)
    assert laplacian([], 3).toarray().sum() == 0


def test_networkx_round_trip_leaves_the_graph_alone():
    graph = nx.Graph([("a", "b", {"time": 0.5}), ("b", "c", {"time": 1.5})])
    before = nx.Graph(graph)
    topology = Topology.from_networkx(graph)
    assert topology.labels == ("a", "b", "c")
    assert topology.link_times == (0.5, 1.5)
    assert nx.utils.graphs_equal(graph, before)
    assert Topology.from_networkx(topology.to_networkx()).links == topology.links


def test_networkx_integer_nodes_keep_their_numbers_in_any_order():
    graph = nx.Graph([(2, 1), (1, 0)])
    assert Topology.from_networkx(graph).labels == (0, 1, 2)


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ([(0, 1), (2, 3)], ["not connected", "worker 0", "worker 2"]),
        ([("a", "b"), ("c", "d")], ["not connected", "'a'", "'c'"]),
        ([(0, 1), (1, 1)], ["worker 1", "self-loop"]),
        ([(0, 1), (1, 0)], ["(0, 1)", "twice"]),
        ([], ["at least 2 workers", "0"]),
        ([(0, 1, 2)], ["pair of workers", "(0, 1, 2)"]),
    ],
)
def test_bad_links_are_refused_in_one_sentence(links, words):
    with pytest.raises(TopologyError) as error:
        Topology.from_links(links)
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("seconds", [-1.0, 0.0, float("nan"), float("inf")])
def test_link_times_are_positive(seconds):
    with pytest.raises(TopologyError, match="positive seconds"):
        Topology.from_links([(0, 1)], link_times=[seconds])


def test_other_bad_arguments():
    with pytest.raises(TopologyError, match="strongly connected"):
        Topology.from_networkx(nx.DiGraph([(0, 1)]))
    with pytest.raises(TopologyError, match=r"networkx\.Graph"):
        Topology.from_networkx(nx.MultiGraph([(0, 1)]))
    with pytest.raises(TopologyError, match="names two workers"):
        Topology.from_links([("a", "b")], labels=["a", "b", "a"])
    with pytest.raises(TopologyError, match="names worker 'z'"):
        Topology.from_links([("a", "z")], labels=["a", "b"])
    with pytest.raises(TopologyError, match=r"0\.\.2"):
        Topology.from_links([(0, 5)], 3)
    with pytest.raises(TopologyError, match="1 link times"):
        Topology.from_links([(0, 1), (1, 2)], link_times=[1.0])
    with pytest.raises(TopologyError, match="no time is given"):
        Topology.from_links([(0, 1), (1, 2)], link_times={(0, 1): 1.0})


def test_a_topology_never_changes():
    topology = families.ring(4)
    with pytest.raises(AttributeError):
        topology.links = ()
    with pytest.raises(ValueError, match="read-only"):
        topology.link_array[0, 0] = 3


# -- one-way links ------------------------------------------------------------------------------


def test_a_directed_topology_keeps_its_arrows(tmp_path):
    links = [(0, 1), (1, 2), (2, 0), (1, 0)]
    times = {(0, 1): 0.5, (1, 0): 2.0, (1, 2): 1.0, (2, 0): 1.0}
    topology = Topology.from_links(links, directed=True, link_times=times)
    assert topology.links == ((0, 1), (1, 0), (1, 2), (2, 0)) == topology.arrows
    # Upload and download speeds may differ.
    assert topology.link_times == (0.5, 2.0, 1.0, 1.0)
    assert topology.degrees == (2, 2, 1)
    assert topology.neighbors(0) == (1, 2)
    topology.save(tmp_path / "a.json")
    assert Topology.read(tmp_path / "a.json") == topology
    again = Topology.from_networkx(topology.to_networkx(), name="custom")
    assert again == topology
    (tmp_path / "a.edges").write_text("0 -> 1\n1 -> 2\n2 -> 0\n")
    assert Topology.read(tmp_path / "a.edges").links == ((0, 1), (1, 2), (2, 0))
    matrix = np.array([[0, 1, 0], [0, 0, 1], [1, 0, 0]])
    np.save(tmp_path / "a.npy", matrix)
    assert Topology.read(tmp_path / "a.npy").directed
    assert not Topology.from_links([(0, 1)]).directed
    assert Topology.from_links([(0, 1), (1, 2)]).arrows == ((0, 1), (1, 0), (1, 2), (2, 1))


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ([(0, 1), (1, 2)], ("from worker 1 to worker 0",)),
        ([(1, 0), (2, 1)], ("from worker 0 to worker 1",)),
        ([(0, 1), (1, 0), (0, 1)], ("given twice",)),
    ],
)
def test_directed_topologies_are_strongly_connected(links, words):
    with pytest.raises(TopologyError) as error:
        Topology.from_links(links, directed=True)
    assert all(word in str(error.value) for word in words), error.value


def test_a_directed_link_needs_its_own_time():
    with pytest.raises(TopologyError, match="no time is given"):
        Topology.from_links([(0, 1), (1, 0)], directed=True, link_times={(0, 1): 1.0})


def test_latencies_are_a_part_of_the_times_and_survive_a_file(tmp_path):
    topology = Topology.from_links([("b", "a"), ("b", "c")]).with_link_times([0.5, 2.0], [0.1, 0.2])
    topology.save(tmp_path / "network.json")
    again = Topology.read(tmp_path / "network.json")
    assert again == topology
    assert again.link_latencies == (0.1, 0.2)
    assert topology.with_link_times([1.0, 1.0]).link_latencies is None
    for wrong in ([0.6, 0.2], [-0.1, 0.2]):
        with pytest.raises(TopologyError, match="a part of the link's time"):
            topology.with_link_times([0.5, 2.0], wrong)
    with pytest.raises(TopologyError, match="no link times"):
        Topology.from_json({"links": [[0, 1]], "link_latencies": [0.1]})
