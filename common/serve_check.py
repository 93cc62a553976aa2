"""Serves a draft beside its verifier in vLLM and measures what counts: acceptance, speed, and unchanged output.

One engine can't change its number of draft tokens or its dtype, so every setting is an engine of its own (start: half
a minute on a CPU). Knows nothing of samples or of how a draft was made.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from common import engine
from common.config import ExportSection, VerifierSection
from common.engine import DraftCounters, EngineRequest
from common.errors import PipelineError, Problem

# Natural-log difference between the two tokens at which outputs part that counts as a near tie in bf16: its logits of
# about 20 have steps of 0.125, and one step in each of the two makes 0.25.
NEAR_TIE = 0.5
# Streams at which time per token is measured, and how many prompts each takes: few, since one stream is slow.
PACE_PROMPTS = {1: 2, 8: 8}
WARM_UP = list(range(8))
SMALLER_BATCH = 8  # what a second run without a draft uses, to see how far batching alone changes bf16 output


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
    streams: int
    counters: DraftCounters | None

    @property
    def num_tokens(self) -> int:
        return sum(len(answer) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def milliseconds_per_token(self) -> float:
        """Mean time from one token to the next within one stream, its prompt's prefill included."""
        return 1000 * self.seconds * self.streams / self.num_tokens


@dataclass(frozen=True)
class Bench:
    """What all measurements of one draft share. `log_path` takes the engines' own words."""

    verifier: VerifierSection
    settings: ExportSection
    verifier_path: Path
    draft_dir: Path
    stop_ids: Sequence[int]
    log_path: Path

    @contextmanager
    def engine(self, *, drafts: int, dtype: str | None = None) -> Iterator[Any]:
        """A running engine; drafts: its number of draft tokens, 0 for the verifier alone."""
        speculative = {"method": "eagle3", "model": str(self.draft_dir.resolve()), "num_speculative_tokens": drafts}
        llm = engine.start_llm(
            engine.options_for(
                self.verifier,
                self.verifier_path,
                dtype=dtype or self.verifier.dtype,
                max_model_len=self.settings.max_model_len,
                max_num_seqs=max(self.settings.batch, *PACE_PROMPTS),
                speculative=speculative if drafts else None,
                log_stats=True,
                log_path=self.log_path,
            )
        )
        try:
            self.serve(llm, [WARM_UP] * 2, drafts)  # the first steps compile and allocate, and would be timed
            yield llm
        finally:
            engine.stop_llm(llm)

    def serve(self, llm: Any, prompts: Sequence[Sequence[int]], drafts: int, streams: int | None = None) -> Served:
        return serve(
            llm,
            prompts,
            max_tokens=self.settings.max_tokens,
            stop_ids=self.stop_ids,
            streams=streams or self.settings.batch,
            drafts=drafts,
        )

    def pace(self, llm: Any, prompt_set: PromptSet, drafts: int) -> dict[int, float]:
        """Milliseconds a token by number of streams, over the first prompts of a set."""
        return {
            streams: self.serve(llm, prompt_set.prompts[:count], drafts, streams).milliseconds_per_token
            for streams, count in PACE_PROMPTS.items()
        }


def serve(
    llm: Any, prompts: Sequence[Sequence[int]], *, max_tokens: int, stop_ids: Sequence[int], streams: int, drafts: int
) -> Served:
    """Answers greedily, `streams` prompts at once. drafts: the engine's number of draft tokens; 0 without a draft."""
    params = engine.sampling_params(max_tokens=max_tokens, temperature=0.0, stop_token_ids=list(stop_ids))
    before = engine.read_counters(llm, drafts) if drafts else None
    began = perf_counter()
    requests = (EngineRequest(f"{began}-{i}", prompt, params) for i, prompt in enumerate(prompts))
    answers: dict[int, list[int]] = {}
    for key, output in engine.stream_requests(llm, requests, max_in_flight=streams):
        answers[int(key.rpartition("-")[2])] = list(output.outputs[0].token_ids)
    seconds = perf_counter() - began
    counters = engine.read_counters(llm, drafts) - before if before is not None else None
    return Served([answers[i] for i in range(len(prompts))], seconds, min(streams, len(prompts)), counters)


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


def log_gaps(
    llm: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], parted: Sequence[Parting]
) -> list[float]:
    """How much likelier the verifier itself finds one of the two tokens of each parting, in nats.

    Infinite where one of them is not even among its twenty likeliest, or where one answer simply ends.

    llm: an engine without a draft. It is asked for the twenty likeliest tokens after the common beginning.
    """
    params = engine.sampling_params(max_tokens=1, temperature=0.0, logprobs=20)
    asked = perf_counter()
    requests = [
        EngineRequest(f"{asked}-{number}", [*prompts[p.prompt], *answers[p.prompt][: p.common]], params)
        for number, p in enumerate(parted)
    ]
    gaps = [float("inf")] * len(parted)
    for key, output in engine.stream_requests(llm, requests, max_in_flight=8):
        number = int(key.rpartition("-")[2])
        likely = {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}
        one, other = parted[number].one, parted[number].other
        if one in likely and other in likely:
            gaps[number] = abs(likely[one] - likely[other])
    return gaps


def compare(
    bench: Bench,
    llm: Any,
    sets: Sequence[PromptSet],
    alone: Mapping[str, Served],
    drafted: Mapping[str, Served],
) -> dict[str, Any]:
    """Answers with and without the draft in the serving dtype, beside those of two batch sizes without it.

    llm: an engine without a draft, which says how sure the verifier was where two answers part.
    """
    total = same = same_alone = 0
    gaps: list[float] = []
    for s in sets:
        answers = alone[s.name].answers
        parted = partings(answers, drafted[s.name].answers)
        gaps += log_gaps(llm, s.prompts, answers, parted)
        smaller = bench.serve(llm, s.prompts, 0, streams=SMALLER_BATCH)
        total += len(s.prompts)
        same += len(s.prompts) - len(parted)
        same_alone += len(s.prompts) - len(partings(answers, smaller.answers))
    refuse_sure_partings(gaps, total)
    largest = max(gaps, default=0.0)
    return {"prompts": total, "same": same, "same_at_two_batch_sizes_without_draft": same_alone, "max_gap": largest}


def refuse_sure_partings(gaps: Sequence[float], num_prompts: int) -> None:
    """Raises: PipelineError when an answer parts from the verifier's own where the verifier was sure."""
    far = [gap for gap in gaps if gap > NEAR_TIE]
    if far:
        what = f"{len(far)} of {num_prompts} answers part from the verifier's own where it is sure "
        what += f"(by {max(far):.2f} nats, a near tie has at most {NEAR_TIE})"
        raise PipelineError(Problem("draft", what, "verification is broken: report it with the versions of vLLM"))


def lossless(bench: Bench, sets: Sequence[PromptSet]) -> dict[str, Any]:
    """In float32 the draft must not change a token. Raises: PipelineError when it does."""
    prompts = [p for s in reversed(sets) for p in s.prompts][: bench.settings.lossless_prompts]
    drafts = bench.settings.num_draft_tokens[0]
    with bench.engine(drafts=0, dtype="float32") as llm:
        alone = bench.serve(llm, prompts, 0)
    with bench.engine(drafts=drafts, dtype="float32") as llm:
        drafted = bench.serve(llm, prompts, drafts)
    refuse_changed_output(partings(alone.answers, drafted.answers), len(prompts))
    return {"prompts": len(prompts), "same": len(prompts)}


def refuse_changed_output(parted: Sequence[Parting], num_prompts: int) -> None:
    if parted:
        what = f"greedy output in float32 changes with the draft for {len(parted)} of {num_prompts} prompts"
        raise PipelineError(Problem("draft", what, "verification is broken: report it with the versions of vLLM"))


# ---- time per token ---------------------------------------------------------------------------------------------------


def pace_rows(pace: Mapping[int, Mapping[int, float]], prompt_set: str) -> list[dict[str, Any]]:
    """One row a setting and number of streams; `speedup` is over the verifier alone."""
    return [
        {
            "prompt_set": prompt_set,
            "num_draft_tokens": drafts,
            "streams": streams,
            "milliseconds_per_token": found,
            "speedup": pace[0][streams] / found,
        }
        for drafts in sorted(pace)
        for streams, found in pace[drafts].items()
    ]
