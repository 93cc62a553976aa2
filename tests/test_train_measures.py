"""Simulated acceptance, and the target check before step 1."""

import dataclasses

import numpy as np
import pytest
import torch

from common.acceptance import Acceptance, find_hits, simulate_acceptance
from common.hidden_states import HiddenStates
from common.target_check import check_targets, target_problem
from common.ttt_rows import plan_rows
from common.verifier import VerifierHead
from tests import train_rig

# ---- simulated acceptance


def hits_of(*rows):
    return torch.tensor(rows, dtype=torch.bool)


def test_the_walk_is_worked_out_by_hand():
    """One document, rows 2 to 9 supervised; the last has nothing to draft.

    row          2  3  4  5  6  7  8
    step 0       x  x  .  x  x  .  x
    step 1       x  .  .  .  x  .  .
    step 2       .  .  x  .  x  .  .      (a hit after a miss doesn't count)

    Draft at 2 accepts 2 -> next at 5, accepts 1 -> 7, accepts 0 -> 8, accepts 1 -> 10, the end: 4 drafts, 4 tokens.
    """
    hits = torch.zeros(3, 10, dtype=torch.bool)
    hits[0, [2, 3, 5, 6, 8]] = True
    hits[1, [2, 6]] = True
    hits[2, [4, 6]] = True
    supervised = torch.arange(10) >= 2
    found = simulate_acceptance(hits, supervised, torch.zeros(10, dtype=torch.long))
    assert found == Acceptance(drafts=4, accepted=[3, 1, 0])
    assert found.length == 1 + 4 / 4


def test_nothing_right_is_an_acceptance_length_of_one():
    supervised = torch.ones(5, dtype=torch.bool)
    found = simulate_acceptance(torch.zeros(3, 5, dtype=torch.bool), supervised, torch.zeros(5, dtype=torch.long))
    assert found.drafts == 4 and found.length == 1.0


def test_text_without_a_draft_has_no_acceptance_length():
    assert np.isnan(Acceptance(0, [0, 0]).length)


def slow_acceptance(drafted, text, supervised, documents):
    """From the definition: draft at a row, compare token by token, jump."""
    drafts, accepted, row = 0, [0] * len(drafted), 0
    while row + 1 < len(text):
        if not (supervised[row] and supervised[row + 1] and documents[row] == documents[row + 1]):
            row += 1
            continue
        drafts += 1
        count = 0
        while count < len(drafted):
            place = row + count + 1
            inside = place < len(text) and documents[place] == documents[row] and supervised[place]
            if not inside or drafted[count][row] != text[place]:
                break
            accepted[count] += 1
            count += 1
        row += count + 1
    return Acceptance(drafts, accepted)


@pytest.mark.parametrize("seed", range(5))
def test_hits_and_walk_agree_with_a_slow_loop_over_the_text(seed):
    rng = np.random.default_rng(seed)
    documents = torch.from_numpy(np.repeat(np.arange(4), 12))
    text = torch.from_numpy(rng.integers(0, 2, 48))  # two tokens, so that runs of hits are common
    supervised = torch.from_numpy(np.tile(np.arange(12) >= 3, 4) & (rng.random(48) < 0.95))
    drafted = torch.from_numpy(rng.integers(0, 2, (3, 48)))  # what row i drafts at step t
    plan = plan_rows(documents, supervised, 3, keep_all=True)
    predicted = torch.stack([torch.where(index >= 0, drafted[t][index], -1) for t, index in enumerate(plan.index)])
    hits = find_hits(plan, predicted, text, supervised, documents)
    found = simulate_acceptance(hits, supervised, documents)
    assert found == slow_acceptance(drafted.tolist(), text.tolist(), supervised.tolist(), documents.tolist())
    assert found.drafts > 5 and found.accepted[0] > 0


# ---- the target check


def head_and_text(sharp: float, seed: int = 0):
    """A head, and states whose distribution is as peaked as `sharp` makes it."""
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(200, 32, generator=generator)
    norm = 1.5 * torch.randn(32, generator=generator)  # a second norm then loses the signs
    states = [sharp * torch.randn(60, 32, generator=generator) for _ in range(12)]
    return VerifierHead(torch.zeros(200, 32), head, norm * sharp, 1e-6), states, generator


def written_text(head, states, generator, *, greedy):
    """Text that this head writes from these states: token t + 1 is drawn at state t."""
    samples = []
    for last in states:
        p = head.logits(last).softmax(-1)
        drawn = p.argmax(-1) if greedy else torch.multinomial(p, 1, generator=generator)[:, 0]
        ids = torch.cat([torch.zeros(1, dtype=torch.long), drawn[:-1]])
        samples.append(HiddenStates(ids, torch.arange(60) >= 4, [last], last))
    return samples


def changed(samples, change):
    return [dataclasses.replace(sample, last=change(sample.last)) for sample in samples]


@pytest.fixture(params=["greedy", "sampled"])
def written(request):
    head, states, generator = head_and_text(1.0)
    return head, written_text(head, states, generator, greedy=request.param == "greedy"), request.param


def problem_of(samples, head, kind):
    return target_problem(check_targets(samples, head), min_agreement=0.9 if kind == "greedy" else None, max_excess=1.0)


def test_text_of_this_verifier_passes(written):
    head, samples, kind = written
    found = check_targets(samples, head)
    assert problem_of(samples, head, kind) is None
    assert found.num_tokens == 12 * 56
    if kind == "greedy":
        assert found.agreement == 1.0 and found.excess < 0
    else:
        assert abs(found.excess) < 0.2


FAULTS = {
    "the final norm is applied already": lambda head: head.normed,
    "the states stand one token late": lambda head: lambda last: last.roll(1, 0),
    "the states stand one token early": lambda head: lambda last: last.roll(-1, 0),
    "another verifier, or not its last layer": lambda head: lambda last: last[:, torch.randperm(32)],
}


@pytest.mark.parametrize("suspect", FAULTS)
def test_each_known_fault_is_refused_and_named(written, suspect):
    head, samples, kind = written
    torch.manual_seed(0)
    problem = problem_of(changed(samples, FAULTS[suspect](head)), head, kind)
    assert problem is not None and f"Likely: {suspect}" in problem.what
    assert "nats a token above its entropy (at most 1)" in problem.what


def test_greedy_text_that_the_head_mostly_misses_is_refused_even_where_its_likelihood_is_fair():
    head, states, generator = head_and_text(0.3)
    samples = written_text(head, states, generator, greedy=False)
    assert problem_of(samples, head, "sampled") is None
    problem = problem_of(samples, head, "greedy")
    assert problem is not None and "of its own greedy text (at least 90%)" in problem.what


def test_text_without_a_supervised_token_is_refused():
    head, states, generator = head_and_text(1.0)
    samples = [
        dataclasses.replace(s, loss_mask=torch.zeros(60, dtype=torch.bool))
        for s in written_text(head, states, generator, greedy=True)
    ]
    problem = problem_of(samples, head, "greedy")
    assert problem is not None and "no supervised token" in problem.what


def test_agreement_and_excess_are_those_of_a_slow_loop():
    text = train_rig.make_text(3)
    head = VerifierHead(text.embed.float(), text.head.float(), text.norm.float(), 1e-6)
    samples = [text.states(i) for i in range(3)]
    right, excess = [], []
    for sample in samples:
        for t in range(len(sample.input_ids) - 1):
            if sample.loss_mask[t + 1]:
                x = sample.last[t].float()
                p = ((x / (x.pow(2).mean() + 1e-6).sqrt() * head.norm) @ head.head.T).double().softmax(0)
                right.append(float(p.argmax() == sample.input_ids[t + 1]))
                excess.append(float(-p[sample.input_ids[t + 1]].log() + (p * p.log()).sum()))
    found = check_targets(samples, head)
    assert found.agreement == pytest.approx(np.mean(right)) and found.excess == pytest.approx(np.mean(excess), abs=1e-4)


def test_only_as_many_samples_are_read_as_are_needed():
    text = train_rig.make_text(1)
    head = VerifierHead(text.embed.float(), text.head.float(), text.norm.float(), 1e-6)
    long = HiddenStates(
        torch.zeros(1500, dtype=torch.long), torch.ones(1500, dtype=torch.bool), [], torch.randn(1500, 32)
    )
    read = []

    def samples():
        for i in range(10):
            read.append(i)
            yield long

    check_targets(samples(), head)
    assert read == [0, 1]
