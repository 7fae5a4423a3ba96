"""Files that were damaged or made up are read, or refused in a sentence of ours: nothing else."""

from __future__ import annotations

import json
import random
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from tests.test_records import PLAN, header

from matcha import Plan, Topology
from matcha.distributed import read_peers
from matcha.errors import MatchaError
from matcha.records import Record, RunWriter, Span, read_run

PIECES = [b"1e999", b"-1", b"NaN", b"null", b"[", b"{}", b'"', b"9" * 5000, b"\0", b"\xf8", b"[]"]
PIECES += ["²".encode(), "٣".encode(), b"99999999999999999999999", b"true", b"[" * 100_000]
NUM_MUTANTS = 60


def mutant(content: bytes, chance: random.Random) -> bytes:
    """Content with a few bits, bytes or words changed, left out, repeated or put in."""
    found = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 5])):
        place, length = chance.randrange(len(found) + 1), chance.randrange(1, 20)
        deed = chance.randrange(5)
        if deed == 0 and place < len(found):
            found[place] ^= 1 << chance.randrange(8)
        elif deed == 1:
            del found[place : place + length]
        elif deed == 2:
            found[place : place + 1] = chance.choice(PIECES)
        elif deed == 3:
            del found[place:]
        else:
            found[place:place] = found[place : place + length]
    return bytes(found)


def read_mutants(file: Path, read) -> None:
    content, chance, refused = file.read_bytes(), random.Random(5), 0
    for number in range(NUM_MUTANTS):
        file.write_bytes(mutant(content, chance))
        try:
            read()
        except MatchaError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"mutant {number} of {file.name}") from error
    assert refused


def test_topologies(tmp_path) -> None:
    np.save(tmp_path / "a.npy", np.array([[0, 1, 1], [1, 0, 0], [1, 0, 0]]))
    nx.write_graphml(nx.path_graph(4), tmp_path / "a.graphml")
    (tmp_path / "a.csv").write_text("source,target,time\n0,1,1.0\n1,2,2.0\n")
    (tmp_path / "a.edges").write_text("0 1 2.0\n1 2 3.0\n")
    (tmp_path / "a.json").write_text(json.dumps(nx.node_link_data(nx.path_graph(4))))
    for file in sorted(tmp_path.iterdir()):
        read_mutants(file, lambda file=file: Topology.read(file))


def test_peers_files(tmp_path) -> None:
    file = tmp_path / "peers"
    file.write_text("# rank host port\n0 a.example 29600\n1\n2 b 29601\n")
    read_mutants(file, lambda: read_peers(file))


@pytest.mark.parametrize("name", ["run.json", "records.jsonl", "worker-002.jsonl", "spans.jsonl"])
def test_runs(tmp_path, name) -> None:
    with RunWriter(tmp_path, header(), PLAN) as writer:
        for k in (1, 2, 3):
            writer.record(Record(iteration=k, epoch=float(k), worker_loss=float("inf")))
            writer.record(Record(iteration=k, epoch=float(k), worker=2))
            writer.record(Span(worker=2, iteration=k, kind="compute", start=0.0, end=1.0))
    read_mutants(tmp_path / name, lambda: read_run(tmp_path))


@pytest.mark.parametrize("read", [Topology.read, read_peers, read_run, Plan.load])
def test_names_that_no_file_can_have(read) -> None:
    for name in ("x" * 5000 + ".json", "a\0b.json"):
        with pytest.raises(MatchaError):
            read(name)
