"""Help fits a terminal of 80 columns, in groups, and cuts nothing."""

from __future__ import annotations

import re

import pytest
from tests.commands import matcha_command
from typer.main import get_command

from matcha.cli import app
from matcha.cli.help import COMMANDS, GROUPS

PATHS = [(), *((name,) for name in COMMANDS), *(("keys", n) for n in ("new", "renew", "revoke"))]


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_fits_eighty_columns_and_cuts_nothing(path):
    done = matcha_command(*path, "--help", COLUMNS="80")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    words = [word for line in lines for word in line.split() if word.endswith("…")]
    assert set(words) <= {"TEXT,…", "NUMBER,…", "INTEGER,…", "…"}, words
    # A line of an example that goes on is not one that wraps.
    examples = [line for line in lines if re.match(r"  (matcha|torchrun) ", line)]
    shown = "\n".join(lines)
    command = get_command(app)
    for name in path:
        command = command.commands[name]
    written = re.findall(r"^\s+((?:matcha|torchrun) .*)$", command.help or "", re.MULTILINE)
    assert len(examples) >= len(written)
    assert all(example.strip() in shown for example in written)


def test_commands_come_in_the_order_of_the_work():
    assert list(get_command(app).list_commands(None)) == COMMANDS
    lines = matcha_command("--help", COLUMNS="80").stdout.splitlines()
    first = [line.split()[0] for line in lines if re.match(r"  [a-z]", line)]
    assert [name for name in first if name in COMMANDS] == COMMANDS
    assert COMMANDS[:7] == ["advise", "plan", "sweep", "tune", "simulate", "train", "report"]


def test_every_option_stands_in_a_group():
    known = set(" ".join(GROUPS.values()).split())
    assert len(" ".join(GROUPS.values()).split()) == len(known), "an option is in two groups"
    found = set()

    def collect(command):
        for one in getattr(command, "commands", {}).values():
            collect(one)
        if not hasattr(command, "commands"):
            options = (p for p in command.params if p.param_type_name == "option")
            found.update(p.name for p in options if not p.hidden)

    collect(get_command(app))
    assert found - known == set()
    arguments = {"topology"}  # an argument in one command, an option in another
    assert known - found - arguments == set()


def test_types_are_words_that_people_know():
    text = matcha_command("train", "--help", COLUMNS="80").stdout
    assert "--budget NUMBER" in text
    assert "--epochs INTEGER" in text
    assert "--plan PATH" in text
    assert not re.search(r"[^b]float(?!32)", text)
