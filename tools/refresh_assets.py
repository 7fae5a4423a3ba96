"""Refresh the vendored JavaScript of the report from the npm registry.

    python tools/refresh_assets.py            # the newest release of each package
    python tools/refresh_assets.py --check    # only say what is vendored and what is newest

A maintainer's tool: needs npm and the network. Nothing of it runs when a report is written.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

ASSETS = Path(__file__).parent.parent / "src" / "matcha" / "report" / "assets"
PACKAGES = {
    "plotly.js-basic-dist-min": {
        "package/plotly-basic.min.js": "plotly-basic.min.js",
        "package/LICENSE": "plotly-LICENSE.txt",
    },
}


def newest(package: str) -> str:
    """The registry's current version of a package."""
    command = ["npm", "view", package, "version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def fetch(package: str, files: dict[str, str]) -> str:
    """Download a package and copy the wanted files beside the page's own."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", package, "--json", "--pack-destination", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        release = json.loads(done.stdout)[0]
        with tarfile.open(Path(folder) / release["filename"]) as archive:
            for inside, name in files.items():
                member = archive.extractfile(inside)
                assert member is not None, f"{package} has no {inside}"
                (ASSETS / name).write_bytes(member.read())
    return str(release["version"])


def main() -> None:
    """Refresh, or with --check only compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    record = ASSETS / "versions.json"
    versions = json.loads(record.read_text()) if record.exists() else {}
    for package, files in PACKAGES.items():
        before = versions.get(package, "none")
        after = newest(package) if check else fetch(package, files)
        print(f"{package}: vendored {before}, {'newest' if check else 'now'} {after}")
        versions[package] = after
    if not check:
        record.write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
