"""The verdict: what may be said, and what may not."""

from __future__ import annotations

import pytest

from matcha.report.verdict import Summary, judge


def row(strategy="greedy", time_to_target=2.0, accuracy=0.95, error=0.01, **more):
    fields = {
        "label": strategy,
        "strategy": strategy,
        "budget": 0.1,
        "clock": "wall",
        "unit": "units",
        "seeds": 1,
        "iterations": 10,
        "epochs": 5.0,
        "time": 9.0,
        "train_loss": 0.4,
        "train_loss_error": 0.0,
        "worker_loss": 0.3,
        "test_loss": 0.5,
        "test_accuracy": accuracy,
        "accuracy_error": error,
        "consensus_distance": 0.1,
        "comm_units": 1.0,
        "comm_seconds": 1.0,
        "time_to_target": time_to_target,
        "epochs_to_target": None,
        "diverged_at": None,
    }
    return Summary(**(fields | more))


def verdict(*rows, objective="train_loss", target=0.5):
    return judge(rows, objective, target)


def test_it_names_the_first_and_what_it_is_compared_with():
    vanilla = row("vanilla", 7.0)
    allreduce = row("allreduce", 3.0)
    found = verdict(row(), vanilla, allreduce)
    assert found.winner == 0
    assert found.sentence == (
        "In this run greedy held training loss 0.5 after 2 s, 3.5× sooner than vanilla and "
        "1.5× sooner than allreduce (one seed)."
    )


def test_silence_never_wins():
    silent = row("silent", 1.0, accuracy=0.5)
    found = verdict(silent, row(), row("vanilla", 7.0))
    assert found.winner == 1
    assert "greedy" in found.sentence


def test_where_silence_does_as_well_there_is_no_verdict():
    found = verdict(row("silent", 1.0), row(), row("vanilla", 7.0))
    assert found.winner is None
    assert found.sentence.startswith("No verdict: silent, which never communicates")


@pytest.mark.parametrize(("accuracy", "wins"), [(0.95, True), (0.94, True), (0.90, False)])
def test_less_accuracy_than_the_comparison_beyond_its_error_is_no_win(accuracy, wins):
    found = verdict(row(accuracy=accuracy), row("vanilla", 7.0, accuracy=0.95))
    assert (found.winner == 0) is wins
    if not wins:
        assert found.winner == 1
        assert "sooner than" not in found.sentence


def test_an_accurate_run_that_is_slower_than_an_inaccurate_one_wins():
    quick = row("periodic", 1.0, accuracy=0.5)
    found = verdict(quick, row(), row("vanilla", 7.0))
    assert found.winner == 1
    assert found.unranked == {
        0: "45.0 points less accurate than vanilla (50.0 % against 95.0 %)",
    }
    assert f"; periodic was sooner, 1 s, and {found.unranked[0]}: not ranked" in found.sentence


def seeds(strategy, time, spread, count=3, **more):
    return row(strategy, time, seeds=count, deviations={"time_to_target": spread}, **more)


def test_times_within_their_spread_are_a_tie():
    found = verdict(seeds("greedy", 1.28, 0.031), seeds("matcha", 1.29, 0.031))
    assert found.winner is None
    assert found.sentence == (
        "A tie: greedy (1.28 s ± 31 ms) and matcha (1.29 s ± 31 ms) held training loss 0.5 first, "
        "and the difference is within the spread over the seeds."
    )


def test_in_a_tie_the_reference_beyond_the_spread_is_told_without_a_factor():
    rows = (seeds("greedy", 0.155, 0.014, 2), seeds("matcha", 0.170, 0.017, 2))
    found = verdict(*rows, seeds("vanilla", 1.5, 0.1, 2))
    assert found.winner is None
    assert "; vanilla took 1.5 s ± 100 ms." in found.sentence
    assert "×" not in found.sentence


def test_times_beyond_their_spread_have_a_winner():
    found = verdict(seeds("greedy", 1.28, 0.031), seeds("matcha", 1.6, 0.031))
    assert found.winner == 0
    assert found.sentence == (
        "greedy held training loss 0.5 after 1.28 s ± 31 ms, before matcha (mean of 3 seeds)."
    )


def test_two_seeds_say_less_than_five():
    """The same means and deviations: what two seeds leave open, five may decide."""
    pairs = [(seeds("greedy", 1.0, 0.1, n), seeds("matcha", 1.3, 0.1, n)) for n in (2, 5)]
    assert [verdict(*pair).winner for pair in pairs] == [None, 0]


def test_one_row_of_several_seeds_lends_its_spread_to_a_row_of_one():
    assert verdict(seeds("greedy", 1.0, 0.2), row("matcha", 1.3)).winner is None
    assert verdict(seeds("greedy", 1.0, 0.2), row("matcha", 9.0)).winner == 0


def test_a_target_held_at_the_first_evaluation_ranks_no_row():
    """Their times are when the first evaluation was, the same for all seeds: no spread at all."""
    first = {"at_first_evaluation": True}
    found = verdict(seeds("greedy", 1.0, 0.0, **first), seeds("matcha", 1.1, 0.0, **first))
    assert found.winner is None
    assert found.sentence.startswith("No verdict: greedy (≤ 1 s) and matcha (≤ 1.1 s) held ")
    assert "at the first evaluation already: evaluate more often" in found.sentence
    assert verdict(row(**first), row("matcha", 3.0, **first)).winner is None
    later = verdict(row(**first), row("matcha", 3.0))
    assert later.winner == 0  # who was later, was later
    assert "greedy held training loss 0.5 within 2 s, before matcha" in later.sentence
    assert verdict(row(**first)).winner is None


def test_when_all_diverged_they_are_not_listed():
    lost = [row(name, None, diverged_at=3) for name in ("greedy", "matcha")]
    assert "; all diverged; " in verdict(*lost).sentence


def test_equal_times_of_one_seed_are_a_tie_in_this_run():
    found = verdict(row(), row("matcha"))
    assert found.winner is None
    assert found.sentence.startswith("A tie in this run: greedy (2 s) and matcha (2 s)")


def test_a_gap_in_accuracy_that_the_test_set_cannot_tell_excludes_no_run():
    """Six of 300 images: 2 points, with standard errors of 1.2 points each."""
    found = verdict(
        row("local", 7.5, accuracy=0.93, error=0.015),
        row("greedy", 8.0, accuracy=0.95, error=0.012),
        row("vanilla", 40.0, accuracy=0.95, error=0.012),
    )
    assert found.winner == 0
    assert found.unranked == {}


def test_when_every_contender_is_inaccurate_it_is_said():
    found = verdict(row(accuracy=0.5), row("vanilla", None, accuracy=0.95))
    assert found.winner is None
    assert (
        "2 s, but is 45.0 points less accurate than vanilla (50.0 % against 95.0 %)"
        in found.sentence
    )


def test_without_a_reference_the_others_are_named():
    found = verdict(row(), row("matcha", 4.0))
    assert found.sentence == (
        "In this run greedy held training loss 0.5 after 2 s, before matcha (one seed)."
    )


def test_when_nobody_held_the_target_no_winner_is_claimed():
    found = verdict(row(time_to_target=None))
    assert found.winner is None
    assert found.sentence == "1 run of 5 epochs; none held training loss 0.5."


def test_several_seeds_and_a_simulated_clock_are_said():
    found = verdict(row(seeds=3, clock="simulated"), row("vanilla", 7.0))
    assert "(simulated)" in found.sentence
    assert "(mean of 3 seeds)" in found.sentence


def test_a_reference_that_never_got_there_is_named():
    found = verdict(row(), row("vanilla", None))
    assert found.sentence.endswith("after 2 s; vanilla never held it (one seed).")


def test_a_diverged_run_does_not_win():
    assert verdict(row(diverged_at=3), row("matcha", 4.0)).winner == 1


def test_who_had_not_communicated_never_wins_under_another_name():
    early = {"comm_units": 0.0, "megabytes_sent": 0.0}
    found = verdict(row("periodic", 1.0, **early), row("vanilla", 7.0))
    assert found.winner is None
    assert found.sentence == (
        "No verdict: periodic, which had not communicated yet, held training loss 0.5 in 1 s, no "
        "later than vanilla; this target does not need communication."
    )


def test_records_that_do_not_count_what_was_sent_are_taken_at_their_word():
    found = verdict(row("mine", 1.0, comm_units=0.0), row("vanilla", 7.0))
    assert found.winner == 0


def test_silence_alone_held_the_target():
    found = verdict(row("silent", 1.0))
    assert found.winner is None
    assert found.sentence.startswith("No verdict: silent, which never communicates, held")


def test_silence_that_was_sooner_and_is_less_accurate_is_told():
    found = verdict(row("silent", 1.0, accuracy=0.5), row(), row("vanilla", 7.0))
    assert found.winner == 1
    assert "; silent held it without communicating, but is less accurate in the end" in (
        found.sentence
    )
    late = verdict(row("silent", None, accuracy=0.5), row(), row("vanilla", 7.0))
    assert "silent" not in late.sentence


def test_times_that_do_not_compare_have_no_winner():
    found = judge([row(), row("vanilla", 7.0)], "train_loss", 0.5, unlike="their clocks differ")
    assert found.winner is None
    assert found.sentence == "No verdict: their clocks differ."


def test_runs_of_different_lengths_and_diverged_ones_are_told():
    short, lost = row(epochs=0.0), row("vanilla", None, epochs=1.0, diverged_at=11)
    assert verdict(short, lost, target=None).sentence == "2 runs of 0 to 1 epoch; vanilla diverged."
    assert verdict(row(epochs=1.0), target=None).sentence == "1 run of 1 epoch."


def test_a_measured_pace_says_at_which_link_time_it_would_turn():
    """Greedy computes for 1 s and communicates for 1 s; local for 2.5 s and half a second."""
    rows = [row(), row("local", 3.0, comm_seconds=0.5), row("vanilla", 7.0, comm_seconds=6.0)]
    found = judge(rows, "train_loss", 0.5, link_time=0.01)
    assert found.winner == 0
    assert found.sentence.endswith(
        "Computing was measured here: local would be first where a matching takes more than 30 ms "
        "(it takes 10 ms here)."
    )
    assert "Computing" not in verdict(*rows).sentence
    far = [row(), row("local", 30.0, comm_seconds=0.5)]
    assert "Computing" not in judge(far, "train_loss", 0.5, link_time=0.01).sentence
