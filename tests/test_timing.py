from __future__ import annotations

import itertools
import math
import random

import pytest

import matcha
from matcha import Topology, families, theory
from matcha.errors import InputError, PlanError, TopologyError
from matcha.strategies import Greedy
from matcha.timing import (
    TIMINGS,
    LinkSeconds,
    RandomLinks,
    Scaled,
    SharedChannel,
    Underlay,
    Units,
    Wired,
    all_reduce_time,
    default_timing,
)

PATH = Topology.from_links([(0, 1), (1, 2), (2, 3)], link_times=[1.0, 2.0, 4.0])
MATCHINGS = (((0, 1), (2, 3)), ((1, 2),))


def test_units_count_matchings():
    units = Units()
    assert units.round_time(MATCHINGS) == 2
    assert units.expected_time(MATCHINGS, (0.5, 0.25)) == 0.75
    assert units.allowance(MATCHINGS, 0.3) == pytest.approx(0.6)
    assert units.round_time([]) == 0


def test_a_matching_costs_its_slowest_link():
    seconds = LinkSeconds(PATH)
    assert seconds.costs(MATCHINGS) == (4.0, 2.0)
    assert seconds.round_time(MATCHINGS) == 6.0
    assert seconds.expected_time(MATCHINGS, (0.5, 1.0)) == 4.0
    assert seconds.allowance(MATCHINGS, 0.5) == 3.0
    with pytest.raises(TopologyError, match="no link times"):
        LinkSeconds(families.ring(4))


def test_scaled_delays_follow_t():
    root = Scaled(lambda n: n**0.5, 4)
    four = [MATCHINGS[1]] * 4
    assert root.round_time(four) == 2.0
    # t(s) = C_b t(M): s^0.5 = 0.5 * 2, so s = 1.
    assert root.allowance(four, 0.5) == pytest.approx(1.0)
    assert root.allowance(four, 1.0) == 4.0


def test_scaled_expectation_equals_enumeration():
    square = Scaled(lambda n: n**2, 3)
    p = (0.2, 0.5, 0.9)
    expected = 0.0
    for coins in itertools.product((0, 1), repeat=3):
        chance = 1.0
        for on, q in zip(coins, p, strict=True):
            chance *= q if on else 1 - q
        expected += chance * sum(coins) ** 2
    assert square.expected_time([MATCHINGS[1]] * 3, p) == pytest.approx(expected)


def test_scaled_refuses_what_does_not_increase():
    with pytest.raises(InputError, match="increase"):
        Scaled(lambda n: 1.0, 3)
    with pytest.raises(InputError, match="finite"):
        Scaled(lambda n: float("inf"), 3)


def test_random_links_average_the_slowest():
    samples = ((1.0, 9.0, 5.0), (3.0, 9.0, 1.0))
    timing = RandomLinks(PATH, samples)
    assert timing.matching_time(MATCHINGS[0]) == (5.0 + 3.0) / 2
    with pytest.raises(InputError, match="column"):
        RandomLinks(PATH, ((1.0,),))
    with pytest.raises(InputError, match="positive"):
        RandomLinks(PATH, ((1.0, 0.0, 1.0),))


def test_defaults_and_conversion():
    assert default_timing(PATH).unit == "seconds"
    assert default_timing(families.ring(4)).unit == "units"


@pytest.mark.parametrize(
    "timing",
    [
        Units(),
        LinkSeconds(PATH),
        RandomLinks(PATH, ((1.0, 2.0, 3.0),)),
        Scaled(lambda n: n**1.5, 3),
    ],
    ids=lambda timing: type(timing).__name__,
)
def test_timing_survives_json(timing):
    back = TIMINGS.from_json(timing.to_json(), PATH)
    for r in range(3):
        assert back.round_time(MATCHINGS[:r]) == timing.round_time(MATCHINGS[:r])
    assert back.unit == timing.unit


def test_foreign_timing_is_refused():
    with pytest.raises(PlanError, match="unknown"):
        TIMINGS.from_json({"model": "sundial"}, PATH)
    with pytest.raises(PlanError, match="not an object"):
        TIMINGS.from_json(3, PATH)


def test_times_over_wires_are_read_as_0_2_wrote_them():
    topology = PATH.with_link_times([0.1] * len(PATH.links))
    timing = LinkSeconds(topology, size_ratio=0.25, num_phases=2)
    document = timing.to_json()
    assert TIMINGS.from_json(document, topology) == timing
    old = {"model": "link-seconds", "share": 0.25, "halves": 2}
    assert TIMINGS.from_json(old, topology) == timing
    with pytest.raises(InputError, match="both must be positive"):
        TIMINGS.from_json(old | {"share": math.nan}, topology)
    scaled = Scaled(lambda n: n, 3)
    wired = Wired(base=scaled, size_ratio=0.25)
    document = wired.to_json()
    assert TIMINGS.from_json(document, PATH) == wired
    document["share"] = document.pop("size_ratio")
    assert TIMINGS.from_json(document, PATH) == wired


# -- links that share channels ---------------------------------------------------------------------


def two_racks(uplink=0.2):
    topology = families.paper("er8")
    topology = topology.with_link_times([0.1] * len(topology.links))
    return Underlay.racks(topology, [range(4), range(4, 8)], uplink=uplink)


def test_messages_queue_where_links_share_a_channel():
    timing = two_racks()
    crossing = [link for link in timing.topology.links if (link[0] < 4) != (link[1] < 4)]
    inside = next(link for link in timing.topology.links if link not in crossing)
    assert timing.matching_time((inside,)) == 0.1
    assert timing.matching_time((crossing[0],)) == 0.2
    disjoint = next(link for link in crossing if not set(link) & set(crossing[0]))
    assert timing.matching_time((crossing[0], disjoint)) == pytest.approx(0.4)
    again = TIMINGS.from_json(timing.to_json(), timing.topology)
    assert again == timing
    document = timing.to_json()
    document["wires"] = document.pop("channels")  # as 0.2 wrote it
    assert TIMINGS.from_json(document, timing.topology) == timing


def test_greedy_that_knows_the_channels_beats_one_that_does_not():
    timing = two_racks()
    knows = matcha.plan(timing.topology, 0.05, "greedy", timing=timing)
    assert knows.consensus_error == pytest.approx(theory.consensus_error(knows.process), rel=1e-9)
    blind = matcha.plan(timing.topology, knows.expected_comm_time, Greedy(effort="default"))
    period = list(blind.rounds(0, len(blind.schedule.cycle)))
    seconds = sum(timing.round_time(round_.matchings) for round_ in period) / len(period)
    # Errors fall about as one over the time: at equal seconds the blind one is far behind.
    assert blind.consensus_error * seconds > 1.3 * knows.consensus_error * knows.expected_comm_time


@pytest.mark.parametrize(
    ("channels", "words"),
    [
        ((SharedChannel(links=((0, 9),), seconds=1.0),), "which the topology lacks"),
        ((SharedChannel(links=(), seconds=0.0),), "positive"),
    ],
)
def test_channels_are_checked(channels, words):
    with pytest.raises(InputError, match=words):
        Underlay(two_racks().topology, channels)
    with pytest.raises(TopologyError, match="no link times"):
        Underlay(families.ring(4), ())
    with pytest.raises(InputError, match="every worker once"):
        Underlay.racks(two_racks().topology, [[0], [1]], uplink=1.0)


def test_scaled_models_are_told_apart_by_their_values():
    """Before, Scaled(n²) == Scaled(n)."""
    assert Scaled(lambda n: n**2, 4) != Scaled(lambda n: n, 4)
    assert Scaled(lambda n: n, 4) == Scaled(lambda n: n + 0.0, 4)
    assert Scaled(lambda n: n, 4) != Scaled(lambda n: n, 5)
    assert len({Scaled(lambda n: n, 4), Scaled(float, 4), Scaled(lambda n: 2 * n, 4)}) == 2


# -- all-reduce ---------------------------------------------------------------------------------


def test_an_all_reduce_keeps_to_the_links():
    for name, hops in [
        ("ring:8", 1),
        ("star:8", 2),
        ("path:9", 2),
        ("barbell:8", 2),
        ("path:2", 1),
    ]:
        topology = families.parse(name)
        m = topology.num_workers
        found = all_reduce_time(default_timing(topology), topology)
        assert found == pytest.approx(hops * 2 * (m - 1) / m), name
    path = Topology.from_links([(0, 1), (1, 2), (2, 3)], link_times=[0.1, 0.2, 0.3])
    # The ring 0, 1, 3, 2: its longest hop is 1 to 3.
    assert all_reduce_time(default_timing(path), path) == pytest.approx(1.5 * 0.5)
    for seed in range(5):  # never more than three links, whatever the graph
        tree = Topology.from_links(
            [(i, random.Random(100 * seed + i).randrange(i)) for i in range(1, 90)]
        )
        assert all_reduce_time(default_timing(tree), tree) <= 3 * 2
