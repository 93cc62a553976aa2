"""Stage 4: train the draft with speculators' Trainer.

Reads   samples/, hidden_states/, vocab_mapping/, the verifier's embeddings, head and final norm
Writes  checkpoints/: one directory an epoch, checkpoint_best, training_log.jsonl (and manifest.json)
Run     python 04_train.py --config configs/smollm2_135m.yaml
        torchrun --nproc-per-node 8 04_train.py --config configs/X.yaml    (several hosts: --nnodes, --rdzv-endpoint)
Takes   SmolLM2-135M's draft on two cores: about 2,500 tokens/s; a checkpoint is the draft in bf16, the newest has
        12 bytes more for each trainable weight

Before step 1 the verifier's head over the stored last hidden states must explain the text (common/target_check.py),
else nothing is trained. Killed or interrupted, the same command continues from the newest checkpoint, bit for bit.

A corpus larger than the disk goes in rounds: one run directory a part, each with train.continue_from naming the one
before and the same train.total_steps, so that weights, optimiser and schedule go on. The map must be the same:
03_build_vocab_mapping.py --import FIRST/vocab_mapping.
"""

import importlib.util
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from speculators.losses import resolve_loss_config

from common import checkpoints
from common.config import Config
from common.draft import (
    build_draft,
    check_earlier_draft,
    check_verifier_layer,
    read_earlier_mapping,
    start_from_verifier_layer,
)
from common.errors import PipelineError, Problems
from common.files import format_bytes, format_count
from common.hidden_states import HiddenStates, HiddenStatesDir, open_hidden_states
from common.manifest import Manifest, read_manifest, require_fingerprints, require_same
from common.packing import SplitRows
from common.samples import Samples, open_samples
from common.stage import Outcome, Stage, run_stage
from common.target_check import check_targets, target_problem
from common.trainer import TrainingResult, start_distributed, stop_distributed, train_draft
from common.verifier import Verifier, VerifierHead, check_weight_files, load_head, load_layer, open_verifier
from common.vocab_mapping import VocabMapping, open_vocab_mapping

logger = logging.getLogger("pipeline")
SCALE_SAMPLES = 8  # samples that say how large the aux states are
LOGGER_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}


@dataclass(frozen=True)
class TrainInputs:
    """What `check` opened. `mapping` is the one that the draft gets: the earlier draft's after a warm start."""

    samples: Samples
    states: HiddenStatesDir
    mapping: VocabMapping
    verifier: Verifier
    parents: Mapping[str, Manifest]
    warm_map: bool

    @property
    def fingerprints(self) -> Mapping[str, str]:
        # A warm start may bring another map than vocab_mapping/ holds; then its fingerprint has a name of its own.
        key = "warm_start_vocab_mapping" if self.warm_map else "vocab_mapping"
        aux = self.states.manifest.fingerprints
        given = {"aux_layer_ids": aux["aux_layer_ids"]} if "aux_layer_ids" in aux else {}
        return {**self.verifier.fingerprints, **given, key: self.mapping.fingerprint}

    def rows(self, split: str) -> SplitRows:
        """The samples of a split; those without a supervised token inside the pack would train nothing."""
        samples = self.samples
        chosen = [i for i in samples.indices_of(split) if samples.num_supervised[i] > 0]
        return SplitRows(self.states.load, chosen, [int(samples.num_tokens[i]) for i in chosen])


def check(config: Config) -> TrainInputs:
    """Open all inputs, check that they belong together and that the settings make sense; gather every problem."""
    problems = Problems()
    samples = states = verifier = mapping = vocab_manifest = None
    with problems.collect():
        samples = open_samples(config.run.dir)
    with problems.collect():
        states = open_hidden_states(config.run.dir)
    with problems.collect():
        vocab_manifest, mapping = open_vocab_mapping(config.run.dir)
    with problems.collect():
        verifier = open_verifier(config.verifier)
        check_weight_files(verifier, whole=False)
    parents = _parents(samples, states, vocab_manifest)
    require_same(problems, parents)
    if verifier:
        require_fingerprints(problems, parents, verifier.fingerprints)
    check_settings(problems, config)
    if samples and states and mapping and verifier:
        _check_shapes(problems, config, samples, states, mapping, verifier)
        with problems.collect():
            own, mapping = mapping, _winning_mapping(config, mapping, verifier)
            warm_map = mapping.fingerprint != own.fingerprint
    if verifier and config.train.init_verifier_layer is not None:
        with problems.collect():
            load_layer(verifier, config.train.init_verifier_layer)
            check_verifier_layer(config.draft, verifier)
    with problems.collect():
        parents |= _round_before(problems, config, parents)
    problems.raise_if_any()
    assert samples and states and mapping and verifier
    return TrainInputs(samples, states, mapping, verifier, parents, warm_map)


def _parents(samples: Samples | None, states: HiddenStatesDir | None, vocab: Manifest | None) -> dict[str, Manifest]:
    found = {
        "samples": samples.manifest if samples else None,
        "hidden_states": states.manifest if states else None,
        "vocab_mapping": vocab,
    }
    return {name: manifest for name, manifest in found.items() if manifest is not None}


def _check_shapes(
    problems: Problems,
    config: Config,
    samples: Samples,
    states: HiddenStatesDir,
    mapping: VocabMapping,
    verifier: Verifier,
) -> None:
    """Sizes that must agree between the artifacts, the YAML and the verifier."""
    run_dir, draft = config.run.dir, config.draft
    if not draft.hidden_size == verifier.hidden_size == states.hidden_size:
        what = f"{draft.hidden_size}; the verifier has {verifier.hidden_size}, the stored states {states.hidden_size}"
        problems.add("draft.hidden_size", what, f"set draft.hidden_size to {verifier.hidden_size}")
    if mapping.vocab_size != verifier.vocab_size:
        what = f"{run_dir}/vocab_mapping maps {mapping.vocab_size} tokens, the verifier has {verifier.vocab_size}"
        problems.add("vocabulary map", what, "run 03_build_vocab_mapping.py --overwrite")
    if mapping.size != config.vocab.size and not config.train.init_from:
        what = f"{run_dir}/vocab_mapping was built for {mapping.size}, the configuration says {config.vocab.size}"
        fix = f"set vocab.size to {mapping.size}, or run 03_build_vocab_mapping.py --overwrite"
        problems.add("vocab.size", what, fix)
    if states.aux_layer_ids != config.extract.aux_layer_ids:
        what = f"{config.extract.aux_layer_ids}; the stored states are of {states.aux_layer_ids}"
        problems.add("extract.aux_layer_ids", what, "set it to what was extracted, or extract again")
    if len(states) != len(samples):
        what = f"{len(states)} samples have states, {run_dir}/samples holds {len(samples)}"
        problems.add("hidden states", what, "run 02_extract_hidden_states.py")
    if not samples.num_supervised[samples.indices_of("train")].any():
        problems.add("samples", "the training split has no supervised token", "see prepare.val_fraction")
    if config.train.early_stop and not samples.indices_of("val"):
        problems.add("train.early_stop", "there is no validation split to judge by", "set prepare.val_fraction above 0")


def check_settings(problems: Problems, config: Config) -> None:
    """Settings that can't work or would be ignored."""
    draft, train = config.draft, config.train
    if draft.num_attention_heads % draft.num_key_value_heads:
        what = f"{draft.num_attention_heads} query heads don't divide into {draft.num_key_value_heads} key heads"
        problems.add("draft.num_key_value_heads", what, "choose a divisor of draft.num_attention_heads")
    if draft.norm_before_fc and draft.fc_norm:
        problems.add("draft.fc_norm", "excludes draft.norm_before_fc", "set one of them to false")
    if train.init_from and train.continue_from:
        problems.add("train.init_from", "excludes train.continue_from, which brings its own weights", "unset one")
    if train.init_verifier_layer is not None and (train.init_from or train.continue_from):
        what = "excludes train.init_from and train.continue_from, which bring their own weights"
        problems.add("train.init_verifier_layer", what, "unset one")
    if train.continue_from and not train.total_steps:
        what = "rounds need one schedule, and a round can't know how many steps the others take"
        problems.add("train.total_steps", what, "set it to the optimiser steps of all rounds, alike in each")
    if train.fsdp:
        what = "checkpoints are written by the first rank, which under FSDP holds a part of the weights only"
        problems.add("train.fsdp", what, "set it to false; a draft of one layer fits on each card")
    try:
        resolve_loss_config(train.loss if isinstance(train.loss, str) else json.dumps(train.loss), "eager")
    except ValueError as error:
        problems.add("train.loss", str(error), "name one of them, or give {name: weight}")
    for name in train.loggers:
        if importlib.util.find_spec(LOGGER_PACKAGES[name]) is None:
            problems.add(
                "train.loggers", f"{name} is not installed", f"pip install {LOGGER_PACKAGES[name]}, or drop it"
            )


def _winning_mapping(config: Config, mapping: VocabMapping, verifier: Verifier) -> VocabMapping:
    """The map of the earlier draft after a warm start, since its head's rows stand for those tokens."""
    if not config.train.init_from:
        return mapping
    check_earlier_draft(config.train.init_from, config.draft, config.extract.aux_layer_ids)
    earlier = read_earlier_mapping(config.train.init_from, verifier.vocab_size)
    if earlier.fingerprint != mapping.fingerprint:
        logger.warning(
            "train.init_from: the map of %s (%d tokens) takes the place of vocab_mapping/ (%d tokens)",
            config.train.init_from,
            earlier.size,
            mapping.size,
        )
    return earlier


def _round_before(problems: Problems, config: Config, parents: Mapping[str, Manifest]) -> dict[str, Manifest]:
    """The manifest of the round that this one continues, which must have the same verifier, layers and map."""
    before = config.train.continue_from
    if not before:
        return {}
    manifest = read_manifest(before / checkpoints.DIR_NAME, "04_train")
    shared = {name: parent for name, parent in parents.items() if name != "samples"}
    for key in sorted(manifest.fingerprints):
        if any(
            parent.fingerprints.get(key, manifest.fingerprints[key]) != manifest.fingerprints[key]
            for parent in shared.values()
        ):
            what = f"{before} was trained with another {key}"
            problems.add("train.continue_from", what, "import its map with 03 --import; extract with the same verifier")
    changed = ("train.total_steps", "train.optimizer", "train.accumulation")
    for key in changed:
        now = getattr(config.train, key.removeprefix("train."))
        if manifest.settings.get(key) != now:
            what = f"{now}; the round before had {manifest.settings.get(key)}"
            problems.add(key, what, "keep it the same in every round")
    return {"round_before": manifest}


def estimate(config: Config, inputs: TrainInputs) -> dict[str, str]:
    """Rows of the --check table."""
    train, rows = config.train, inputs.rows("train")
    cut = sum(length > train.max_tokens_per_batch for length in rows.lengths)
    tokens = sum(min(length, train.max_tokens_per_batch) for length in rows.lengths)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    steps = max(1, tokens // (train.max_tokens_per_batch * train.accumulation * world))
    total = min(train.num_epochs * steps, train.max_steps or sys.maxsize)
    trainable = _count_trainable(config, inputs)
    frozen = inputs.verifier.vocab_size * config.draft.hidden_size + inputs.mapping.size * config.draft.hidden_size
    return {
        "training samples": f"{len(rows.indices)}, {format_count(tokens)} tokens"
        + (f"; {cut} are cut to {train.max_tokens_per_batch}" if cut else ""),
        "optimiser steps": f"about {format_count(total)}, {format_count(steps)} an epoch",
        "trainable weights": format_count(trainable),
        "disk": f"{format_bytes(2 * (trainable + frozen))} an epoch, {format_bytes(12 * trainable)} for continuing",
    }


def _count_trainable(config: Config, inputs: TrainInputs) -> int:
    """Trainable weights of the draft, norms left out."""
    d, attention = config.draft, config.draft.num_attention_heads * config.draft.head_dim
    keys = 2 * d.num_key_value_heads * d.head_dim
    first, later = 2 * d.hidden_size * (attention + keys), d.hidden_size * (attention + keys)
    rest = attention * d.hidden_size + 3 * d.hidden_size * d.intermediate_size
    layers = first + rest + (d.num_hidden_layers - 1) * (later + rest)
    head = inputs.mapping.size * d.hidden_size if config.train.train_head else 0
    return len(inputs.states.aux_layer_ids) * d.hidden_size**2 + layers + head


def run(config: Config, inputs: TrainInputs, out_dir: Path) -> Outcome:
    """Check the targets, build the draft, train it; on a signal everything is saved and the status is 130."""
    start_distributed()
    try:
        head = load_head(inputs.verifier)
        refuse_wrong_targets(config, inputs, head)
        model = build_draft(
            config.draft,
            config.train,
            mapping=inputs.mapping,
            weights=head,
            verifier_path=str(inputs.verifier.path),
            aux_layer_ids=inputs.states.aux_layer_ids,
            seed=config.run.seed,
        )
        if config.train.init_verifier_layer is not None:
            layer = load_layer(inputs.verifier, config.train.init_verifier_layer)
            indices = inputs.rows("train").indices[:SCALE_SAMPLES]
            start_from_verifier_layer(
                model, layer, head.norm, [torch.cat(inputs.states.load(i).aux, 1) for i in indices]
            )
        del head
        result = train_draft(
            model, config.train, inputs.rows("train"), inputs.rows("val"), out_dir=out_dir, seed=config.run.seed
        )
    finally:
        stop_distributed()
    if result.interrupted:
        raise KeyboardInterrupt
    return Outcome(
        counts=_counts(inputs, result),
        outputs=checkpoints.list_outputs(out_dir),
    )


def refuse_wrong_targets(config: Config, inputs: TrainInputs, head: VerifierHead) -> None:
    """The target check (common/target_check.py).

    Raises:
        PipelineError: the head doesn't explain the text, with what is likely wrong.
    """
    settings = inputs.samples.manifest.settings if inputs.samples.manifest else {}
    greedy = bool(settings.get("generate.enabled")) and settings.get("generate.temperature") == 0
    with torch.no_grad():
        found = check_targets(_check_samples(inputs, config.train.max_unreadable_samples), head)
    problem = target_problem(
        found,
        min_agreement=config.train.min_target_agreement if greedy else None,
        max_excess=config.train.max_target_excess,
    )
    if problem:
        raise PipelineError(problem)
    logger.info(
        "targets: %.1f%% of %d next tokens predicted, %.2f nats a token above the head's entropy",
        100 * found.agreement,
        found.num_tokens,
        found.excess,
    )


def _check_samples(inputs: TrainInputs, tolerance: int) -> Iterator[HiddenStates]:
    """Held-out samples first, spread evenly, then training ones; training itself counts those that can't be read."""
    for split in ("val", "train"):
        indices = inputs.rows(split).indices
        for index in indices[:: max(1, len(indices) // 32)]:
            try:
                yield inputs.states.load(index)
            except PipelineError:
                if not tolerance:
                    raise


def _counts(inputs: TrainInputs, result: TrainingResult) -> dict[str, Any]:
    part = {
        "samples": inputs.parents["samples"].digest,
        "hidden_states": inputs.parents["hidden_states"].digest,
        "num_samples": len(inputs.samples),
        "steps_at_end": result.position.steps,
        "tokens_at_end": result.position.tokens,
    }
    before = inputs.parents["round_before"].counts["parts"] if "round_before" in inputs.parents else []
    metrics = {name.removesuffix("_epoch"): round(value, 6) for name, value in result.best_metrics.items()}
    return {
        "steps": result.position.steps,
        "tokens": result.position.tokens,
        "best_epoch": result.best if result.best is not None else -1,
        "acceptance_length": metrics.get("acceptance_length"),
        "skipped_steps": result.position.skipped,
        "unreadable_samples": result.unreadable,
        "stopped_early": result.stopped_early,
        "best_metrics": metrics,
        "parts": [*before, part],
    }


STAGE = Stage(
    script="04_train",
    output=checkpoints.DIR_NAME,
    sections=("draft", "train"),
    description=__doc__ or "",
    check=check,
    estimate=estimate,
    run=run,
    next_script="05_convert_checkpoint",
    owns=checkpoints.OWNED,
)


def main(argv: list[str] | None = None) -> int:
    return run_stage(STAGE, argv)


if __name__ == "__main__":
    sys.exit(main())
