"""Events: what is left of a round, how long it takes, and who brings a worker back."""

from __future__ import annotations

import json

import numpy as np
import pytest

import matcha
from matcha import families
from matcha.errors import InputError
from matcha.plans import Cut, Events, Loss, Return, Slowdown
from matcha.strategies import Greedy, Rounds
from matcha.timing import Underlay

RING = families.ring(4)


def test_who_is_gone_and_what_is_cut_is_left_out_of_rounds():
    plan = matcha.plan(RING, 1.0, "vanilla")
    events = Events(losses=(Loss(worker=2, at=3, back=6),), cuts=(Cut(link=(0, 1), at=5, until=7),))
    links = [sorted(events.round(plan, k).links) for k in range(2, 8)]
    everything = sorted(RING.links)
    without = [link for link in everything if 2 not in link]
    uncut = [link for link in everything if link != (0, 1)]
    both = [link for link in without if link != (0, 1)]
    assert links == [everything, without, without, both, uncut, everything]
    # Nobody loses anything by it: the average stays.
    W = events.round(plan, 5).matrix(4)
    np.testing.assert_allclose((W.sum(0), W.sum(1)), 1)


def test_a_slower_link_costs_time_while_it_lasts():
    topology = RING.with_link_times([1.0, 2.0, 3.0, 4.0])
    plan = matcha.plan(topology, 1.0, "vanilla")
    link = RING.links[0]
    events = Events(slowdowns=(Slowdown(link=link, at=2, until=4, factor=10),))
    round_ = plan.round(0)
    usual = plan.round_time(round_)
    matching = next(some for some in round_.matchings if link in some)
    slower = usual - plan.timing.matching_time(matching) + 10.0
    assert [events.round_time(plan, round_, k) for k in (1, 2, 3, 4)] == pytest.approx(
        [usual, slower, slower, usual]
    )


def test_a_slower_link_is_slower_both_ways():
    """Before, a message from its second end to its first took no longer."""
    plan = matcha.plan(
        RING.with_link_times([1.0] * 4), 1.0, Rounds(rounds=[[[(1, 0)]]], mixing="push")
    )
    events = Events(slowdowns=(Slowdown(link=(0, 1), at=0, factor=3),))
    assert events.round_time(plan, plan.round(0), 0) == pytest.approx(3.0)


@pytest.mark.parametrize("timed", [False, True])
def test_a_slower_link_holds_an_all_reduce_up(timed):
    """Before, its time was that of the links one after another: less than without the event."""
    topology = RING.with_link_times([1.0] * 4) if timed else RING
    plan = matcha.plan(topology, 1.0, "allreduce")
    round_ = plan.round(0)
    alike, slower = (
        Events(slowdowns=(Slowdown(link=(0, 1), at=0, factor=factor),)) for factor in (1, 5)
    )
    assert alike.round_time(plan, round_, 0) == pytest.approx(plan.round_time(round_))
    # The best order of workers goes round the link: hops of two links at most.
    assert slower.round_time(plan, round_, 0) == pytest.approx(2 * 3 / 4 * 2)


def test_a_worker_comes_back_with_the_state_of_who_is_there():
    first = Loss(worker=0, at=2, back=5)
    assert Events(losses=(first,)).returns(5, RING) == (Return(worker=0, donor=1),)
    assert Events(losses=(first,)).returns(4, RING) == ()
    own = Loss(worker=0, at=2, back=5, donor=2)
    assert Events(losses=(own,)).returns(5, RING) == (Return(worker=0, donor=2),)
    # The lowest neighbour is away, comes back at the same time, or cannot be reached.
    for others in (
        {"losses": (first, Loss(worker=1, at=3))},
        {"losses": (first, Loss(worker=1, at=3, back=5))},
        {"losses": (first,), "cuts": (Cut(link=(0, 1), at=4),)},
    ):
        assert Return(worker=0, donor=3) in Events(**others).returns(5, RING)


def test_a_file_says_the_same(tmp_path):
    path = tmp_path / "events.json"
    entries = [
        {"worker": 3, "lost": 200, "back": 500, "state_of": 1},
        {"link": [2, 1], "cut": 100, "mended": 160},
        {"link": [4, 5], "slower": 10, "from": 300},
    ]
    path.write_text(json.dumps(entries))
    assert Events.read(path) == Events(
        losses=(Loss(worker=3, at=200, back=500, donor=1),),
        cuts=(Cut(link=(1, 2), at=100, until=160),),
        slowdowns=(Slowdown(link=(4, 5), at=300, factor=10),),
    )
    for text, message in (
        ("{", "is not JSON"),
        ("{}", "does not hold a list"),
        ('[{"worker": 1, "lots": 2}]', "is not an event"),
        ("[3]", "is not an event"),
        ('[{"worker": 1, "lost": "x"}]', "is not an event"),
        ('[{"worker": null, "lost": [1]}]', "is not an event"),
        ('[{"link": [1, 2], "cut": 1.5}]', "is not an event"),
        ('[{"link": [1, 2], "slower": "fast", "from": 1}]', "is not an event"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            Events.read(path)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ({"losses": (Loss(worker=0, at=5, back=5),)}, "from iteration 5 to 5"),
        ({"cuts": (Cut(link=(0, 1), at=-1),)}, "from iteration -1"),
        ({"slowdowns": (Slowdown(link=(0, 1), at=0, factor=0),)}, "0 times as long"),
        ({"losses": (Loss(worker=9, at=0),)}, "9"),
        ({"cuts": (Cut(link=(0, 2), at=0),)}, "0.*2"),
        ({"losses": tuple(Loss(worker=i, at=i) for i in range(4))}, "no worker would be left"),
        (
            {"losses": (Loss(worker=0, at=1, back=2), *(Loss(worker=i, at=0) for i in (1, 3)))},
            "worker 0 cannot come at iteration",
        ),
    ],
)
def test_events_that_cannot_be_are_refused(events, message):
    with pytest.raises(InputError, match=message):
        Events(**events).check(matcha.plan(RING, 1.0, "vanilla"))


def test_one_way_messages_can_be_slower_but_not_lost():
    plan = matcha.plan(RING, 0.5, Greedy(mixing="push"))
    Events(slowdowns=(Slowdown(link=(0, 1), at=0, factor=2),)).check(plan)
    for lost in ({"losses": (Loss(worker=1, at=2),)}, {"cuts": (Cut(link=(0, 1), at=2),)}):
        with pytest.raises(InputError, match="needs meetings of two"):
            Events(**lost).check(plan)


def test_two_slowdowns_at_once_are_both_felt():
    plan = matcha.plan(matcha.families.path(2), 1.0, "periodic")
    twice = tuple(Slowdown(link=(0, 1), at=0, factor=factor) for factor in (2, 5))
    assert Events(slowdowns=twice).round_time(plan, plan.round(0), 0) == pytest.approx(10)


def test_what_queues_on_a_shared_wire_still_does():
    square = matcha.Topology.from_links([(0, 1), (1, 2), (2, 3), (3, 0)], link_times=[0.1] * 4)
    timing = Underlay.racks(square, [[0, 1], [2, 3]], uplink=0.5)
    plan = matcha.plan(square, 1.0, "periodic", timing=timing)
    round_ = plan.round(0)
    usual = plan.round_time(round_)
    slowed = Events(slowdowns=(Slowdown(link=(0, 3), at=0, factor=3),))
    assert slowed.round_time(plan, round_, 0) > usual


def test_links_are_new_after_a_return_and_a_cut():
    ring = matcha.families.ring(4)
    events = Events(losses=(Loss(worker=1, at=2, back=5),), cuts=(Cut(link=(2, 3), at=1, until=5),))
    assert sorted(events.new_connections(5, ring)) == [(0, 1), (1, 2), (2, 3)]
    assert not events.new_connections(4, ring)
    assert events.changes(0, 5) == [[2, 1, 0]]
    assert events.changes(5, 9) == [[5, 1, 1]]
