"""Stage 5: a checkpoint becomes a draft that a server loads, proven before it leaves the machine.

reads   checkpoints/, vocab_mapping/, samples/, hidden_states/, the verifier
writes  draft/config.json, model.safetensors, README.md, serving_report.json, manifest.json
run     python 05_convert_checkpoint.py --config configs/X.yaml
takes   seconds to convert; the serve check starts vLLM four times (SmolLM2-135M on two cores: four minutes)

First the round trip: what was written is loaded again and must give the checkpoint's logits bit for bit. Then
verifier and draft are served by vLLM: acceptance on held-out prompts beside what training simulated, speed with and
without the draft, and output that must not change in float32.
"""

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from common import engine, export, serve_check
from common.chat import ChatEncoder
from common.checkpoints import DIR_NAME as CHECKPOINTS
from common.checkpoints import find_checkpoint, read_val_metrics
from common.config import Config, SourceSection
from common.corpus import Conversation, check_source, prompt_of, read_source
from common.errors import PipelineError, Problem, Problems
from common.export import Draft, Row
from common.files import format_bytes, write_json, write_text
from common.hidden_states import HiddenStatesDir, open_hidden_states
from common.manifest import Manifest, read_manifest, require_same
from common.model_card import model_card
from common.samples import Samples, open_samples
from common.serve_check import PromptSet, Served
from common.stage import Outcome, Stage, run_stage
from common.verifier import Verifier, VerifierHead, load_head, load_tokenizer, open_verifier
from common.vocab_mapping import VocabMapping, open_vocab_mapping

logger = logging.getLogger("pipeline")
VALIDATION = "val"
ROUND_TRIP_SAMPLES = 3
SMALLER_BATCH = 8  # what a second run without a draft uses, to see how far batching alone changes bf16 output


@dataclass(frozen=True)
class Inputs:
    samples: Samples
    hidden_states: HiddenStatesDir
    mapping: VocabMapping
    checkpoint: Path
    verifier: Verifier
    parents: Mapping[str, Manifest]
    fingerprints: Mapping[str, str]


def check(config: Config) -> Inputs:
    """Opens all artifacts. Raises: PipelineError with every problem; loads no weights."""
    problems = Problems()
    run_dir, opened = config.run.dir, dict[str, Any]()
    for name, open_it in {
        "samples": lambda: open_samples(run_dir),
        "hidden_states": lambda: open_hidden_states(run_dir),
        "vocab_mapping": lambda: open_vocab_mapping(run_dir),
        "checkpoints": lambda: read_manifest(run_dir / CHECKPOINTS, "04_train"),
        "checkpoint": lambda: find_checkpoint(run_dir, config.export.checkpoint),
        "verifier": lambda: open_verifier(config.verifier),
    }.items():
        with problems.collect():
            opened[name] = open_it()
    for name in config.export.prompt_sets:
        if name != VALIDATION:
            with problems.collect():
                check_source(name)
    problems.raise_if_any()
    samples, hidden_states = opened["samples"], opened["hidden_states"]
    vocab_manifest, mapping = opened["vocab_mapping"]
    parents = {"checkpoints": opened["checkpoints"], "vocab_mapping": vocab_manifest}
    chain = parents | {"samples": samples.manifest, "hidden_states": hidden_states.manifest}
    require_same(problems, chain)
    verifier: Verifier = opened["verifier"]
    for key, value in verifier.fingerprints.items():
        if samples.manifest.fingerprints.get(key, value) != value:
            what = f"is not the verifier of these artifacts: another {key.replace('_', ' ')}"
            problems.add("verifier.path", what, "use the verifier that the samples were made with")
    problems.raise_if_any()
    fingerprints = dict(opened["checkpoints"].fingerprints)
    return Inputs(samples, hidden_states, mapping, opened["checkpoint"], verifier, parents, fingerprints)


def estimate(config: Config, inputs: Inputs) -> dict[str, str]:
    weights = (inputs.checkpoint / export.WEIGHTS_FILE).stat().st_size
    return {
        "checkpoint": str(inputs.checkpoint),
        "format": config.export.format,
        "bytes": format_bytes(weights),
        "serve check": ", ".join(config.export.prompt_sets) if config.export.serve_check else "off",
        "draft tokens": ", ".join(map(str, config.export.num_draft_tokens)),
    }


def run(config: Config, inputs: Inputs, out_dir: Path) -> Outcome:
    """Converts, proves the round trip, serves, and writes the card."""
    checkpoint, where = export.read_draft(inputs.checkpoint), str(inputs.checkpoint)
    head = load_head(inputs.verifier)
    export.check_draft(checkpoint, inputs.mapping, aux_layer_ids=inputs.hidden_states.aux_layer_ids, where=where)
    export.check_head(checkpoint, head.head, inputs.mapping, frozen=not config.train.train_head, where=where)
    export.check_embeddings(checkpoint, head.embed, where=where)
    paths = export.write_draft(
        out_dir,
        export.with_served_keys(checkpoint),
        layout=config.export.format,
        share_embeddings=config.export.share_embeddings,
    )
    num_logits = prove_round_trip(config, inputs, checkpoint, head, out_dir)
    logger.info("round trip: %s logits equal the checkpoint's bit for bit", f"{num_logits:,}")
    report: dict[str, Any] = {"runs": [], "greedy": {}}
    if config.export.serve_check:
        report = measure(config, inputs, out_dir)
        write_json(out_dir / export.REPORT_NAME, report)
        paths.append(out_dir / export.REPORT_NAME)
        show(report)
    assert inputs.samples.manifest
    card = model_card(config, inputs.verifier, inputs.parents["checkpoints"], inputs.samples.manifest, report)
    write_text(out_dir / export.CARD_NAME, card)
    counts: dict[str, Any] = {"bytes": sum(p.stat().st_size for p in paths), "compared_logits": num_logits}
    for entry in report["runs"]:
        counts[f"acceptance_length {entry['prompt_set']} {entry['num_draft_tokens']}"] = entry["acceptance_length"]
    return Outcome(counts, [*paths, out_dir / export.CARD_NAME])


def prove_round_trip(config: Config, inputs: Inputs, checkpoint: Draft, head: VerifierHead, out_dir: Path) -> int:
    """Compares the written draft with the checkpoint over real samples. Returns the number of logits compared."""
    shortest = sorted(range(len(inputs.samples)), key=lambda i: inputs.samples.num_tokens[i])
    rows = [_row(inputs.hidden_states, i) for i in shortest[-ROUND_TRIP_SAMPLES:]]
    written = export.read_draft(out_dir)
    export.check_draft(
        written,
        inputs.mapping,
        aux_layer_ids=inputs.hidden_states.aux_layer_ids,
        where=str(out_dir),
        shares_embeddings=config.export.share_embeddings,
    )
    return export.check_round_trip(
        checkpoint,
        written,
        rows,
        head.embed.to(checkpoint.tensors[export.EMBED].dtype),
        ttt_steps=config.train.ttt_steps,
    )


def _row(hidden_states: HiddenStatesDir, index: int) -> Row:
    states = hidden_states.load(index)
    return Row(states.input_ids, torch.cat(states.aux, dim=-1), states.last)


# ---- the serve check -------------------------------------------------------------------------------------------------


def measure(config: Config, inputs: Inputs, out_dir: Path) -> dict[str, Any]:
    """Serves with and without the draft. Returns what serving_report.json holds.

    Raises: PipelineError when float32 output changes, or when an answer in the serving dtype parts from the
        verifier's own at something that is no near tie.
    """
    sets = [_prompt_set(config, inputs, name) for name in config.export.prompt_sets]
    bench = _Bench(config, inputs, out_dir)
    drafted: dict[tuple[str, int], Served] = {}
    for drafts in config.export.num_draft_tokens:
        with bench.engine(drafts=drafts) as llm:
            drafted |= {(s.name, drafts): bench.serve(llm, s.prompts, drafts) for s in sets}
    with bench.engine(drafts=0) as llm:
        alone = {s.name: bench.serve(llm, s.prompts, 0) for s in sets}
        last = {s.name: drafted[s.name, config.export.num_draft_tokens[-1]] for s in sets}
        greedy = {config.verifier.dtype: bench.compare(llm, sets, alone, last)}
    runs = [
        bench.entry(s, drafts, drafted[s.name, drafts], alone[s.name])
        for drafts in config.export.num_draft_tokens
        for s in sets
    ]
    if config.export.lossless_prompts:
        greedy["float32"] = bench.lossless(sets)
    return {"runs": runs, "greedy": greedy}


def _prompt_set(config: Config, inputs: Inputs, name: str) -> PromptSet:
    limit = config.export.max_prompts
    if name == VALIDATION:
        indices = inputs.samples.indices_of("val")[:limit]
        rows = [inputs.samples[i] for i in indices]
        return PromptSet(name, [row.input_ids[: int(row.loss_mask.argmax())].tolist() for row in rows])
    tokenizer, kwargs = load_tokenizer(inputs.verifier), config.prepare.template_kwargs
    encoder = ChatEncoder(tokenizer, inputs.verifier.stop_token_ids, kwargs)
    found = (row for row in read_source(SourceSection(path=name)) if isinstance(row, Conversation))
    prompts = [encoder.prompt_ids(prompt_of(row), row.tools) for row in found][:limit]
    if not prompts:
        raise PipelineError(Problem("export.prompt_sets", f"{name} holds no prompt", "name another set"))
    return PromptSet(name, prompts)


class _Bench:
    """What all measurements of one draft share."""

    def __init__(self, config: Config, inputs: Inputs, out_dir: Path) -> None:
        self._config, self._inputs, self._out_dir = config, inputs, out_dir

    @contextmanager
    def engine(self, *, drafts: int, dtype: str | None = None) -> Iterator[Any]:
        config, verifier = self._config, self._inputs.verifier
        speculative = {"method": "eagle3", "model": str(self._out_dir.resolve()), "num_speculative_tokens": drafts}
        llm = engine.start_llm(
            engine.options_for(
                config.verifier,
                verifier.path,
                dtype=dtype or config.verifier.dtype,
                max_model_len=config.export.max_model_len,
                max_num_seqs=config.export.batch,
                speculative=speculative if drafts else None,
                log_stats=True,
                log_path=config.run.dir / "logs" / f"{export.DIR_NAME}.vllm.log",
            )
        )
        try:
            yield llm
        finally:
            engine.stop_llm(llm)

    def serve(self, llm: Any, prompts: Sequence[Sequence[int]], drafts: int, batch: int | None = None) -> Served:
        stops = self._inputs.verifier.stop_token_ids
        settings = self._config.export
        return serve_check.serve(
            llm,
            prompts,
            max_tokens=settings.max_tokens,
            stop_ids=stops,
            batch=batch or settings.batch,
            drafts=drafts,
        )

    def entry(self, prompt_set: PromptSet, drafts: int, served: Served, alone: Served) -> dict[str, Any]:
        counters = served.counters
        assert counters is not None
        simulated = self._simulated(drafts) if prompt_set.name == VALIDATION else None
        return {
            "prompt_set": prompt_set.name,
            "num_prompts": len(prompt_set.prompts),
            "num_draft_tokens": drafts,
            "num_drafts": counters.num_drafts,
            "acceptance_length": counters.acceptance_length,
            "acceptance_by_position": counters.acceptance_by_position,
            "simulated_acceptance_length": simulated,
            "verdict": serve_check.verdict(counters, simulated),
            "output_tokens_per_second": {"with_draft": served.tokens_per_second, "without": alone.tokens_per_second},
        }

    def _simulated(self, drafts: int) -> float | None:
        """What training simulated on the same prompts' answers; only for as many draft tokens as it unrolled."""
        if drafts != self._config.train.ttt_steps:
            return None
        metrics = read_val_metrics(self._inputs.checkpoint.parent, int(self._inputs.checkpoint.name)) or {}
        return next((value for key, value in metrics.items() if key.startswith("acceptance_length")), None)

    def compare(
        self, llm: Any, sets: Sequence[PromptSet], alone: Mapping[str, Served], drafted: Mapping[str, Served]
    ) -> dict[str, Any]:
        """Answers with and without the draft in the serving dtype, beside those of two batch sizes without it.

        llm: an engine without a draft, which says how sure the verifier was where two answers part.
        """
        total = same = same_alone = 0
        gaps: list[float] = []
        for s in sets:
            answers = alone[s.name].answers
            parted = serve_check.partings(answers, drafted[s.name].answers)
            gaps += [serve_check.log_gap(llm, s.prompts[p.prompt], answers[p.prompt], p) for p in parted]
            smaller = self.serve(llm, s.prompts, 0, batch=SMALLER_BATCH)
            total += len(s.prompts)
            same += len(s.prompts) - len(parted)
            same_alone += len(s.prompts) - len(serve_check.partings(answers, smaller.answers))
        far = [gap for gap in gaps if gap > serve_check.NEAR_TIE]
        if far:
            what = f"{len(far)} of {total} answers part from the verifier's own where it is sure "
            what += f"(by {max(far):.2f} nats, a near tie has at most {serve_check.NEAR_TIE})"
            raise PipelineError(Problem("draft", what, "verification is broken: report it with the versions of vLLM"))
        largest = max(gaps, default=0.0)
        return {"prompts": total, "same": same, "same_at_two_batch_sizes_without_draft": same_alone, "max_gap": largest}

    def lossless(self, sets: Sequence[PromptSet]) -> dict[str, Any]:
        """In float32 the draft must not change a token. Raises: PipelineError when it does."""
        prompts = [p for s in reversed(sets) for p in s.prompts][: self._config.export.lossless_prompts]
        drafts = self._config.export.num_draft_tokens[0]
        with self.engine(drafts=0, dtype="float32") as llm:
            alone = self.serve(llm, prompts, 0)
        with self.engine(drafts=drafts, dtype="float32") as llm:
            drafted = self.serve(llm, prompts, drafts)
        parted = serve_check.partings(alone.answers, drafted.answers)
        if parted:
            what = f"greedy output in float32 changes with the draft for {len(parted)} of {len(prompts)} prompts"
            raise PipelineError(Problem("draft", what, "verification is broken: report it with the versions of vLLM"))
        return {"prompts": len(prompts), "same": len(prompts)}


def show(report: Mapping[str, Any]) -> None:
    table = Table(title="served by vLLM", title_justify="left")
    for name in (
        "prompts",
        "draft tokens",
        "acceptance length",
        "by position",
        "simulated",
        "tokens/s",
        "without draft",
    ):
        table.add_column(name)
    for entry in report["runs"]:
        simulated, rate = entry["simulated_acceptance_length"], entry["output_tokens_per_second"]
        table.add_row(
            f"{entry['prompt_set']} ({entry['num_prompts']})",
            str(entry["num_draft_tokens"]),
            f"{entry['acceptance_length']:.3f}",
            ", ".join(f"{share:.3f}" for share in entry["acceptance_by_position"]),
            f"{simulated:.3f}" if simulated else "",
            f"{rate['with_draft']:.0f}",
            f"{rate['without']:.0f}",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    for entry in report["runs"]:
        logger.info("%s at %s: %s", entry["prompt_set"], entry["num_draft_tokens"], entry["verdict"])
    for dtype, found in report["greedy"].items():
        logger.info("greedy output in %s: %s", dtype, json.dumps(found))


STAGE = Stage(
    script="05_convert_checkpoint",
    output=export.DIR_NAME,
    sections=("verifier", "export"),
    description=__doc__,
    check=check,
    estimate=estimate,
    run=run,
    owns=export.OWNED,
    resumable=False,
)


def main(argv: Sequence[str] | None = None) -> int:
    return run_stage(STAGE, argv)


if __name__ == "__main__":
    sys.exit(main())
