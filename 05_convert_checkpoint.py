"""Stage 5: a checkpoint becomes a draft that a server loads, proven before it leaves the machine.

reads   checkpoints/, vocab_mapping/, samples/, hidden_states/, the verifier
writes  draft/config.json, model.safetensors, README.md, serving_report.json, manifest.json
run     python 05_convert_checkpoint.py --config configs/X.yaml [--import DIR]
takes   seconds to convert; the serve check starts vLLM four times (SmolLM2-135M on two cores: four minutes)

First the round trip: what was written is loaded again, must give the checkpoint's logits bit for bit, and its
config.json must mean to vLLM what it meant in training. Then verifier and draft are served by vLLM: acceptance on
held-out prompts beside a simulation of the very same ones, time per token with and without the draft, and output that
must not change in float32. --import takes a public EAGLE-3 draft in place of checkpoints/.
"""

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from common import engine, export
from common.chat import ChatEncoder
from common.checkpoints import DIR_NAME as CHECKPOINTS
from common.checkpoints import find_checkpoint
from common.config import Config, SourceSection
from common.corpus import Conversation, check_source, prompt_of, read_source
from common.draft_import import ForeignDraft, load_foreign_draft, open_foreign_draft
from common.errors import PipelineError, Problem, Problems
from common.export import Draft, Row
from common.files import format_bytes, write_json, write_text
from common.hidden_states import HiddenStatesDir, open_hidden_states
from common.manifest import Manifest, read_manifest, require_fingerprints, require_same
from common.model_card import model_card
from common.samples import Samples, open_samples
from common.serve_check import Bench, PromptSet, Served, compare, lossless, pace_rows
from common.simulation import Answer, Simulation, first_answer, judge
from common.stage import Outcome, Stage, run_stage
from common.verifier import Verifier, VerifierHead, check_weight_files, load_head, load_tokenizer, open_verifier
from common.vocab_mapping import VocabMapping, open_vocab_mapping

logger = logging.getLogger("pipeline")
VALIDATION = "val"
ROUND_TRIP_SAMPLES = 3
WARM_MAP = "warm_start_vocab_mapping"  # the fingerprint that stage 4 records where a warm start brought its own map


@dataclass(frozen=True)
class Training:
    """What a checkpoint of this run descends from."""

    checkpoint: Path
    manifest: Manifest
    samples: Samples
    hidden_states: HiddenStatesDir
    mapping: VocabMapping

    @property
    def ttt_steps(self) -> int:
        return int(self.manifest.config["train"]["ttt_steps"])


@dataclass(frozen=True)
class Inputs:
    """Either a checkpoint of this run, or an imported draft. `sets` are the prompt sets that will be measured."""

    verifier: Verifier
    source: Training | ForeignDraft
    sets: list[str]
    parents: Mapping[str, Manifest] = field(default_factory=dict)
    fingerprints: Mapping[str, str] = field(default_factory=dict)


def check(config: Config) -> Inputs:
    """Opens all artifacts. Raises: PipelineError with every problem; loads no weights."""
    problems = Problems()
    for name in config.export.prompt_sets:
        if name != VALIDATION:
            with problems.collect():
                check_source(name)
    inputs = _check_import(config, problems) if config.export.import_dir else _check_training(config, problems)
    with problems.collect():
        check_weight_files(inputs.verifier, whole=config.export.serve_check)
    if config.export.serve_check:
        engine.vllm_version()
        if not inputs.sets:
            what = "names no prompts, and there is no validation split to take some from"
            problems.add(
                "export.prompt_sets", what, "name a set, as embedded:mt_bench, or set export.serve_check false"
            )
    problems.raise_if_any()
    return inputs


def _check_import(config: Config, problems: Problems) -> Inputs:
    assert config.export.import_dir
    verifier = foreign = None
    with problems.collect():
        verifier = open_verifier(config.verifier)
        foreign = open_foreign_draft(config.export.import_dir, verifier)
    if VALIDATION in config.export.prompt_sets:
        what = "an imported draft has no validation split"
        problems.add("export.prompt_sets", what, f"leave {VALIDATION} out and name another set")
    problems.raise_if_any()
    assert verifier and foreign
    fingerprints = {**verifier.fingerprints, "imported_draft": foreign.fingerprint}
    return Inputs(verifier, foreign, config.export.prompt_sets, {}, fingerprints)


def _check_training(config: Config, problems: Problems) -> Inputs:
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
    problems.raise_if_any()
    samples, hidden_states, verifier = opened["samples"], opened["hidden_states"], opened["verifier"]
    vocab_manifest, mapping = opened["vocab_mapping"]
    parents = {"checkpoints": opened["checkpoints"], "vocab_mapping": vocab_manifest}
    require_same(problems, parents | {"samples": samples.manifest, "hidden_states": hidden_states.manifest})
    require_fingerprints(problems, {"samples": samples.manifest}, verifier.fingerprints)
    has_validation = bool(len(samples.indices_of("val")))
    if VALIDATION in config.export.prompt_sets and not has_validation:
        what = f"{VALIDATION} is empty: no conversation was held out"
        problems.add("export.prompt_sets", what, "raise prepare.val_fraction, or name another set")
    problems.raise_if_any()
    training = Training(opened["checkpoint"], opened["checkpoints"], samples, hidden_states, mapping)
    sets = config.export.prompt_sets or [VALIDATION] * has_validation
    return Inputs(verifier, training, sets, parents, dict(opened["checkpoints"].fingerprints))


def estimate(config: Config, inputs: Inputs) -> dict[str, str]:
    source = inputs.source
    directory = source.checkpoint if isinstance(source, Training) else source.path
    weights = sum(p.stat().st_size for p in directory.iterdir() if p.suffix in (".safetensors", ".bin"))
    return {
        "from": str(directory),
        "format": config.export.format,
        "bytes": format_bytes(weights),
        "serve check": ", ".join(inputs.sets) if config.export.serve_check else "off",
        "draft tokens": ", ".join(map(str, config.export.num_draft_tokens)),
        "engines": str(_count_engines(config)) if config.export.serve_check else "0",
    }


def _count_engines(config: Config) -> int:
    in_float32 = 2 if config.export.lossless_prompts and config.verifier.dtype != "float32" else 0
    return len(config.export.num_draft_tokens) + 1 + in_float32


# ---- conversion ------------------------------------------------------------------------------------------------------


def run(config: Config, inputs: Inputs, out_dir: Path) -> Outcome:
    """Converts, proves the round trip, serves, and writes the card."""
    head = load_head(inputs.verifier)
    draft, mapping = take_draft(inputs, head)
    settings = config.export
    paths = export.write_draft(
        out_dir, export.with_served_keys(draft), layout=settings.format, share_embeddings=settings.share_embeddings
    )
    num_logits = prove_round_trip(config, inputs, draft, mapping, head, out_dir)
    logger.info("round trip: %s logits equal the checkpoint's bit for bit", f"{num_logits:,}")
    for limit in export.server_warnings(draft, inputs.verifier.num_layers, engine.installed_version(), settings.format):
        logger.warning("%s", limit)
    report: dict[str, Any] = {"runs": [], "greedy": {}, "pace": []}
    if settings.serve_check:
        report = measure(config, inputs, draft, mapping, head, out_dir)
        write_json(out_dir / export.REPORT_NAME, report)
        paths.append(out_dir / export.REPORT_NAME)
        show(report)
    training = inputs.source.manifest if isinstance(inputs.source, Training) else None
    samples = inputs.source.samples.manifest if isinstance(inputs.source, Training) else None
    card = model_card(config, inputs.verifier, draft, report, training=training, samples=samples)
    write_text(out_dir / export.CARD_NAME, card)
    counts: dict[str, Any] = {"bytes": sum(p.stat().st_size for p in paths), "compared_logits": num_logits}
    for entry in report["runs"]:
        counts[f"acceptance_length {entry['prompt_set']} {entry['num_draft_tokens']}"] = entry["acceptance_length"]
    return Outcome(counts, [*paths, out_dir / export.CARD_NAME])


def take_draft(inputs: Inputs, head: VerifierHead) -> tuple[Draft, VocabMapping]:
    """The checkpoint or the imported draft, with the map it must have. Raises: PipelineError for a broken one."""
    source = inputs.source
    if isinstance(source, ForeignDraft):
        draft, mapping = load_foreign_draft(source, head)
        for note in source.notes:
            logger.warning("import: %s", note)
        check_against_verifier(draft, mapping, head, draft.aux_layer_ids, frozen=False, where=str(source.path))
        return draft, mapping
    draft, mapping, where = export.read_draft(source.checkpoint), source.mapping, str(source.checkpoint)
    if WARM_MAP in source.manifest.fingerprints:
        mapping = export.map_of(draft, source.manifest.fingerprints[WARM_MAP], where=where)
    ids = source.hidden_states.aux_layer_ids
    check_against_verifier(draft, mapping, head, ids, frozen=_head_was_frozen(source), where=where)
    return draft, mapping


def _head_was_frozen(source: Training | ForeignDraft) -> bool:
    return isinstance(source, Training) and not source.manifest.config["train"]["train_head"]


def check_against_verifier(
    draft: Draft,
    mapping: VocabMapping,
    head: VerifierHead,
    aux_layer_ids: list[int],
    *,
    frozen: bool,
    where: str,
    shares_embeddings: bool = False,
) -> None:
    """Every refusal that needs no logits."""
    export.check_draft(draft, mapping, aux_layer_ids=aux_layer_ids, where=where, shares_embeddings=shares_embeddings)
    export.check_head(draft, head.head, mapping, frozen=frozen, where=where)
    if not shares_embeddings:
        export.check_embeddings(draft, head.embed, where=where)


def prove_round_trip(
    config: Config, inputs: Inputs, draft: Draft, mapping: VocabMapping, head: VerifierHead, out_dir: Path
) -> int:
    """Reads the written draft again and compares it with the original. Returns the number of logits compared."""
    written, settings = export.read_draft(out_dir), config.export
    check_against_verifier(
        written,
        mapping,
        head,
        draft.aux_layer_ids,
        frozen=_head_was_frozen(inputs.source),
        where=str(out_dir),
        shares_embeddings=settings.share_embeddings,
    )
    if engine.installed_version():
        log_path = config.run.dir / "logs" / f"{export.DIR_NAME}.vllm.log"
        read = engine.read_draft_config(out_dir, export.SHAPE_KEYS, log_path)
        faults = export.config_faults(draft, read)
        if faults:
            fix = "don't serve it; report it with the versions of vLLM and transformers"
            raise PipelineError(*(Problem(str(out_dir / export.CONFIG_FILE), fault, fix) for fault in faults))
    embed = head.embed.to(draft.tensors[export.EMBED].dtype)
    return export.check_round_trip(draft, written, _rows_to_compare(inputs), embed, ttt_steps=3)


def _rows_to_compare(inputs: Inputs) -> list[Row]:
    """The longest samples; for an imported draft, which has none, seeded noise in their place."""
    if isinstance(inputs.source, Training):
        lengths = inputs.source.samples.num_tokens
        longest = sorted(range(len(lengths)), key=lambda i: lengths[i])[-ROUND_TRIP_SAMPLES:]
        return [_row(inputs.source.hidden_states, i) for i in longest]
    generator = torch.Generator().manual_seed(0)
    num_aux = len(inputs.source.config["eagle_aux_hidden_state_layer_ids"])
    ids = torch.randint(0, inputs.verifier.vocab_size, (64,), generator=generator)
    states = torch.randn(64, num_aux * inputs.verifier.hidden_size, generator=generator).to(torch.bfloat16)
    return [Row(ids, states, torch.ones(64, dtype=torch.bool))]


def _row(hidden_states: HiddenStatesDir, index: int) -> Row:
    states = hidden_states.load(index)
    return Row(states.input_ids, torch.cat(states.aux, dim=-1), states.loss_mask)


# ---- the serve check -------------------------------------------------------------------------------------------------


def measure(
    config: Config, inputs: Inputs, draft: Draft, mapping: VocabMapping, head: VerifierHead, out_dir: Path
) -> dict[str, Any]:
    """Serves with and without the draft. Returns what serving_report.json holds.

    Raises: PipelineError when float32 output changes, or when an answer in the serving dtype parts from the
        verifier's own at something that is no near tie.
    """
    sets = [_prompt_set(config, inputs, name) for name in inputs.sets]
    simulation = Simulation(draft, _answers(config, inputs), head.embed, mapping.target_ids)
    log_path = config.run.dir / "logs" / f"{export.DIR_NAME}.vllm.log"
    stops = inputs.verifier.stop_token_ids
    bench = Bench(config.verifier, config.export, inputs.verifier.path, out_dir, stops, log_path)
    drafted: dict[tuple[str, int], Served] = {}
    pace: dict[int, dict[int, float]] = {}
    for drafts in config.export.num_draft_tokens:
        with bench.engine(drafts=drafts) as llm:
            drafted |= {(s.name, drafts): bench.serve(llm, s.prompts, drafts) for s in sets}
            pace[drafts] = bench.pace(llm, sets[-1], drafts)
    with bench.engine(drafts=0) as llm:
        alone = {s.name: bench.serve(llm, s.prompts, 0) for s in sets}
        pace[0] = bench.pace(llm, sets[-1], 0)
        last = {s.name: drafted[s.name, config.export.num_draft_tokens[-1]] for s in sets}
        greedy = {config.verifier.dtype: compare(bench, llm, sets, alone, last)}
    runs = [
        _entry(s, drafts, drafted[s.name, drafts], alone[s.name], simulation)
        for drafts in config.export.num_draft_tokens
        for s in sets
    ]
    if config.export.lossless_prompts and config.verifier.dtype != "float32":
        greedy["float32"] = lossless(bench, sets)
    return {"runs": runs, "greedy": greedy, "pace": pace_rows(pace, sets[-1].name)}


def _prompt_set(config: Config, inputs: Inputs, name: str) -> PromptSet:
    """A set's prompts as ids; one that leaves no room for its answer is left out, and counted."""
    limit, room = config.export.max_prompts, config.export.max_model_len - config.export.max_tokens
    if name == VALIDATION:
        assert isinstance(inputs.source, Training)
        rows = [inputs.source.samples[i] for i in _validation_indices(config, inputs.source)]
        prompts = [row.input_ids[: int(row.loss_mask.argmax())].tolist() for row in rows]
    else:
        encoder = ChatEncoder(load_tokenizer(inputs.verifier), inputs.verifier.stop_token_ids)
        found = (row for row in read_source(SourceSection(path=name)) if isinstance(row, Conversation))
        prompts = [encoder.prompt_ids(prompt_of(row), row.tools) for row in found][:limit]
    fitting = [prompt for prompt in prompts if len(prompt) <= room]
    if len(fitting) < len(prompts):
        logger.warning("%s: %d prompts of more than %d tokens left out", name, len(prompts) - len(fitting), room)
    if not fitting:
        what = f"{name} holds no prompt of at most {room} tokens"
        raise PipelineError(Problem("export.prompt_sets", what, "name another set, or raise export.max_model_len"))
    return PromptSet(name, fitting)


def _validation_indices(config: Config, source: Training) -> list[int]:
    """Held-out samples that are served: those whose prompt leaves room for the answer."""
    room = config.export.max_model_len - config.export.max_tokens
    chosen = [int(i) for i in source.samples.indices_of("val")][: config.export.max_prompts]
    return [i for i in chosen if int(source.samples[i].loss_mask.argmax()) <= room]


def _answers(config: Config, inputs: Inputs) -> list[Answer]:
    """The answers that stage 1 holds for the validation prompts; none where these aren't served."""
    if VALIDATION not in inputs.sets or not isinstance(inputs.source, Training):
        return []
    source = inputs.source
    indices = _validation_indices(config, source)
    return [first_answer(_row(source.hidden_states, i), config.export.max_tokens) for i in indices]


def _entry(prompt_set: PromptSet, drafts: int, served: Served, alone: Served, simulation: Simulation) -> dict[str, Any]:
    counters = served.counters
    assert counters is not None
    simulated = simulation.at(drafts) if prompt_set.name == VALIDATION else None
    rates = counters.acceptance_by_position
    verdict = judge(rates, counters.num_drafts, simulated, misread=lambda: simulation.misread(drafts))
    return {
        "prompt_set": prompt_set.name,
        "num_prompts": len(prompt_set.prompts),
        "num_draft_tokens": drafts,
        "num_drafts": counters.num_drafts,
        "acceptance_length": counters.acceptance_length,
        "acceptance_by_position": rates,
        "simulated_acceptance_length": simulated.length if simulated else None,
        "simulated_acceptance_by_position": simulated.by_position if simulated else None,
        "agrees": verdict.agrees,
        "verdict": verdict.text,
        "output_tokens_per_second": {"with_draft": served.tokens_per_second, "without": alone.tokens_per_second},
    }


# ---- what is shown ---------------------------------------------------------------------------------------------------


def show(report: Mapping[str, Any]) -> None:
    """The tables of acceptance and of time per token, then the verdicts."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_acceptance_table(report["runs"]))
    console.print(_pace_table(report["pace"]))
    for entry in report["runs"]:
        level = logging.WARNING if entry["agrees"] is False else logging.INFO
        logger.log(level, "%s at %s: %s", entry["prompt_set"], entry["num_draft_tokens"], entry["verdict"])
    for dtype, found in report["greedy"].items():
        logger.info("greedy output in %s: %s", dtype, json.dumps(found))


def _acceptance_table(runs: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="served by vLLM", title_justify="left")
    for name in ("prompts", "draft tokens", "acceptance length", "by position", "simulated", "tokens/s", "without"):
        table.add_column(name)
    for entry in runs:
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
    return table


def _pace_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One row a setting; the fastest of each number of streams is marked."""
    streams = sorted({row["streams"] for row in rows})
    best = {n: min(row["milliseconds_per_token"] for row in rows if row["streams"] == n) for n in streams}
    table = Table(title=f"milliseconds a token ({rows[0]['prompt_set']}; * is the fastest)", title_justify="left")
    for name in ("draft tokens", *(f"{n} stream{'s' * (n > 1)}" for n in streams)):
        table.add_column(name)
    for drafts in sorted({row["num_draft_tokens"] for row in rows}):
        mine = {row["streams"]: row for row in rows if row["num_draft_tokens"] == drafts}
        cells = [
            f"{mine[n]['milliseconds_per_token']:.1f} ({mine[n]['speedup']:.2f}x)"
            + " *" * (mine[n]["milliseconds_per_token"] == best[n])
            for n in streams
        ]
        table.add_row(str(drafts) if drafts else "none", *cells)
    return table


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import", dest="export.import_dir", metavar="DIR", help="take a public EAGLE-3 draft from DIR, checked"
    )


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
    add_flags=_add_flags,
)


def main(argv: Sequence[str] | None = None) -> int:
    return run_stage(STAGE, argv)


if __name__ == "__main__":
    sys.exit(main())
