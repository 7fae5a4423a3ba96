"""Tiny data sets, in memory and in their public layouts."""

from __future__ import annotations

import pickle

import numpy as np

from matcha.zoo.data import Images


def random_images(num_train, num_test=10, num_classes=10):
    random = np.random.default_rng(0)
    return Images(
        train_images=random.integers(0, 256, (num_train, 32, 32, 3), dtype=np.uint8),
        train_labels=np.arange(num_train) % num_classes,
        test_images=random.integers(0, 256, (num_test, 32, 32, 3), dtype=np.uint8),
        test_labels=np.arange(num_test) % num_classes,
        num_classes=num_classes,
    )


def _rows(number, seed):
    return np.random.default_rng(seed).integers(0, 256, (number, 3072), dtype=np.uint8)


def write_cifar10(root, layout="binary", number=8):
    """Files of ``number`` images; returns the pixels and labels of the first batch."""
    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    folder = root / ("cifar-10-batches-bin" if layout == "binary" else "cifar-10-batches-py")
    folder.mkdir(parents=True)
    labels = np.arange(number, dtype=np.uint8) % 10
    for seed, name in enumerate(names):
        pixels = _rows(number, seed)
        if layout == "binary":
            (folder / f"{name}.bin").write_bytes(np.column_stack([labels, pixels]).tobytes())
        else:
            document = {b"data": pixels, b"labels": labels.tolist(), b"batch_label": name.encode()}
            (folder / name).write_bytes(pickle.dumps(document, protocol=2))
    return _rows(number, 0), labels


def write_cifar100(root, layout="binary", number=12):
    folder = root / ("cifar-100-binary" if layout == "binary" else "cifar-100-python")
    folder.mkdir(parents=True)
    fine = (np.arange(number, dtype=np.uint8) * 9) % 100
    for seed, name in enumerate(["train", "test"]):
        pixels = _rows(number, seed)
        if layout == "binary":
            rows = np.column_stack([fine // 5, fine, pixels]).astype(np.uint8)
            (folder / f"{name}.bin").write_bytes(rows.tobytes())
        else:
            document = {
                b"data": pixels,
                b"fine_labels": fine.tolist(),
                b"coarse_labels": (fine // 5).tolist(),
            }
            (folder / name).write_bytes(pickle.dumps(document, protocol=2))
    return _rows(number, 0), fine


def write_ptb(root, sentences=200):
    folder = root / "ptb"
    folder.mkdir(parents=True)
    words = [f"w{k}" for k in range(20)]
    random = np.random.default_rng(0)
    lines = [" " + " ".join(random.choice(words, 6)) + " " for _ in range(sentences)]
    lines.insert(0, " ".join(words))
    for name, part in (("train", lines), ("valid", lines[:30]), ("test", lines[:30])):
        (folder / f"ptb.{name}.txt").write_text("\n".join(part) + "\n")
    return lines


def write_text(root, documents=40, words=300):
    """Documents of two kinds, each in a folder of its own."""
    random = np.random.default_rng(0)
    vocabulary = ["round", "matching", "worker", "budget", "link", "plan"]
    for number in range(documents):
        kind, known = (("first", vocabulary[:3]), ("second", vocabulary[3:]))[number % 2]
        (root / kind).mkdir(parents=True, exist_ok=True)
        text = " ".join(random.choice(known, words)) + "\n"
        (root / kind / f"{number:02d}.txt").write_text(text)
