"""Fetch a corpus of English text for language models: RFCs, from Debian's packages.

    python tools/fetch_text.py FOLDER

Writes one plain text file per RFC to FOLDER/experimental and FOLDER/standards, about 1,000 files
and 70 MB, without the headers and footers of printed pages. `matcha simulate --task text --data
FOLDER` trains on it.

The packages `doc-rfc-experimental` and `doc-rfc-old-std` come from the component `non-free` of the
Debian archive that this machine already uses: an RFC may be copied freely if it is kept whole, so
this repository has a script and no text. apt checks the archive's signature; this script checks
each package's own hash as well. Needs apt-get and dpkg-deb; the system's settings stay as they are.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PACKAGES = {
    "doc-rfc-experimental": (
        "experimental",
        "bff38cd2d63f0f85ed7eaf954845f34bbaba56dfe3111c9e3e07624296889817",
    ),
    "doc-rfc-old-std": (
        "standards",
        "13aa366cbed958a3decc3a89e32c058746764906e1045b5cd00425b1be0ffc8a",
    ),
}
"""Each package: the folder for its documents, and its SHA-256 (version 20230121-1)."""

_FOOTER = re.compile(r".*\[Page [0-9ivxlc]+\]\s*$", re.IGNORECASE)
_HEADER = re.compile(r"RFC ?\d+ .*(19|20)\d\d\s*$", re.IGNORECASE)


def main() -> None:
    """Fetch, check, unpack and clean the packages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the text goes")
    folder: Path = parser.parse_args().folder
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for package in download(Path(scratch)):
                write_documents(package, folder)
    except (RuntimeError, OSError) as error:
        sys.exit(f"fetch_text: {error}")


def download(scratch: Path) -> Iterator[Path]:
    """Download the packages with apt, and check their hashes."""
    for command in ("apt-get", "dpkg-deb"):
        if shutil.which(command) is None:
            raise RuntimeError(f"{command} was not found: run this on Debian or Ubuntu")
    sources = scratch / "corpus.sources"
    sources.write_text(_with_non_free(Path("/etc/apt")))
    (scratch / "lists" / "partial").mkdir(parents=True)
    options = [
        f"Dir::Etc::sourcelist={sources}",
        "Dir::Etc::sourceparts=-",
        f"Dir::State::lists={scratch / 'lists'}",
        "APT::Sandbox::User=root",  # the folder is this user's own
    ]
    flags = [flag for option in options for flag in ("-o", option)]
    for action in (["update"], ["download", *PACKAGES]):
        print(f"apt-get {' '.join(action)} ...", flush=True)
        done = subprocess.run(
            ["apt-get", "-qq", *flags, *action], cwd=scratch, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"apt-get {action[0]} failed: {done.stderr.strip()}")
    for name, (_, expected) in PACKAGES.items():
        (package,) = scratch.glob(f"{name}_*.deb")
        found = hashlib.sha256(package.read_bytes()).hexdigest()
        if found != expected:
            raise RuntimeError(f"{package.name} has the SHA-256 {found}, not {expected}")
        yield package


def _with_non_free(apt: Path) -> str:
    """The archive that apt already uses, as one source with the component `non-free`."""
    for file in sorted((apt / "sources.list.d").glob("*.sources")):
        for paragraph in file.read_text().split("\n\n"):
            fields = {
                key.strip(): value.strip()
                for key, _, value in (line.partition(":") for line in paragraph.splitlines())
            }
            if "main" in fields.get("Components", "").split() and "debian" in fields["URIs"]:
                fields["Components"] = "main non-free"
                return "".join(f"{key}: {value}\n" for key, value in fields.items() if value)
    for line in (apt / "sources.list").read_text().splitlines():
        if line.startswith("deb ") and " main" in line and "debian" in line:
            return f"{line.split(' main')[0]} main non-free\n"
    raise RuntimeError("no Debian archive found in /etc/apt: run this on Debian")


def write_documents(package: Path, folder: Path) -> None:
    """Unpack a package and write its documents as clean text."""
    source, _ = PACKAGES[package.name.partition("_")[0]]
    target = folder / source
    target.mkdir(parents=True, exist_ok=True)
    unpacked = package.with_suffix("")
    subprocess.run(["dpkg-deb", "-x", package, unpacked], check=True)
    files = {file.name: file for file in unpacked.rglob("rfc*.txt.gz")}  # some stand there twice
    for name, file in sorted(files.items()):
        text = clean(gzip.decompress(file.read_bytes()).decode("utf-8", errors="replace"))
        (target / name.removesuffix(".gz")).write_text(text, encoding="utf-8")
    print(f"{target}: {len(files)} documents", flush=True)


def clean(text: str) -> str:
    r"""A document without page headers, page footers and form feeds; blank lines collapse to one.

    >>> clean("a\n\n\nB. C       [Page 1]\n\fRFC 1507   DASS   September 1993\n\n\nb\n")
    'a\n\nb\n'
    """
    lines: list[str] = []
    for line in text.replace("\f", "\n").splitlines():
        line = line.rstrip()
        if _FOOTER.match(line) or _HEADER.match(line):
            continue
        if line or (lines and lines[-1]):
            lines.append(line)
    return "\n".join(lines).strip() + "\n"


if __name__ == "__main__":
    main()
