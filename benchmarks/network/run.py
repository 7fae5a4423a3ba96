"""Run a command on every host of a shaped network.

    sudo python benchmarks/network/run.py paper:er8 --mbps 200 -- python my_worker.py

The topology is a name or a file, as for `matcha plan`. Each worker finds RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT in its environment, as under torchrun. Ctrl-C takes everything down;
`--clean` removes what a killed run may have left.
"""

from __future__ import annotations

import argparse
import signal
import sys

from namespaces import Network, leftovers, remove

from matcha import families
from matcha.errors import MatchaError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topology", nargs="?", help="a name such as ring:4, or a file")
    parser.add_argument("--mbps", type=float, default=None, help="speed of each host's card")
    parser.add_argument("--message-bytes", type=int, default=4_000_000)
    parser.add_argument("--clean", action="store_true", help="remove leftovers and exit")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, command = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    if options.clean:
        print(f"removing {len(leftovers())} namespaces")
        remove()
        return 0
    if options.topology is None or not command:
        parser.error("a topology and a command are needed")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as for Ctrl-C: `with` cleans up
    try:
        topology = families.parse(options.topology)
        with Network(topology, mbps=options.mbps, message_bytes=options.message_bytes) as network:
            return max(map(abs, network.run(command)))
    except MatchaError as error:
        print(f"network: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("network: stopped.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
