"""Stage 3: choose the verifier tokens that the draft can produce.

Reads   samples/
Writes  vocab_mapping/: t2d.pt, d2t.pt, token_freq.pt (and manifest.json)
Run     python 03_build_vocab_mapping.py --config configs/smollm2_135m.yaml [--import DIR]
Takes   a second for a million tokens, and 9 bytes a verifier token plus 8 a draft token on disk

Counts supervised tokens of the training split. Forced tokens come first (the verifier's stop tokens, think and tool
tags, vocab.forced_tokens, every special token that is supervised), then the most frequent, equal counts by id; what
is still free is filled with the lowest unused ids and counted as filled.
"""

import argparse
import logging
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from common.config import Config
from common.errors import PipelineError, Problem, Problems, some
from common.files import format_bytes, format_count
from common.manifest import Manifest, require_fingerprints
from common.samples import Samples, open_samples
from common.stage import Outcome, Stage, run_stage
from common.verifier import Verifier, control_token_ids, load_tokenizer, open_verifier
from common.vocab_mapping import (
    COUNTED_COLUMNS,
    DIR_NAME,
    FILES,
    Coverage,
    TokenCounts,
    VocabMapping,
    build_vocab_mapping,
    count_filled,
    count_tokens,
    coverages,
    frequencies,
    import_vocab_mapping,
    most_frequent_left_out,
    write_vocab_mapping,
)

logger = logging.getLogger("pipeline")
REPORTED_SIZES = (4096, 8192, 16384, 32768, 65536)
LEFT_OUT_SHOWN = 10
# Control tokens that a served answer can hold even where the corpus never shows them: ends of a turn, and the tags
# of reasoning and tool calls, as Kimi, Qwen, Llama, Gemma, DeepSeek, gpt-oss and ChatML spell them.
ALWAYS_FORCED = re.compile(
    r"think|tool|im_end|eot|eom|eos|end_of_(turn|text|sentence)|endoftext|<\|(end|return|call)\|>|^</s>$", re.I
)


@dataclass(frozen=True)
class VocabInputs:
    """What `check` opened. `imported` is the map of --import, and whether its d2t had the older form."""

    samples: Samples
    verifier: Verifier
    tokenizer: Any
    forced: dict[str, int]
    imported: tuple[VocabMapping, bool] | None

    @property
    def parents(self) -> Mapping[str, Manifest]:
        assert self.samples.manifest is not None
        return {"samples": self.samples.manifest}

    @property
    def fingerprints(self) -> Mapping[str, str]:
        given = {"imported_map": self.imported[0].fingerprint} if self.imported else {}
        return {**self.verifier.fingerprints, **given}


def check(config: Config) -> VocabInputs:
    """Open the samples, the verifier's tokenizer and, with --import, the map; gather every problem."""
    problems = Problems()
    samples = verifier = tokenizer = imported = None
    forced: dict[str, int] = {}
    with problems.collect():
        samples = open_samples(config.run.dir)
    with problems.collect():
        verifier = open_verifier(config.verifier)
        tokenizer = load_tokenizer(verifier)
        forced = forced_tokens(config.vocab.forced_tokens, verifier, tokenizer)
        if config.vocab.size > verifier.vocab_size:
            what = f"{config.vocab.size} is more than the verifier's vocabulary of {verifier.vocab_size}"
            problems.add("vocab.size", what, f"set vocab.size to {verifier.vocab_size} or less")
    with problems.collect():
        imported = import_vocab_mapping(config.vocab.import_dir) if config.vocab.import_dir else None
    if samples and samples.manifest and verifier:
        require_fingerprints(problems, {"samples": samples.manifest}, verifier.fingerprints)
    if imported and verifier:
        _check_imported(problems, imported[0], config, verifier)
    problems.raise_if_any()
    assert samples is not None and verifier is not None
    return VocabInputs(samples, verifier, tokenizer, forced, imported)


def forced_tokens(listed: list[str | int], verifier: Verifier, tokenizer: Any) -> dict[str, int]:
    """Tokens that are always in, by name: stop tokens, turn ends, think and tool tags, and those of the YAML.

    Raises:
        PipelineError: a listed token isn't one token of this tokenizer, or an id lies outside the vocabulary.
    """
    control = control_token_ids(verifier, tokenizer)
    forced = {n: i for n, i in control.items() if i in verifier.stop_token_ids or ALWAYS_FORCED.search(n)}
    problems = Problems()
    for token in listed:
        token_id = _token_id(token, tokenizer)
        if token_id is None:
            fix = "name one, or give its id"
            problems.add("vocab.forced_tokens", f"{token!r} is not a token of this tokenizer", fix)
        elif not 0 <= token_id < verifier.vocab_size:
            what = f"id {token_id} lies outside the verifier's vocabulary of {verifier.vocab_size}"
            problems.add("vocab.forced_tokens", what, "remove it")
        else:
            forced[str(token)] = token_id
    problems.raise_if_any()
    return forced


def _token_id(token: str | int, tokenizer: Any) -> int | None:
    """The id of a listed token; None when it isn't one. A flag brings ids as text, so digits that are no token count."""
    if isinstance(token, int):
        return token
    token_id = tokenizer.convert_tokens_to_ids(token)
    if token_id is not None and tokenizer.convert_ids_to_tokens(token_id) == token:
        return int(token_id)
    return int(token) if token.isdigit() else None


def _check_imported(problems: Problems, mapping: VocabMapping, config: Config, verifier: Verifier) -> None:
    if mapping.vocab_size != verifier.vocab_size:
        what = f"{config.vocab.import_dir} maps a vocabulary of {mapping.vocab_size}, the verifier has {verifier.vocab_size}"
        problems.add("vocab.import_dir", what, "it is another verifier's")
    if mapping.size != config.vocab.size:
        what = f"{config.vocab.import_dir} holds {mapping.size} draft tokens, vocab.size says {config.vocab.size}"
        problems.add("vocab.size", what, f"set vocab.size to {mapping.size}")


def estimate(config: Config, inputs: VocabInputs) -> dict[str, str]:
    """Rows of the --check table."""
    train = inputs.samples.num_supervised[inputs.samples.indices_of("train")].sum()
    size = 9 * inputs.verifier.vocab_size + 8 * config.vocab.size
    return {
        "supervised tokens, training split": format_count(int(train)),
        "draft vocabulary": f"{format_count(config.vocab.size)} of {format_count(inputs.verifier.vocab_size)}",
        "forced tokens": f"{len(inputs.forced)}: {some(list(inputs.forced), 6)}",
        "disk": format_bytes(size),
    }


def run(config: Config, inputs: VocabInputs, out_dir: Path) -> Outcome:
    """Count, choose (or import), write, report."""
    counts = count_tokens(inputs.samples.iter_batches(COUNTED_COLUMNS), inputs.verifier.vocab_size)
    if not frequencies(counts, "train").any():
        what = "the training split has no supervised token"
        raise PipelineError(
            Problem("samples", what, "see prepare.val_fraction and the loss mask of 01_prepare_data.py")
        )
    forced = inputs.forced | _supervised_control_tokens(counts, inputs)
    mapping = _choose(config, inputs, counts, forced)
    outputs = write_vocab_mapping(out_dir, mapping)
    rows = coverages(counts, [*REPORTED_SIZES, config.vocab.size], forced.values(), chosen=mapping)
    _print_report(mapping, rows, forced, inputs.tokenizer)
    chosen = next(row for row in rows if row.size == mapping.size)
    return Outcome(
        counts={
            "draft_vocab_size": mapping.size,
            "distinct_tokens": int(np.count_nonzero(frequencies(counts, "train"))),
            "forced_tokens": len(set(forced.values())),
            "filled_tokens": count_filled(mapping, forced.values()),
            **{f"coverage_{split}": round(share, 6) for split, share in chosen.by_split.items()},
            "coverage": {str(row.size): row.by_split for row in rows},
        },
        outputs=outputs,
        fingerprints={"vocab_mapping": mapping.fingerprint},
    )


def _supervised_control_tokens(counts: TokenCounts, inputs: VocabInputs) -> dict[str, int]:
    """Special tokens that stand under the mask in either split: an answer holds them, so a draft must know them."""
    seen = frequencies(counts, "train") + frequencies(counts, "val")
    control = control_token_ids(inputs.verifier, inputs.tokenizer)
    return {name: token_id for name, token_id in control.items() if token_id < len(seen) and seen[token_id]}


def _choose(config: Config, inputs: VocabInputs, counts: TokenCounts, forced: dict[str, int]) -> VocabMapping:
    if inputs.imported is None:
        return build_vocab_mapping(frequencies(counts, "train"), config.vocab.size, forced.values())
    mapping, was_absolute = inputs.imported
    form = "verifier ids (the older form), converted to offsets" if was_absolute else "offsets"
    logger.info("imported %s: d2t holds %s", config.vocab.import_dir, form)
    missing = [name for name, token_id in forced.items() if not mapping.t2d[token_id]]
    if missing:
        logger.warning("the imported map lacks %s: the draft can never produce them", some(missing, 6))
    return mapping


def _print_report(mapping: VocabMapping, rows: list[Coverage], forced: dict[str, int], tokenizer: Any) -> None:
    """Coverage by size, split and source, and the most frequent tokens that are left out, as text."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    sources = sorted({key for row in rows for key in row.by_source})
    table = Table(title="supervised tokens that the draft can produce", title_justify="left")
    for heading in ("K", *rows[0].by_split, *(f"{split}: {source}" for split, source in sources)):
        table.add_column(heading, justify="right")
    for row in rows:
        shares = [*row.by_split.values(), *(row.by_source[key] for key in sources)]
        mark = " *" if row.size == mapping.size else ""
        table.add_row(f"{row.size:,}{mark}", *(f"{share:.3%}" for share in shares))
    console.print(table)
    filled = count_filled(mapping, forced.values())
    console.print(f"* chosen; {len(set(forced.values()))} forced, {filled:,} filled with unused ids")
    left_out = most_frequent_left_out(mapping, LEFT_OUT_SHOWN)
    words = ", ".join(f"{tokenizer.decode([i])!r} {count:,}" for i, count in left_out)
    console.print(f"most frequent tokens left out: {words or 'none'}", markup=False, highlight=False)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import", dest="vocab.import_dir", metavar="DIR", help="take t2d, d2t and token_freq from DIR, validated"
    )


STAGE = Stage(
    script="03_build_vocab_mapping",
    output=DIR_NAME,
    sections=("vocab",),
    description=__doc__ or "",
    check=check,
    estimate=estimate,
    run=run,
    next_script="04_train",
    owns=FILES,
    resumable=False,
    add_flags=add_flags,
)


def main(argv: list[str] | None = None) -> int:
    return run_stage(STAGE, argv)


if __name__ == "__main__":
    sys.exit(main())
