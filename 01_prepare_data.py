"""Stage 1: conversations, or prompts that the verifier answers, as token ids with an exact assistant mask.

reads   prepare.sources (JSONL, JSON, Parquet, a datasets directory, embedded:NAME), the verifier's tokenizer; with
        generate.enabled the verifier itself, in vLLM, or a server that serves it
writes  samples/samples.parquet, dropped.jsonl, answers.jsonl, prompts.jsonl, failed.jsonl, manifest.json
run     python 01_prepare_data.py --config configs/X.yaml          (--preview 3 shows samples in colour)
takes   SmolLM2-135M on two cores: about 700 answer tokens/s; without generation seconds

A sample of an answered prompt is built from the ids that the verifier was shown and the ids that it produced, never
by rendering its text again. Each answer is on disk the moment it is finished; the same command asks for the rest.
"""

import argparse
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from common import cleaning, corpus, endpoint, engine, generation
from common.chat import ChatEncoder, Encoded, UnusableError, cut
from common.config import Config, Invocation, SourceSection
from common.corpus import Conversation
from common.errors import PipelineError, Problem, Problems
from common.files import format_count, free_bytes, replacing
from common.generation import Question
from common.manifest import Manifest, is_complete
from common.samples import DIR_NAME, FILE_NAME, Sample, open_samples, write_samples
from common.stage import Outcome, Stage, run_stage
from common.verifier import Verifier, check_special_tokens, check_weight_files, load_tokenizer, open_verifier

logger = logging.getLogger("pipeline")
DROPPED_NAME = "dropped.jsonl"
OWN_PROMPTS = "magpie"


@dataclass(frozen=True)
class Inputs:
    verifier: Verifier
    tokenizer: Any
    encoder: ChatEncoder
    parents: Mapping[str, Manifest]
    fingerprints: Mapping[str, str]


def check(config: Config) -> Inputs:
    """Opens the tokenizer and looks at the sources. Raises: PipelineError with every problem."""
    problems = Problems()
    for source in config.prepare.sources:
        with problems.collect():
            corpus.check_source(source.path)
    for path in config.prepare.held_out:
        with problems.collect():
            corpus.check_source(path)
    if not config.prepare.sources and not (config.generate.enabled and config.generate.magpie_prompts):
        problems.add("prepare.sources", "is empty, and no prompts are to be written", "name a source: [{path: FILE}]")
    if not config.generate.enabled and config.generate.magpie_prompts:
        problems.add("generate.magpie_prompts", "would be ignored without generate.enabled", "set it to 0")
    with problems.collect():
        _check_endpoint(config)
    with problems.collect():
        opened = _open(config)
    problems.raise_if_any()
    return opened


def _check_endpoint(config: Config) -> None:
    """Raises: PipelineError when the server is to be asked and can't be reached; a complete stage asks nobody."""
    if config.generate.endpoint and config.generate.enabled and not is_complete(config.run.dir / DIR_NAME):
        endpoint.check_endpoint(generation.endpoint_of(config.generate))
    elif config.generate.endpoint and not config.generate.enabled:
        fix = "unset it, or set generate.enabled: true"
        raise PipelineError(Problem("generate.endpoint", "would be ignored without generate.enabled", fix))


def _open(config: Config) -> Inputs:
    verifier = open_verifier(config.verifier)
    tokenizer = load_tokenizer(verifier)
    check_special_tokens(verifier, tokenizer, config.verifier.expected_token_ids)
    if config.generate.enabled:
        check_weight_files(verifier, whole=True)
    if not verifier.stop_token_ids:
        what = "neither generation_config.json nor config.json names an eos_token_id"
        raise PipelineError(Problem(str(verifier.path), what, "add it: answers would never end"))
    encoder = ChatEncoder(
        tokenizer,
        verifier.stop_token_ids,
        config.prepare.template_kwargs,
        supervise_empty_think=config.prepare.supervise_empty_think,
    )
    encoder.check_template()
    return Inputs(verifier, tokenizer, encoder, {}, verifier.fingerprints)


def estimate(config: Config, inputs: Inputs) -> dict[str, str]:
    return {
        "sources": ", ".join(source.path for source in config.prepare.sources) or "none",
        "prompts by the verifier": format_count(config.generate.magpie_prompts),
        "answers": f"by the verifier, at most {config.generate.max_tokens} tokens"
        if config.generate.enabled
        else "those in the data",
        "tokens a sample, at most": format_count(config.prepare.max_tokens),
        "vocabulary": format_count(inputs.verifier.vocab_size),
        "free on the disk, bytes": format_count(free_bytes(config.run.dir)),
    }


def run(config: Config, inputs: Inputs, out_dir: Path) -> Outcome:
    """Makes samples.parquet."""
    dropped = Dropped()
    samples = (
        _answered(config, inputs, out_dir, dropped) if config.generate.enabled else _given(config, inputs, dropped)
    )
    counts = write_samples(out_dir, samples)
    dropped.write(out_dir / DROPPED_NAME)
    counts["dropped"] = sum(dropped.reasons.values())
    if not counts["samples"]:
        what = f"no row gave a sample: {dict(dropped.reasons.most_common(5))}"
        raise PipelineError(Problem("prepare.sources", what, f"see {out_dir / DROPPED_NAME}"))
    share = counts["supervised_tokens"] / counts["tokens"]
    logger.info("%.1f%% of the tokens are supervised; dropped: %s", 100 * share, dict(dropped.reasons) or "nothing")
    reasons = {"dropped_reasons": dict(dropped.reasons), "cut_answers": dropped.num_cut}
    return Outcome(counts | reasons, [out_dir / FILE_NAME, out_dir / DROPPED_NAME])


@dataclass
class Dropped:
    """Rows that gave no sample: which, and why. `num_cut` answers met the length limit and were kept."""

    rows: list[dict[str, str]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    num_cut: int = 0

    def add(self, reason: str, what: str, source: str) -> None:
        self.reasons[reason] += 1
        self.rows.append({"reason": reason, "row": what, "source": source})

    def write(self, path: Path) -> None:
        with replacing(path) as temporary:
            temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows), "utf-8")


# ---- rows ------------------------------------------------------------------------------------------------------------


def clean_rows(config: Config, extra: Sequence[str], dropped: Dropped) -> Iterator[Conversation]:
    """Conversations of all sources, and prompts of the verifier's own, without duplicates and held-out prompts."""
    held_out = cleaning.HeldOut(_held_out_texts(config))
    duplicates = cleaning.Duplicates(config.prepare.near_duplicate_threshold)
    for row in _all_rows(config, extra):
        if isinstance(row, corpus.Skipped):
            dropped.add(row.reason, row.where, row.source)
            continue
        text = corpus.user_text(row.messages)
        if held_out.contains(text):
            dropped.add("a held-out prompt", row.conversation_id, row.source)
        elif duplicates.seen_before(text):
            dropped.add("a duplicate prompt", row.conversation_id, row.source)
        else:
            yield row


def _all_rows(config: Config, extra: Sequence[str]) -> Iterator[Conversation | corpus.Skipped]:
    for source in config.prepare.sources:
        yield from corpus.read_source(source, config.run.seed)
    for number, text in enumerate(extra):
        yield Conversation([{"role": "user", "content": text}], f"{OWN_PROMPTS}/{number}", OWN_PROMPTS)


def _held_out_texts(config: Config) -> Iterator[str]:
    for path in config.prepare.held_out:
        for row in corpus.read_source(SourceSection(path=path)):
            if isinstance(row, Conversation):
                yield corpus.user_text(row.messages)


def split_of(config: Config, conversation_id: str) -> str:
    """By conversation, from its id alone, so that a longer data set moves nobody to the other side."""
    drawn = corpus.unit_hash(f"split:{config.run.seed}:{conversation_id}")
    return "val" if drawn < config.prepare.val_fraction else "train"


# ---- conversations with their own answers ----------------------------------------------------------------------------


def _given(config: Config, inputs: Inputs, dropped: Dropped) -> Iterator[Sample]:
    num_as_one = num_by_turn = 0
    for row in clean_rows(config, [], dropped):
        try:
            encoded = inputs.encoder.encode_conversation(
                row.messages, row.tools, config.prepare.turns, is_cut=row.is_cut
            )
        except UnusableError as error:
            dropped.add(str(error), row.conversation_id, row.source)
            continue
        dropped.num_cut += row.is_cut
        num_answers = sum(message["role"] == "assistant" for message in row.messages)
        num_as_one += len(encoded) == 1 and num_answers > 1
        num_by_turn += len(encoded) > 1
        for sample in encoded:
            yield from _kept(config, sample, row.conversation_id, row.source, dropped)
    logger.info("of conversations with several answers %s are one sample, %s one a turn", num_as_one, num_by_turn)


def _kept(config: Config, encoded: Encoded, conversation_id: str, source: str, dropped: Dropped) -> Iterator[Sample]:
    """Cuts, and drops what is then supervised too little: a sample without supervised tokens trains nothing."""
    short = cut(encoded, config.prepare.max_tokens)
    if int(short.loss_mask.sum()) < config.prepare.min_supervised_tokens:
        dropped.add("too few supervised tokens", conversation_id, source)
        return
    yield Sample(short.input_ids, short.loss_mask, conversation_id, split_of(config, conversation_id), source)


# ---- answers by the verifier -----------------------------------------------------------------------------------------


def _answered(config: Config, inputs: Inputs, out_dir: Path, dropped: Dropped) -> Iterator[Sample]:
    questions = _ask_all(config, inputs, out_dir, dropped)
    answers = generation.read_answers(out_dir)
    for question in questions:
        answer = answers.get(question.key)
        if answer is None:  # at most generate.max_failed
            dropped.add("no answer from the server", question.conversation_id, question.source)
            continue
        if answer.finish_reason == "length":
            if not config.generate.keep_cut_answers:
                dropped.add("an answer cut by the length limit", question.conversation_id, question.source)
                continue
            dropped.num_cut += 1
        if config.prepare.drop_looping and cleaning.is_looping(answer.completion_ids):
            dropped.add("a looping answer", question.conversation_id, question.source)
            continue
        ids = np.array([*question.prompt_ids, *answer.completion_ids], dtype=np.int32)
        mask = np.arange(len(ids)) >= len(question.prompt_ids)
        yield from _kept(config, Encoded(ids, mask), question.conversation_id, question.source, dropped)


def _ask_all(config: Config, inputs: Inputs, out_dir: Path, dropped: Dropped) -> list[Question]:
    """Lets the verifier write prompts and answer all; the engine starts only when something is missing."""
    settings, stop_ids, seed = config.generate, inputs.verifier.stop_token_ids, config.run.seed
    own = _Engine(config, inputs)
    if settings.endpoint:
        answer = generation.by_server(settings, stop_ids, inputs.encoder.encode)
    else:
        answer = generation.by_engine(own.llm, stop_ids, settings.max_num_seqs)
    try:
        texts = []
        if settings.magpie_prompts:
            prefix = inputs.encoder.user_prefix_ids()
            texts = generation.write_prompts(answer, inputs.tokenizer, prefix, out_dir, settings, run_seed=seed)
        questions = list(_questions(config, inputs, texts, dropped))
        generation.answer_questions(answer, questions, out_dir, settings, run_seed=seed)
        return questions
    finally:
        own.stop()


def _questions(config: Config, inputs: Inputs, texts: Sequence[str], dropped: Dropped) -> Iterator[Question]:
    room = config.prepare.max_tokens - config.prepare.min_supervised_tokens
    seen: set[str] = set()
    for row in clean_rows(config, texts, dropped):
        try:
            ids = inputs.encoder.prompt_ids(corpus.prompt_of(row), row.tools)
        except UnusableError as error:
            dropped.add(str(error), row.conversation_id, row.source)
            continue
        question = Question(tuple(ids), row.conversation_id, row.source)
        if len(ids) > room:
            dropped.add("a prompt that leaves no room for an answer", row.conversation_id, row.source)
        elif question.key in seen:
            dropped.add("a duplicate prompt", row.conversation_id, row.source)
        else:
            seen.add(question.key)
            yield question


class _Engine:
    """vLLM, started when it is first needed."""

    def __init__(self, config: Config, inputs: Inputs) -> None:
        self._config, self._inputs, self._llm = config, inputs, None

    def llm(self) -> Any:
        if self._llm is None:
            config = self._config
            options = engine.options_for(
                config.verifier,
                self._inputs.verifier.path,
                max_model_len=config.prepare.max_tokens + config.generate.max_tokens,
                max_num_seqs=config.generate.max_num_seqs,
                seed=config.run.seed,
                kv_cache_gib=config.generate.cpu_kv_cache_gib,
                log_path=config.run.dir / "logs" / f"{DIR_NAME}.vllm.log",
            )
            self._llm = engine.start_llm(options)
        return self._llm

    def stop(self) -> None:
        if self._llm is not None:
            engine.stop_llm(self._llm)
            self._llm = None


# ---- a look at it ----------------------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preview", type=int, metavar="N", help="print N samples, supervised tokens in colour, and stop"
    )


def preview(invocation: Invocation, inputs: Inputs) -> int | None:
    if not invocation.flags.preview:
        return None
    samples = open_samples(invocation.config.run.dir)
    console = Console()
    for index in range(min(invocation.flags.preview, len(samples))):
        sample = samples[index]
        console.rule(
            f"sample {index}: {sample.num_supervised} of {sample.num_tokens} tokens supervised, {sample.split}"
        )
        console.print(coloured(sample, inputs.encoder))
    return 0


def coloured(sample: Sample, encoder: ChatEncoder) -> Text:
    """The sample's text; what carries loss is green."""
    text = Text()
    changes = np.flatnonzero(np.diff(sample.loss_mask)) + 1
    for ids, mask in zip(np.split(sample.input_ids, changes), np.split(sample.loss_mask, changes), strict=True):
        text.append(encoder.decode(ids.tolist()), style="bold green" if mask[0] else "dim")
    return text


STAGE = Stage(
    script="01_prepare_data",
    output=DIR_NAME,
    sections=("verifier", "prepare", "generate"),
    description=__doc__,
    check=check,
    estimate=estimate,
    run=run,
    owns=(FILE_NAME, DROPPED_NAME, generation.ANSWERS_NAME, generation.PROMPTS_NAME, generation.FAILED_NAME),
    next_script="02_extract_hidden_states",
    add_flags=add_flags,
    instead=preview,
)


def main(argv: Sequence[str] | None = None) -> int:
    return run_stage(STAGE, argv)


if __name__ == "__main__":
    sys.exit(main())
