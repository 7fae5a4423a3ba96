from __future__ import annotations

import pytest

from matcha.distributed import run_threads
from matcha.distributed.agreement import agree, differences
from matcha.errors import InputError


def test_agreeing_workers_learn_their_hosts() -> None:
    def work(transport):
        agree(transport, {"plan": "a"}, 10)
        return transport.hosts, transport.name(1)

    hosts, name = run_threads(3, work)[2]
    assert len(hosts) == 3
    assert name == f"rank 1 (host {hosts[1]})"


def test_every_worker_hears_who_differs_in_what() -> None:
    def work(transport) -> str:
        facts = {"plan": "b" if transport.rank == 2 else "a", "model": "m"}
        with pytest.raises(InputError) as caught:
            agree(transport, facts, 10)
        return str(caught.value)

    texts = run_threads(4, work)
    assert len(set(texts)) == 1
    assert "rank 2 (host" in texts[0]
    assert "another plan ('b', others 'a')" in texts[0]
    assert "rank 0" not in texts[0]


def test_in_a_tie_the_lowest_rank_is_right() -> None:
    assert [rank for rank, _ in differences([{"a": "1"}, {"a": "2"}])] == [1]
