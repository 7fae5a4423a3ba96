"""Data sets in pieces small enough to send to a machine that reaches nothing, and back again.

    python tools/pack_data.py pack DATA .carry          # here: DATA holds the public layouts
    python tools/pack_data.py unpack .carry /tmp/data   # there, a piece a call, in any order

Images become lossless WebP strips of 100, about half their size; every record is checked against
its SHA-256 when it is unpacked, and the files are the public ones bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

STRIP = 100
_C10, _C100 = "cifar-10-batches-bin", "cifar-100-binary"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A run of records of one public file."""

    file: str
    label_bytes: int
    start: int
    count: int

    @property
    def record(self) -> int:
        """Bytes a record."""
        return self.label_bytes + 3072


def _batch(number: str) -> Part:
    return Part(file=f"{_C10}/{number}.bin", label_bytes=1, start=0, count=10_000)


PIECES: dict[str, list[Part]] = {
    "cifar10_a": [_batch("data_batch_1"), _batch("data_batch_2"), _batch("test_batch")],
    "cifar10_b": [_batch(f"data_batch_{k}") for k in (3, 4, 5)],
    "cifar100_a": [Part(file=f"{_C100}/train.bin", label_bytes=2, start=0, count=30_000)],
    "cifar100_b": [
        Part(file=f"{_C100}/train.bin", label_bytes=2, start=30_000, count=20_000),
        Part(file=f"{_C100}/test.bin", label_bytes=2, start=0, count=10_000),
    ],
}
TEXTS = [f"ptb/ptb.{name}.txt" for name in ("train", "valid", "test")]


def _planar_to_strip(pixels: npt.NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(
        np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)).reshape(-1, 32, 3)
    )


def _strip_to_planar(strip: bytes) -> npt.NDArray[np.uint8]:
    rows = np.asarray(Image.open(io.BytesIO(strip)).convert("RGB"))
    planar: npt.NDArray[np.uint8] = rows.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
    return planar.reshape(-1, 3072)


def pack(source: Path, target: Path, names: list[str]) -> None:
    """Write pieces of the data sets as small archives, with the digest of what is inside."""
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = target / f"{name}.zip"
        with zipfile.ZipFile(path, "w") as archive:
            if name == "ptb":
                for text in TEXTS:
                    archive.write(source / text, text, zipfile.ZIP_LZMA)
            else:
                _pack_images(source, archive, PIECES[name])
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB", flush=True)


def _pack_images(source: Path, archive: zipfile.ZipFile, parts: list[Part]) -> None:
    manifest = []
    for k, part in enumerate(parts):
        whole = np.fromfile(source / part.file, np.uint8).reshape(-1, part.record)
        rows = whole[part.start : part.start + part.count]
        manifest.append(vars(part) | {"sha256": hashlib.sha256(rows.tobytes()).hexdigest()})
        archive.writestr(f"{k}/labels", rows[:, : part.label_bytes].tobytes(), zipfile.ZIP_DEFLATED)
        for start in range(0, part.count, STRIP):
            buffer = io.BytesIO()
            strip = _planar_to_strip(rows[start : start + STRIP, part.label_bytes :])
            strip.save(buffer, "WEBP", lossless=True, quality=60, method=4)
            archive.writestr(f"{k}/{start:06d}.webp", buffer.getvalue())
    archive.writestr("manifest.json", json.dumps(manifest))


def unpack(source: Path, target: Path) -> None:
    """Put the pieces of archives where they belong, byte for byte."""
    for path in sorted(source.glob("*.zip")):
        with zipfile.ZipFile(path) as archive:
            if path.stem == "ptb":
                archive.extractall(target, TEXTS)
            else:
                _unpack_images(archive, target)
        print(f"unpacked {path.name}", flush=True)


def _unpack_images(archive: zipfile.ZipFile, target: Path) -> None:
    for k, entry in enumerate(json.loads(archive.read("manifest.json"))):
        digest = entry.pop("sha256")
        part = Part(**entry)
        strips = sorted(n for n in archive.namelist() if n.startswith(f"{k}/") and "webp" in n)
        pixels = np.concatenate([_strip_to_planar(archive.read(name)) for name in strips])
        labels = np.frombuffer(archive.read(f"{k}/labels"), np.uint8).reshape(part.count, -1)
        rows = np.hstack([labels, pixels])
        if hashlib.sha256(rows.tobytes()).hexdigest() != digest:
            sys.exit(f"{part.file}: not the bytes that were packed")
        path = target / part.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        with path.open("r+b") as file:
            file.seek(part.start * part.record)
            file.write(rows.tobytes())


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("action", choices=["pack", "unpack"])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--only", nargs="*", choices=[*PIECES, "ptb"], default=[*PIECES, "ptb"])
    args = parser.parse_args()
    if args.action == "pack":
        pack(args.source, args.target, args.only)
    else:
        unpack(args.source, args.target)


if __name__ == "__main__":
    main()
