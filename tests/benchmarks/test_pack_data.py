from __future__ import annotations

import pytest
from tests.datasets import write_cifar10, write_cifar100, write_ptb

import pack_data


@pytest.fixture
def packer(monkeypatch):
    part = pack_data.Part
    batch, train = "cifar-10-batches-bin/data_batch_1.bin", "cifar-100-binary/train.bin"
    monkeypatch.setattr(
        pack_data,
        "PIECES",
        {
            "cifar10_a": [part(file=batch, label_bytes=1, start=0, count=8)],
            "cifar100_a": [part(file=train, label_bytes=2, start=0, count=7)],
            "cifar100_b": [part(file=train, label_bytes=2, start=7, count=5)],
        },
    )
    return pack_data


def test_pieces_in_any_order_give_the_same_bytes(packer, tmp_path):
    source, packed, target = tmp_path / "source", tmp_path / "packed", tmp_path / "target"
    write_cifar10(source)
    write_cifar100(source)
    write_ptb(source)
    for name in ("cifar100_b", "cifar10_a", "cifar100_a", "ptb"):
        packer.pack(source, packed / name, [name])
        packer.unpack(packed / name, target)
    for file in (
        "cifar-10-batches-bin/data_batch_1.bin",
        "cifar-100-binary/train.bin",
        "ptb/ptb.train.txt",
    ):
        assert (target / file).read_bytes() == (source / file).read_bytes()


def test_damage_is_noticed(packer, tmp_path, monkeypatch):
    write_cifar10(tmp_path / "source")
    packer.pack(tmp_path / "source", tmp_path / "packed", ["cifar10_a"])
    monkeypatch.setattr(packer, "_strip_to_planar", lambda strip: packer.np.zeros((8, 3072), "u1"))
    with pytest.raises(SystemExit, match="not the bytes that were packed"):
        packer.unpack(tmp_path / "packed", tmp_path / "target")
