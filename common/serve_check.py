"""Serves a draft beside its verifier in vLLM and measures what counts: acceptance, speed, and unchanged output.

Knows nothing of files. One engine can't change its number of draft tokens or its dtype, so every setting is an engine
of its own (start: half a minute on a CPU).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from common import engine
from common.engine import DraftCounters, EngineRequest

# Natural-log difference between the two tokens at which outputs part that counts as a near tie in bf16: its logits of
# about 20 have steps of 0.125, and one step in each of the two makes 0.25.
NEAR_TIE = 0.5
# Measured and simulated acceptance length may differ by this share: positions are not the same, since greedy output
# in bf16 leaves the text that was simulated on at the first near tie.
AGREEMENT = 0.10


@dataclass(frozen=True)
class PromptSet:
    """Prompts as ids, in order; the server's answers are compared by position."""

    name: str
    prompts: list[list[int]]


@dataclass(frozen=True)
class Served:
    """What one engine gave for one prompt set: answers as ids, in the order of the prompts, and how long it took."""

    answers: list[list[int]]
    seconds: float
    counters: DraftCounters | None

    @property
    def tokens_per_second(self) -> float:
        return sum(len(answer) for answer in self.answers) / self.seconds


def serve(
    llm: Any, prompts: Sequence[Sequence[int]], *, max_tokens: int, stop_ids: Sequence[int], batch: int, drafts: int = 0
) -> Served:
    """Answers greedily, `batch` prompts at once. drafts: the engine's number of draft tokens; 0 without a draft."""
    params = engine.sampling_params(max_tokens=max_tokens, temperature=0.0, stop_token_ids=list(stop_ids))
    before = engine.read_counters(llm, drafts) if drafts else None
    began = perf_counter()
    requests = (EngineRequest(f"{began}-{i}", prompt, params) for i, prompt in enumerate(prompts))
    answers: dict[int, list[int]] = {}
    for key, output in engine.stream_requests(llm, requests, max_in_flight=batch):
        answers[int(key.rpartition("-")[2])] = list(output.outputs[0].token_ids)
    seconds = perf_counter() - began
    counters = engine.read_counters(llm, drafts) - before if before is not None else None
    return Served([answers[i] for i in range(len(prompts))], seconds, counters)


# ---- unchanged output ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parting:
    """Where two answers to one prompt part: the tokens that both begin with, and the two that differ."""

    prompt: int
    common: int
    one: int | None
    other: int | None


def partings(ones: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> list[Parting]:
    """The prompts whose two answers are not the same, token for token."""
    found = []
    for number, (one, other) in enumerate(zip(ones, others, strict=True)):
        if list(one) == list(other):
            continue
        pairs = zip(one, other, strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
        found.append(Parting(number, common, _at(one, common), _at(other, common)))
    return found


def _at(ids: Sequence[int], index: int) -> int | None:
    return ids[index] if index < len(ids) else None


def log_gap(llm: Any, prompt: Sequence[int], answer: Sequence[int], parting: Parting) -> float:
    """How much likelier the verifier itself finds one of the two tokens, in nats; infinite for an absurd one.

    llm: an engine without a draft. It is asked for the twenty likeliest tokens after the common beginning.
    """
    if parting.one is None or parting.other is None:
        return float("inf")
    ids = [*prompt, *answer[: parting.common]]
    params = engine.sampling_params(max_tokens=1, temperature=0.0, logprobs=20)
    ((_, output),) = engine.stream_requests(llm, [EngineRequest(f"gap-{parting.prompt}", ids, params)], max_in_flight=1)
    likely = {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}
    if parting.one not in likely or parting.other not in likely:
        return float("inf")
    return abs(likely[parting.one] - likely[parting.other])


# ---- verdict ---------------------------------------------------------------------------------------------------------


def verdict(measured: DraftCounters, simulated: float | None) -> str:
    """One sentence on the measured acceptance beside the simulated one, naming the likely cause where they part."""
    length = measured.acceptance_length
    if not measured.num_drafts:
        return "nothing was drafted: the answers were too short to draft for"
    if simulated is None:
        return "no simulation for these prompts"
    if abs(length - simulated) <= AGREEMENT * simulated:
        return f"agrees with the simulated {simulated:.3f}"
    by_position = measured.acceptance_by_position
    start = f"measured {length:.3f}, simulated {simulated:.3f}: "
    if length > simulated:
        return start + "more than in training; the prompts or the lengths are not the same"
    if by_position[0] < 0.02:
        return start + "nothing is accepted: a wrong vocabulary map (d2t read as ids), or the head of another verifier"
    if len(by_position) > 1 and by_position[1] < 0.1 * by_position[0]:
        return start + "only the first token is accepted: norm_output or the feedback state is read otherwise"
    return start + "all positions are low: wrong aux layer ids, a norm flag or rope_theta lost on the way"
