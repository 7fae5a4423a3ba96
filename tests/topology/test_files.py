from __future__ import annotations

import io
import json
import os
from functools import partial

import networkx as nx
import numpy as np
import pytest

from matcha import Topology, families
from matcha.errors import TopologyError


def _npy():
    buffer = io.BytesIO()
    np.save(buffer, np.eye(3))
    return buffer.getvalue()


NPY = _npy()


def test_saved_topologies_come_back_unchanged(tmp_path):
    labelled = Topology.from_links(
        [("a", "b"), ("b", ("c", 1))],
        labels=["a", "b", ("c", 1)],
        link_times=[0.1, 0.7],
        positions=[(0, 0), (1, 0), (2, 1)],
        name="mine",
    )
    for number, topology in enumerate([families.geometric(12, 0.5, 2), labelled]):
        path = tmp_path / f"{number}.json"
        topology.save(path)
        assert Topology.read(path) == topology
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.json", "1.json"]


def test_common_formats(tmp_path):
    expected = families.torus(3, 3)
    graph = expected.to_networkx()
    adjacency = nx.to_numpy_array(graph, nodelist=range(9))
    nx.write_graphml(nx.Graph(graph.edges), tmp_path / "t.graphml")
    np.savetxt(tmp_path / "t.csv", adjacency, delimiter=",")
    np.save(tmp_path / "t.npy", adjacency)
    (tmp_path / "t.json").write_text(json.dumps(expected.links))
    lines = "# torus\n" + "".join(f"{i} {j}\n" for i, j in expected.links)
    (tmp_path / "t.edges").write_text(lines)
    for ending in ("graphml", "csv", "npy", "json", "edges"):
        assert Topology.read(tmp_path / f"t.{ending}").links == expected.links, ending


def test_edge_lists_carry_labels_and_seconds(tmp_path):
    path = tmp_path / "net.txt"
    path.write_text("berlin, paris, 0.25\nparis rome 0.5\n")
    topology = Topology.read(path)
    assert topology.labels == ("berlin", "paris", "rome")
    assert topology.link_times == (0.25, 0.5)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"links": [[0, 1], [1', "could not be read as json"),
        ("a.json", b'{"schema": "other/3", "links": []}', "other/3"),
        ("a.json", b'{"nodes": []}', "neither a list of links"),
        ("a.json", b"[[0, 1, 2, 3]]", "pair of workers"),
        ("a.json", b'[[0, 1, "fast"]]', "not a number"),
        ("a.json", b"[[0, [1]]]", "not a name"),
        ("a.json", b"[[0, null]]", "names a worker None"),
        ("a.json", b"[[0, 1, 0.1], [1, 2]]", "give all links their seconds"),
        ("a.json", b"[[0, 1, 1e308], [1, 2, 0.1]]", "at most 1e"),
        ("a.json", b'{"nodes": [{"id": 0}], "links": [{"from": 0}]}', "node-link"),
        ("a.json", b'{"nodes": 3, "edges": []}', "node-link"),
        ("a.json", b'{"edges": [[0, 1]]}', '"nodes"'),
        ("a.edges", b"0 1 0.1\n1 2\n", "give all links their seconds"),
        ("a.graphml", b"<graphml", "could not be read as graphml"),
        ("a.npy", b"not numpy", "could not be read as npy"),
        ("a.csv", b"1,x,y,z\n", "a table is an adjacency matrix"),
        ("a.csv", b"0,1\n1,2,0.5\n", "differ in length"),
        ("a.csv", b"source,target,time\n0,1,soon\n", "could not convert"),
        ("a.csv", b"from,to,weight\nx,y,1\ny,z,2\n", "weight='time'"),
        ("a.csv", b"# nothing\n", "it is empty"),
        ("a.npy", NPY.replace(b"(3, 3)", b"(3, 3("), "could not be read as npy"),
        ("a.graphml", b'<?xml version="1.0" encoding="zz"?><graphml/>', "unknown encoding"),
        ("a.csv", b"0,1\n0,0\n", "not strongly connected"),
        ("a.edges", b"0 -> 1\n1 2\n", "line 2"),
        ("a.csv", b"0,-1\n-1,0\n", "negative"),
        ("a.csv", b"1,1\n1,0\n", "self-loop"),
        ("a.edges", b"0 1 2 3\n", "line 1"),
        ("a.edges", b"0 1 fast\n", "could not be read"),
        ("a.docx", b"", "unknown ending"),
    ],
)
def test_bad_files_are_refused_in_one_sentence(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TopologyError, match=message) as error:
        Topology.read(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("ending", ["json", "graphml", "csv", "npy", "edges"])
def test_twenty_megabytes_of_garbage(tmp_path, ending):
    path = tmp_path / f"garbage.{ending}"
    path.write_bytes(os.urandom(20_000_000))
    with pytest.raises(TopologyError) as error:
        Topology.read(path)
    assert len(str(error.value)) < 500


def test_seconds_beside_links_are_heeded_in_every_format(tmp_path):
    (tmp_path / "n.json").write_text("[[0, 1, 0.25], [1, 2, 0.5]]")
    (tmp_path / "n.csv").write_text("0,0.25,0\n0.25,0,0.5\n0,0.5,0\n")
    graph = nx.Graph()
    graph.add_edge(0, 1, time=0.25)
    graph.add_edge(1, 2, time=0.5)
    nx.write_graphml(graph, tmp_path / "n.graphml")
    (tmp_path / "linked.json").write_text(json.dumps(nx.node_link_data(graph, edges="links")))
    (tmp_path / "edged.json").write_text(json.dumps(nx.node_link_data(graph, edges="edges")))
    for name in ("n.json", "n.csv", "n.graphml", "linked.json", "edged.json"):
        topology = Topology.read(tmp_path / name)
        assert topology.links == ((0, 1), (1, 2)), name
        assert topology.link_times == (0.25, 0.5), name


def test_weights_that_nobody_could_heed_are_refused(tmp_path):
    graph = nx.Graph()
    graph.add_edge(0, 1, weight=3)
    graph.add_edge(1, 2, weight=5)
    nx.write_graphml(graph, tmp_path / "w.graphml")
    linked = json.dumps(nx.node_link_data(graph, edges="links"))
    (tmp_path / "w.json").write_text(linked)
    for read in (Topology.from_networkx, *(partial(_read, tmp_path / n) for n in WEIGHED)):
        with pytest.raises(TopologyError, match="rename it 'time'"):
            read(graph)
        assert read(graph, weight="time").link_times == (3.0, 5.0)
        assert read(graph, weight="ignore").link_times is None
    nx.set_edge_attributes(graph, 1, "weight")
    assert Topology.from_networkx(graph).link_times is None  # all alike: they say nothing


WEIGHED = ("w.graphml", "w.json")


def _read(path, graph, **options):
    return Topology.read(path, **options)


@pytest.mark.parametrize(
    "text",
    [
        "source,target,time\nberlin,paris,0.25\nparis,rome,0.5\n",
        "Source;Target;Seconds\nberlin;paris;0.25\nparis;rome;0.5\n",
        ",from,to,time\n0,berlin,paris,0.25\n1,paris,rome,0.5\n",  # a frame with its index
        "time,target,source\n0.25,paris,berlin\n0.5,rome,paris\n",
        "berlin,paris,0.25\nparis,rome,0.5\n",
        "berlin\tparis\t0.25\nparis\trome\t0.5\n",
        '"berlin","paris","0.25"\n"paris","rome","0.5"\n',
        "# sites\n\nberlin , paris , 0.25\nparis , rome , 0.5\n",
        ",berlin,paris,rome\nberlin,0,0.25,0\nparis,0.25,0,0.5\nrome,0,0.5,0\n",
        "berlin,paris,rome\n0,0.25,0\n0.25,0,0.5\n0,0.5,0\n",
    ],
)
def test_tables_as_people_have_them(text, tmp_path):
    (tmp_path / "t.csv").write_text(text)
    topology = Topology.read(tmp_path / "t.csv")
    assert topology.labels == ("berlin", "paris", "rome")
    assert topology.links == ((0, 1), (1, 2))
    assert topology.link_times == (0.25, 0.5)


def test_tables_of_numbers_are_matrices_where_they_can_be(tmp_path):
    path = tmp_path / "t.csv"
    for text, links in (
        ("0,1\n1,2\n2,0\n", ((0, 1), (0, 2), (1, 2))),
        ("0,1\n1,2\n", ((0, 1), (1, 2))),  # square, but no worker has a link to itself
        ("0,1,0\n1,0,1\n0,1,0\n", ((0, 1), (1, 2))),
        (",0,1,2\n0,0,1,0\n1,1,0,1\n2,0,1,0\n", ((0, 1), (1, 2))),
    ):
        path.write_text(text)
        assert Topology.read(path).links == links, text
    path.write_text("source,target,weight\n0,1,3\n1,2,5\n")
    assert Topology.read(path, weight="time").link_times == (3.0, 5.0)
    assert Topology.read(path, weight="ignore").link_times is None


@pytest.mark.parametrize("ending", ["csv", "edges"])
def test_names_with_blanks_and_commas_are_names(ending, tmp_path):
    path = tmp_path / f"t.{ending}"
    path.write_text('New York, "Paris, Texas", 0.5\n"Paris, Texas", "São Paulo", 1.5\n')
    assert Topology.read(path).labels == ("New York", "Paris, Texas", "São Paulo")
    if ending == "edges":
        path.write_text('"New York" Paris 0.5\nParis -> Rome\n')
        with pytest.raises(TopologyError, match="line 2 differs"):
            Topology.read(path)


def test_times_of_only_some_edges_are_refused():
    graph = nx.path_graph(3)
    graph.edges[0, 1]["time"] = 0.5
    with pytest.raises(TopologyError, match=r"link \(1, 2\) has none"):
        Topology.from_networkx(graph)


def test_an_array_of_words_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.array([["0", "1"], ["1", "0"]]))
    with pytest.raises(TopologyError, match="holds numbers"):
        Topology.read(tmp_path / "a.npy")


@pytest.mark.parametrize(
    ("name", "text"),
    [("n.json", "[[0, 1], [1, 2]]"), ("n.csv", "0,1,0\r\n1,0,1\r\n0,1,0"), ("n.edges", "0 1\n1 2")],
)
def test_a_byte_order_mark_is_no_part_of_a_name(name, text, tmp_path):
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert Topology.read(tmp_path / name).labels == (0, 1, 2)


def test_node_link_data_by_hand_is_a_simple_graph(tmp_path):
    path = tmp_path / "hand.json"
    nodes = [{"id": "a"}, {"id": "b"}]
    path.write_text(
        json.dumps({"nodes": nodes, "edges": [{"source": "a", "target": "b", "time": 0.1}]})
    )
    assert Topology.read(path).link_times == (0.1,)
    path.write_text(json.dumps({"nodes": nodes, "edges": [{"source": "a", "target": "c"}]}))
    with pytest.raises(TopologyError, match="'c', which is not among its nodes"):
        Topology.read(path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_workers", 10**9, "need at least 999,999,999 links"),
        ("num_workers", -3, "a whole number from 2 up"),
        ("links", {"0": 1}, "a list of links"),
        ("labels", 5, "a list of names"),
        ("labels", [{}, {}], "a list of names"),
        ("link_times", 5, "a list of numbers"),
        ("link_times", [None], "a list of numbers"),
        ("link_times", [10**400], "too large"),
        ("positions", [[0], [1]], "pairs"),
        ("directed", "yes", "true or false"),
    ],
)
def test_fields_of_other_types_are_refused(field, value, message, tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"links": [[0, 1]], field: value}))
    with pytest.raises(TopologyError, match=message):
        Topology.read(path)


def test_braces_in_names_are_only_names():
    with pytest.raises(TopologyError, match=r"from worker 'b' to worker '\{a\}'"):
        Topology.from_links([("{a}", "b")], labels=["{a}", "b"], directed=True)


def test_a_list_of_links_is_named_as_its_file(tmp_path):
    path = tmp_path / "sites.json"
    path.write_text('[["oslo", "bonn"], ["bonn", "rome"]]')
    assert Topology.read(path).name == "sites"
