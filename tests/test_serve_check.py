"""What serving is compared with: the simulation of the same prompts, the verdict, and where two answers part."""

import pytest
import torch

from common.acceptance import Acceptance
from common.engine import DraftCounters
from common.errors import PipelineError
from common.export import Row
from common.serve_check import Parting, Served, pace_rows, partings, refuse_changed_output, refuse_sure_partings
from common.simulation import Answer, closest_misreading, first_answer, judge, walk


def row(ids, supervised):
    return Row(torch.tensor(ids), torch.zeros(len(ids), 1), torch.tensor(supervised, dtype=torch.bool))


def test_acceptance_is_counted_as_vllm_counts_it():
    found = DraftCounters(100, (50, 20, 5)) - DraftCounters(0, (0, 0, 0))
    assert found.acceptance_length == 1.75
    assert found.acceptance_by_position == [0.5, 0.2, 0.05]


# ---- the same prompts, without a server ----


def test_the_first_answer_ends_where_the_next_user_turn_begins():
    found = first_answer(row([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1]), 99)
    assert (found.first, found.end) == (2, 4)


def test_an_answer_is_cut_at_the_length_limit_of_the_measurement():
    assert first_answer(row(range(9), [0, 0, *[1] * 7]), 3).end == 5
    assert first_answer(row(range(9), [0, 0, *[1] * 7]), 99).end == 9


def test_walking_jumps_over_what_was_accepted():
    """Tokens 10 11 | 12 13 14 15 16 17, the answer from index 2. Row i predicts token i + 2 + t at step t.

    Row 1 (at token 12) drafts 13, 14 and a wrong third: 2 accepted, the verifier adds 15. Row 4 (at token 15) drafts
    a wrong first one: 0 accepted, the verifier adds 16. Row 5 (at 16) drafts 17: 1 accepted, and the text ends.
    """
    answer = Answer(row([10, 11, 12, 13, 14, 15, 16, 17], [0, 0, 1, 1, 1, 1, 1, 1]), 2, 8)
    none = -1
    first = torch.tensor([none, 13, none, none, none, 17, none])
    second = torch.tensor([none, 14, none, none, none, 9, none])
    third = torch.tensor([none, 9, none, none, none, none, none])
    found = walk([first, second, third], answer)
    assert (found.drafts, found.accepted) == (3, [2, 1, 0])
    assert found.length == 2.0


def test_no_draft_is_made_past_the_length_limit_but_one_may_reach_over_it():
    """The answer is cut after 3: drafts start at tokens 2 and 3 only, yet 4 and 5 can be accepted."""
    answer = Answer(row([1, 2, 3, 4, 5, 6], [0, 1, 1, 1, 1, 1]), 1, 3)
    found = walk([torch.tensor([3, 9, 9, 9, 9]), torch.tensor([4, 9, 9, 9, 9])], answer)
    assert (found.drafts, found.accepted) == (1, [1, 1])


def test_a_later_token_does_not_count_after_a_wrong_one():
    answer = Answer(row([1, 2, 3, 4, 5], [0, 1, 1, 1, 1]), 1, 5)
    found = walk([torch.tensor([9, 9, 9, 9]), torch.tensor([4, 5, 9, 9])], answer)
    assert found.accepted == [0, 0]


# ---- verdict ----

SIMULATED = Acceptance(1000, [500, 200, 50])  # 1.75


def test_a_difference_of_ten_percent_agrees():
    assert judge([0.45, 0.14, 0.01], 1000, SIMULATED).agrees is True  # 1.60
    assert judge([0.40, 0.10, 0.01], 1000, SIMULATED).agrees is False  # 1.51


def test_a_few_drafts_leave_more_room_for_chance():
    assert judge([0.40, 0.10, 0.01], 30, SIMULATED).agrees is True


def test_nothing_to_compare_with_is_no_agreement():
    assert judge([0.5, 0.2, 0.1], 100, None).agrees is None
    assert judge([], 0, SIMULATED).agrees is None


def test_more_than_simulated_says_that_the_answers_differ():
    assert "not the samples' answers" in judge([0.9, 0.8, 0.7], 1000, SIMULATED).text


def test_the_verdict_names_the_misreading_that_gives_the_measured_rates():
    candidates = {"rope_theta is lost": Acceptance(100, [30, 4, 0]), "d2t is not applied": Acceptance(100, [0, 0, 0])}
    found = judge([0.31, 0.05, 0.0], 1000, SIMULATED, misread=lambda: candidates)
    assert found.agrees is False and found.text.endswith("as if rope_theta is lost")
    assert closest_misreading([0.15, 0.1, 0.1], candidates) is None


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ([0.0, 0.0, 0.0], "a wrong vocabulary map"),
        ([0.2, 0.01, 0.0], "norm_output or the feedback state"),
        ([0.15, 0.06, 0.02], "other aux layers"),
    ],
)
def test_the_pattern_alone_suggests_a_cause_where_no_misreading_fits(rates, words):
    assert words in judge(rates, 1000, SIMULATED).text


# ---- unchanged output ----


def test_answers_part_where_the_first_token_differs():
    (found,) = partings([[1, 2, 3], [4, 5]], [[1, 2, 9], [4, 5]])
    assert (found.prompt, found.common, found.one, found.other) == (0, 2, 3, 9)
    (shorter,) = partings([[1, 2]], [[1, 2, 3]])
    assert (shorter.common, shorter.one, shorter.other) == (2, None, 3)


def test_an_answer_that_parts_where_the_verifier_was_sure_is_refused():
    refuse_sure_partings([0.1, 0.5], 80)
    with pytest.raises(PipelineError, match=r"1 of 80 answers part .*by 3\.00 nats"):
        refuse_sure_partings([0.1, 3.0], 80)


def test_any_changed_answer_in_float32_is_refused():
    refuse_changed_output([], 16)
    with pytest.raises(PipelineError, match="greedy output in float32 changes with the draft for 1 of 16 prompts"):
        refuse_changed_output([Parting(0, 3, 1, 2)], 16)


# ---- time per token ----


def test_time_per_token_is_that_of_one_stream():
    served = Served([[1] * 10, [1] * 30], seconds=2.0, streams=2, counters=None)
    assert served.tokens_per_second == 20
    assert served.milliseconds_per_token == 100  # two streams share 20 tokens a second


def test_a_setting_is_compared_with_the_verifier_alone():
    rows = pace_rows({0: {1: 30.0}, 3: {1: 20.0}}, "val")
    assert [(r["num_draft_tokens"], r["speedup"]) for r in rows] == [(0, 1.0), (3, 1.5)]
