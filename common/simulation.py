"""The acceptance that serving should reach on given answers, and what it means when it doesn't.

The same prompts that vLLM serves are drafted for offline, from the hidden states of stage 2, by walking through the
verifier's answer as vLLM would. Where the two differ, the draft is simulated once more under everything that a server
is known to misread, and the misreading that comes closest to the measured rates is named. Knows nothing of vLLM.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.acceptance import Acceptance, simulate_acceptance
from common.export import NORM_FLAGS, Draft, Row, draft_logits, load_draft_model

# Measured and simulated acceptance length may differ by this share: bf16 output leaves the simulated text at the
# first near tie, and the last draft of an answer may reach past the length limit.
AGREEMENT = 0.10
# Drafting by chance: below this share of accepted first tokens nothing has been learnt or everything is misread.
NOTHING = 0.02


@dataclass(frozen=True)
class Answer:
    """One answer to draft for: the sample, and the half-open range of its tokens that serving would produce."""

    row: Row
    first: int
    end: int


def first_answer(row: Row, max_tokens: int) -> Answer:
    """The first run of supervised tokens, cut at the length limit of the measurement."""
    first = int(row.supervised.int().argmax())
    following = row.supervised[first:].int()
    length = int(following.argmin()) if not bool(following.all()) else len(following)
    return Answer(row, first, first + min(length, max_tokens))


@dataclass(frozen=True)
class Simulation:
    """Acceptance on the answers to some prompts, from the checkpoint alone, at any number of draft tokens.

    embed: [V, D], the verifier's. target_ids: int64 [K], the verifier id of each draft token.
    """

    draft: Draft
    answers: list[Answer]
    embed: Tensor
    target_ids: Tensor

    def at(self, num_draft_tokens: int) -> Acceptance | None:
        """None where there are no answers to draft for."""
        if not self.answers:
            return None
        return simulate_serving(self.draft, self.answers, self.embed, self.target_ids, num_draft_tokens)

    def misread(self, num_draft_tokens: int) -> dict[str, Acceptance]:
        """What every known misreading would give."""
        return {
            name: simulate_serving(draft, self.answers, self.embed, target_ids, num_draft_tokens)
            for name, draft, target_ids in misreadings(self.draft, self.target_ids)
        }


def simulate_serving(
    draft: Draft, answers: Sequence[Answer], embed: Tensor, target_ids: Tensor, num_draft_tokens: int
) -> Acceptance:
    """Walks through the answers with this many draft tokens a step, joint prefixes counted as vLLM does."""
    model = load_draft_model(draft, embed)
    drafts, accepted = 0, [0] * num_draft_tokens
    for answer in answers:
        steps = [target_ids[logits.argmax(-1)] for logits in draft_logits(model, answer.row, num_draft_tokens)]
        found = walk(steps, answer)
        drafts += found.drafts
        accepted = [one + other for one, other in zip(accepted, found.accepted, strict=True)]
    return Acceptance(drafts, accepted)


def walk(predicted: Sequence[Tensor], answer: Answer) -> Acceptance:
    """Counts accepted drafts over one answer.

    Args:
        predicted: verifier ids int64 [T - 1] for each step; row i predicts token i + 2 + t at step t.
    """
    ids, supervised = answer.row.input_ids, answer.row.supervised
    hits = torch.zeros(len(predicted), len(ids) - 1, dtype=torch.bool)
    for step, guesses in enumerate(predicted):
        rows = max(0, len(ids) - 2 - step)
        hits[step, :rows] = (guesses[:rows] == ids[2 + step :]) & supervised[2 + step :]
    served = torch.zeros(len(ids), dtype=torch.bool)
    served[answer.first : answer.end] = True
    return simulate_acceptance(hits, served[1:], torch.zeros(len(ids) - 1, dtype=torch.long))


# ---- misreadings -----------------------------------------------------------------------------------------------------


def misreadings(draft: Draft, target_ids: Tensor) -> Iterator[tuple[str, Draft, Tensor]]:
    """What servers are known to get wrong, as (what it is called, the draft as misread, its target ids)."""
    for flag in NORM_FLAGS:
        meant = draft.config[flag]
        if meant or flag == "norm_before_residual":
            wrong = replace(draft, config={**draft.config, flag: not meant})
            yield f"{flag} is read as {str(not meant).lower()}", wrong, target_ids
    shape = draft.config["transformer_layer_config"]
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    lost = {key: value for key, value in shape.items() if not key.startswith("rope")} | {"rope_parameters": plain}
    yield "rope_theta is lost", replace(draft, config={**draft.config, "transformer_layer_config": lost}), target_ids
    yield "d2t is not applied", draft, torch.arange(len(target_ids))
    yield "d2t is read as ids", draft, target_ids - torch.arange(len(target_ids))
    blocks = draft.tensors["fc.weight"].chunk(len(draft.aux_layer_ids), dim=1)
    for order in itertools.islice(itertools.permutations(range(len(blocks))), 1, 6):
        weights = {**draft.tensors, "fc.weight": torch.cat([blocks[i] for i in order], dim=1)}
        ids = [draft.aux_layer_ids[i] for i in order]
        yield f"aux layers come in the order {ids}", replace(draft, tensors=weights), target_ids


def closest_misreading(measured: Sequence[float], candidates: Mapping[str, Acceptance]) -> str | None:
    """The candidate whose rates by position are nearest to the measured ones; None where none is near."""

    def distance(found: Acceptance) -> float:
        return sum(abs(one - other) for one, other in zip(measured, found.by_position, strict=True))

    name = min(candidates, key=lambda key: distance(candidates[key]), default=None)
    if name is None or distance(candidates[name]) > AGREEMENT * max(1.0, sum(measured)):
        return None
    return name


# ---- verdict ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """agrees: None where there was nothing to compare with."""

    agrees: bool | None
    text: str


def judge(
    by_position: Sequence[float],
    num_drafts: int,
    simulated: Acceptance | None,
    *,
    misread: Callable[[], Mapping[str, Acceptance]] = dict,
) -> Verdict:
    """Compares measured acceptance with the simulation of the same prompts.

    Args:
        by_position: share of drafts whose first k + 1 tokens were accepted.
        misread: simulates every known misreading; only called when the two disagree.
    """
    if not num_drafts:
        return Verdict(None, "nothing was drafted: the answers were too short to draft for")
    if simulated is None or not simulated.drafts:
        return Verdict(None, "no simulation for these prompts")
    length = 1 + sum(by_position)
    tolerance = max(AGREEMENT * simulated.length, 2 * _standard_error(by_position, min(num_drafts, simulated.drafts)))
    if abs(length - simulated.length) <= tolerance:
        return Verdict(True, f"agrees with the simulated {simulated.length:.3f}")
    start = f"measured {length:.3f}, simulated {simulated.length:.3f}: "
    if length > simulated.length:
        return Verdict(False, start + "more than in the simulation; the served answers are not the samples' answers")
    cause = closest_misreading(by_position, misread())
    return Verdict(False, start + (f"as if {cause}" if cause else _cause_of(by_position)))


def _standard_error(by_position: Sequence[float], num_drafts: int) -> float:
    """Of the acceptance length: E[n] and E[n^2] from P(n > k), n being the accepted tokens of one draft."""
    mean = sum(by_position)
    square = sum((2 * k + 1) * share for k, share in enumerate(by_position))
    return math.sqrt(max(square - mean * mean, 0.0) / num_drafts)


def _cause_of(by_position: Sequence[float]) -> str:
    """What the pattern alone suggests where no known misreading gives these rates."""
    if by_position[0] < NOTHING:
        return "nothing is accepted: a wrong vocabulary map, or the head of another verifier"
    if len(by_position) > 1 and by_position[1] < 0.1 * by_position[0]:
        return "only the first token is accepted: norm_output or the feedback state is read otherwise"
    return "all positions are low: the server takes other aux layers than the draft learnt from"
