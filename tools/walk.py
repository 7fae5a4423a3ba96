"""A walk of a hundred commands at 80 columns, to be read line by line.

    python tools/walk.py > walk.txt      # all; exit 1 where a line wraps or a traceback shows
    python tools/walk.py plan errors     # some chapters

Each command runs as a user would type it, in a terminal and in one new folder, with what it printed
below it. A line of more than 80 columns would wrap; JSON, which is for machines, may be longer.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

COLUMNS = 80
FILES = {
    "links.csv": "source,target,weight\nberlin,paris,1\nparis,rome,2\nrome,berlin,1\nrome,oslo,3\n",
    "times.csv": "source,target,time\nberlin,paris,1\nparis,rome,2\nrome,berlin,1\n",
    "plain.csv": "0,1\n1,2\n2,0\n",
    "matrix.csv": ",a,b,c\na,0,1,1\nb,1,0,1\nc,1,1,0\n",
    "names.csv": 'from,to\n"New York",Oslo\nOslo,"São Paulo"\n"São Paulo","New York"\n',
    "bad.csv": "name,age\nada,36\ngrace,45\n",
    "apart.edges": "0 1\n2 3\n",
    "broken.json": '{"links": [[0, 1], [1',
    "sites.json": '[["oslo", "bonn"], ["bonn", "rome"], ["rome", "oslo"]]',
    "quiet.py": "print('hello')\n",
    "fails.py": "import os\nraise SystemExit('no data here' if os.environ['RANK'] == '1' else 0)\n",
    "raises.py": "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('no data here')\n",
    "mine.py": "import matcha\n\n\ndef pairs(request):\n"
    "    rounds = [[[(0, 1), (2, 3)]], [[(1, 2)]]]\n"
    "    strategy = matcha.strategies.Rounds(rounds=rounds)\n"
    "    return matcha.plan(request.topology, strategy=strategy)\n\n\n"
    "def nothing(*given, **named):\n    return 3\n",
}
CHAPTERS = {
    "help": """
        matcha
        matcha --help
        matcha --version
        matcha advise --help
        matcha plan --help
        matcha sweep --help
        matcha tune --help
        matcha simulate --help
        matcha train --help
        matcha report --help
        matcha watch --help
        matcha probe --help
        matcha keys --help
        matcha keys new --help
        matcha demo --help
        matcha bench --help
        matcha bench
    """,
    "advise": """
        matcha advise --workers 8 --model-mb 100 --link-mbps 1000 --compute-time 0.1
        matcha advise path:2 --model-mb 1 --link-mbps 100 --compute-time 1
        matcha advise paper:er8 --model-mb 10 --link-mbps 200 --compute-time 0.04 --alike
        matcha advise --workers 8
        matcha advise --workers 1 --model-mb 100 --link-mbps 1000 --compute-time 0.1
        matcha advise --workers 8 --model-mb -1 --link-mbps 1000 --compute-time 0.1
    """,
    "plan": """
        matcha plan paper:er8
        matcha plan paper:er8 -s matcha -b 0.5 -o plan.json --plot plan.svg
        matcha plan plan.json
        matcha plan plan.json -b 0.2
        matcha plan paper:er8 -s matcha -b 0.5 -o plan.json
        matcha plan ring:2 -b 0.5
        matcha plan complete:8 -s vanilla
        matcha plan complete:8 -s allreduce
        matcha plan complete:8 -s local -b 0.1
        matcha plan complete:8 -s silent
        matcha plan complete:8 -s hypercube
        matcha plan complete:8 -s base
        matcha plan complete:8 -s one-peer
        matcha plan complete:8 -s ceca
        matcha plan star:64 -b 0.1
        matcha plan links.csv -b 0.3
        matcha plan times.csv -b 0.3
        matcha plan plain.csv
        matcha plan matrix.csv
        matcha plan names.csv -s matcha
        matcha plan sites.json --wire modulo:3 -b 0.1
        matcha plan paper:er8 -b 0.5 --stage 1000:0.1 -o staged.json
        matcha plan staged.json
        matcha plan paper:er8 --json -s vanilla
        matcha plan path:4 -s mine:pairs
        matcha plan geometric:64:0.25:1 -b 0.1
    """,
    "sweep": """
        matcha sweep paper:er8 -b 0.1,0.5
        matcha sweep ring:2 -b 1 -s vanilla
        matcha sweep paper:er8 -s greedy,matcha -b 0.02,0.1 --wire float32,modulo:3
        matcha sweep links.csv -b 0.5 -s greedy --plot sweep.png
        matcha sweep paper:er8 -b 0.5 -s vanilla,matcha --alpha rho
    """,
    "tune": """
        matcha tune ring:4 --compute-time 0.1 --link-time 0.05 -b 0.1,0.5
        matcha tune links.csv --compute-time 0.1 -b 0.1 -s greedy --page tune.html
        matcha tune ring:4 --link-time 0.05
        matcha tune ring:4 --compute-time 0.1 --link-time 0.05 --target-loss 0.1
    """,
    "simulate": """
        matcha simulate ring:4 --task logistic --epochs 3 --compute-time 0.01
        matcha simulate ring:4 --task logistic --epochs 1 -s greedy --no-report
        matcha simulate ring:4 --task logistic --epochs 2 -s vanilla,greedy --seed 0,1 -o seeds
        matcha simulate ring:4 --task logistic --epochs 3 --compute-time 0.01
        matcha simulate ring:4 --task logistic --epochs 3 --compute-time 0.01 --resume
        matcha simulate ring:4 --task logistic --epochs 3 -o none --resume
        matcha simulate --task logistic --epochs 2 --plan plan.json -o planned
        matcha simulate ring:4 --plan plan.json -o planned
        matcha simulate ring:4 --task logistic --epochs 2 --lr 1e9 -o wild --no-report
        matcha simulate ring:4 --task logistic --epochs 2 -s greedy --speeds 1,1,1,0.25 -o slow
        matcha simulate ring:4 --task logistic --epochs 1 -s greedy --json -o machine --no-report
    """,
    "train": """
        matcha train logistic -t path:2 --epochs 2 -o trained
        matcha train logistic -t path:2 --epochs 2 -o trained
        matcha train logistic -t path:2 --epochs 2 -o trained --resume
        matcha train logistic -t path:2 --epochs 2 -o other --resume
        matcha train quiet.py -t path:2
        matcha train fails.py -t path:2
        matcha train raises.py -t path:2
        matcha train quiet.py -t path:2 --tensorboard
        matcha train quiet.py -t path:2 --watch --target-loss 0.1
        matcha train absent.py
        matcha train logistics
    """,
    "report": """
        matcha report runs/simulate
        matcha report runs/simulate
        matcha report seeds -o seeds.html --target-loss 0.6
        matcha report plan.json -o shown.html
        matcha report trained --format svg -o drawn
        matcha report nowhere
        matcha report seeds --json -o again.html
        matcha watch trained --once
        matcha watch nowhere
    """,
    "keys": """
        matcha keys new keys --workers 2
        matcha keys show keys
        matcha keys revoke keys --worker 1
        matcha keys new keys --workers 2
        matcha probe path:2 -o measured.json --repetitions 2
        matcha probe path:2 -o measured.json --repetitions 2
    """,
    "errors": """
        matcha plam
        matcha plan
        matcha plan rung:8
        matcha plan ring:x
        matcha plan ring:1
        matcha plan paper:er9
        matcha plan nothing.csv
        matcha plan bad.csv
        matcha plan apart.edges
        matcha plan broken.json
        matcha plan ring:8 -b 2
        matcha plan ring:8 -b half
        matcha plan ring:8 -s macha
        matcha plan ring:8 -s mine:absent
        matcha plan ring:8 -s mine:nothing
        matcha plan ring:8 --wire float8
        matcha plan ring:8 --budgett 0.5
        matcha plan ring:8 -o plain.csv/plan.json
        matcha plan ring:8 --plot plan.gif
        matcha sweep ring:8 -b 0.1,zero
        matcha simulate ring:4 --task digit
        matcha simulate ring:4 --task logistic --momentum quasi-global --optimizer sgdd
        matcha simulate ring:4 --task cifar10 --data nowhere -o fresh
        matcha simulate ring:4 --task mine:nothing -o fresh
        matcha train digits --plan absent.json
        matcha train digits -t path:2 --rank 1
    """,
}


def commands() -> list[str]:
    """All commands of the chapters that were asked for."""
    asked = sys.argv[1:] or list(CHAPTERS)
    lines = [line.strip() for name in asked for line in CHAPTERS[name].splitlines()]
    return [line for line in lines if line]


def run_in_terminal(command: str, folder: str, environment: dict[str, str]) -> tuple[str, int]:
    """What a command prints in a terminal of 80 columns, and its exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "matcha.cli", *shlex.split(command)[1:]],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    chunks = []
    with contextlib.suppress(OSError):  # how a terminal's end is told
        while chunk := os.read(ours, 1 << 16):
            chunks.append(chunk)
    os.close(ours)
    text = b"".join(chunks).decode().replace("\r\n", "\n").replace(folder, "~")
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text), process.wait()


def main() -> int:
    """Run them all; return 1 where anything wrapped or fell over."""
    faults = []
    environment = {
        **{name: value for name, value in os.environ.items() if name != "COLUMNS"},
        "PYTHONPATH": str(Path(__file__).parent.parent / "src"),
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "TERM": "dumb",  # nothing moves: bars are drawn when they are done
    }
    walked = commands()
    with tempfile.TemporaryDirectory() as folder:
        for name, text in FILES.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        for command in walked:
            began = time.monotonic()
            output, code = run_in_terminal(command, folder, environment)
            took = time.monotonic() - began
            print(f"\n$ {command}\n{output.rstrip()}\n[exit {code}, {took:.1f} s]", flush=True)
            wide = [line for line in output.splitlines() if len(line) > COLUMNS]
            if wide and "--json" not in command and "raises.py" not in command:
                faults.append(f"{command}: {len(wide[0])} columns: {wide[0]}")
            if "Traceback" in output and "raises.py" not in command:
                faults.append(f"{command}: a traceback")
    print(f"\n{len(walked)} commands, {len(faults)} faults")
    print("\n".join(faults))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
