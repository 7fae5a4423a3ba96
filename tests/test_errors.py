from __future__ import annotations

import sys

import pytest

from matcha import errors
from matcha.cli import main
from matcha.errors import (
    DataError,
    ExchangeError,
    InputError,
    MatchaError,
    PackageError,
    WorkerError,
    missing_package,
    require,
    unknown_name,
)


def children(kind):
    for child in kind.__subclasses__():
        yield child
        yield from children(child)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("x"), 2),
        (errors.TopologyError("x"), 2),
        (errors.PlanError("x"), 2),
        (errors.ModelError("x"), 2),
        (DataError("x"), 2),
        (errors.WriteError("x"), 2),
        (ExchangeError("x"), 3),
        (errors.PeerLostError("x", peer=1), 3),
        (PackageError("x"), 4),
        (WorkerError("x", exit_code=77), 77),
    ],
)
def test_the_exit_code_says_what_happened(error, code, monkeypatch, capsys):
    def fail(**_):
        raise error

    monkeypatch.setattr("matcha.cli.app", fail)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert capsys.readouterr().err == "matcha: x\n"


def test_every_error_is_in_the_table_above():
    known = test_the_exit_code_says_what_happened.pytestmark[0].args[1]
    assert {type(error) for error, _ in known} == {
        kind for kind in children(MatchaError) if kind.__module__.startswith("matcha.")
    }


@pytest.mark.parametrize(
    ("package", "extra"), [("mpi4py", "mpi"), ("torch", "torch"), ("matplotlib", "plot")]
)
def test_a_missing_package_names_this_distribution(package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError) as caught:
        __import__(package)
    assert f'pip install "matcha-sgd[{extra}]"' in str(missing_package(caught.value))


def test_a_package_is_required_before_the_work(monkeypatch):
    require("matplotlib")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PackageError, match=r"matcha-sgd\[plot\]"):
        require("matplotlib")


def test_a_package_of_somebody_else_is_not_explained():
    assert missing_package(ImportError(name="pandas")) is None


def test_nothing_is_near_enough():
    assert str(unknown_name("colour", "zzz", ["red"])) == "unknown colour 'zzz' (known: red)"
