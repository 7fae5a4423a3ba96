"""The one-peer exponential graph is what `greedy` is measured against: it must be right."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from benchmarks.parts.supports import doubling_bound

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "parts" / "one_peer.py"


@pytest.fixture(scope="module")
def one_peer():
    spec = importlib.util.spec_from_file_location("one_peer", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_doubly_stochastic_and_exact_for_powers_of_two(one_peer):
    for workers in (6, 8, 16):
        product = np.eye(workers)
        for W in one_peer.one_peer_exponential(workers):
            np.testing.assert_allclose(W.sum(axis=0), 1)
            np.testing.assert_allclose(W.sum(axis=1), 1)
            product = W @ product
        exact = np.allclose(product, 1 / workers)
        assert exact == (workers in (8, 16))
    error = one_peer.one_peer_exponential_error
    assert error(8, 1.0) == pytest.approx(doubling_bound(8, 1.0))
    assert error(6, 1.0) > doubling_bound(6, 1.0)


def test_ceca_with_two_models_is_the_exponential_graph_for_powers_of_two(one_peer):
    for workers in (4, 8, 16):
        same = one_peer.one_peer_exponential_error(workers, 1.0)
        assert one_peer.two_model_ceca_error(workers) == pytest.approx(same)
    assert one_peer.two_model_ceca_error(12) < one_peer.one_peer_exponential_error(12, 1.0)
