"""Stage 2: the verifier's hidden states at every token of every sample.

reads   samples/, the verifier (loaded by vLLM)
writes  hidden_states/data_N.pt, ledger.jsonl, manifest.json
run     python 02_extract_hidden_states.py --config configs/X.yaml
takes   a prefill of all tokens; SmolLM2-135M on two cores about 1,500 tokens/s and 4,617 bytes a token, Kimi-K2.5
        57,353 bytes a token (--check prints the table)

One request a sample; vLLM's worker writes the file (common/connector.py), this process counts, checks the canary and
watches the disk. A sample is done when the ledger says so: after a kill the same command goes on with the rest.
"""

import argparse
import json
import logging
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import engine
from common import hidden_states as states
from common.config import Config, Invocation
from common.errors import PipelineError, Problem, Problems, some
from common.files import format_bytes, format_count, format_duration, free_bytes
from common.hidden_states import LedgerEntry
from common.manifest import MANIFEST_NAME, Manifest
from common.progress import Progress, read_progress
from common.samples import Samples, open_samples
from common.stage import Outcome, Stage, run_stage
from common.verifier import Verifier, VerifierHead, check_weight_files, load_head, open_verifier

logger = logging.getLogger("pipeline")
# Written but not yet seen in the ledger: bounds the memory of the worker where the disk is slower than the prefill.
MAX_UNWRITTEN = 128
FIRST_CANARIES = 8
STALLED_SECONDS = 300.0
DISK_CHECK_SECONDS = 2.0
DEEP_CHECKED = 64  # entries at the end of the ledger whose files are re-read on resume; a power cut can hit only these


@dataclass(frozen=True)
class Inputs:
    samples: Samples
    verifier: Verifier
    parents: Mapping[str, Manifest]
    fingerprints: Mapping[str, str]


def check(config: Config) -> Inputs:
    """Opens samples and verifier. Raises: PipelineError with every problem."""
    problems = Problems()
    samples = verifier = None
    with problems.collect():
        samples = open_samples(config.run.dir)
    with problems.collect():
        verifier = open_verifier(config.verifier)
        check_weight_files(verifier, whole=True)
    with problems.collect():
        engine.check_can_extract()
    problems.raise_if_any()
    assert samples and verifier and samples.manifest
    _check_layers(problems, config.extract.aux_layer_ids, verifier)
    for key, value in verifier.fingerprints.items():
        if samples.manifest.fingerprints.get(key, value) != value:
            what = f"the samples were made with another {key.replace('_', ' ')}"
            problems.add("verifier.path", what, "use that verifier, or run 01_prepare_data.py --overwrite")
    if config.extract.endpoint:
        what = "is not supported by this version, the states come from vLLM in this process"
        problems.add("extract.endpoint", what, "leave it unset")
    part, parts = shard_of(config)
    if not 1 <= part <= parts:
        problems.add("extract.shard", f"there is no part {part} of {parts}", "use 1/N to N/N")
    problems.raise_if_any()
    layers = ",".join(str(i) for i in [*config.extract.aux_layer_ids, verifier.num_layers])
    fingerprints = verifier.fingerprints | {"aux_layer_ids": layers}
    return Inputs(samples, verifier, {"samples": samples.manifest}, fingerprints)


def _check_layers(problems: Problems, ids: Sequence[int], verifier: Verifier) -> None:
    last, where = verifier.num_layers, "extract.aux_layer_ids"
    if last in ids:
        problems.add(where, f"{last} is the last layer, which is added by itself", f"remove {last}")
    outside = [i for i in ids if not 0 <= i <= last]
    if outside:
        problems.add(where, f"the verifier has {last} layers, found {some(outside)}", f"use ids from 0 to {last - 1}")
    if list(ids) != sorted(set(ids)) or not ids:
        problems.add(where, f"{list(ids)} is not ascending, or has repeats, or is empty", "for example [2, 30, 58]")
    # Both families choose the states after 2, half and all but 3 of the layers; SGLang and SpecForge name the layer
    # that gives the state, one lower. Nobody chooses those three otherwise.
    usual = [2, last // 2, last - 3]
    if last > 6 and list(ids) == [i - 1 for i in usual]:
        what = f"{list(ids)} is how SGLang counts; here i is the state after i layers"
        problems.add(where, what, f"set it to {usual}: every id one higher")


def shard_of(config: Config) -> tuple[int, int]:
    part, parts = config.extract.shard.split("/")
    return int(part), int(parts)


def estimate(config: Config, inputs: Inputs) -> dict[str, str]:
    tokens = int(inputs.samples.num_tokens.sum())
    slots, hidden = len(config.extract.aux_layer_ids) + 1, inputs.verifier.hidden_size
    needed = {d: tokens * states.bytes_per_token(slots, hidden, d) for d in ("bfloat16", "float8_e4m3fn")}
    progress = read_progress(config.run.dir / states.DIR_NAME)
    rate = progress["rate"] if progress else 0.0
    return {
        "samples": format_count(len(inputs.samples)),
        "tokens": format_count(tokens),
        "bytes in bfloat16": format_bytes(needed["bfloat16"]),
        "bytes in float8_e4m3fn": format_bytes(needed["float8_e4m3fn"]),
        "free on the disk": format_bytes(free_bytes(config.run.dir)),
        "time": format_duration(tokens / rate) if rate else "known after the first minute of the run",
        "shard": config.extract.shard,
    }


def run(config: Config, inputs: Inputs, out_dir: Path) -> Outcome:
    """Extracts what the ledger doesn't hold yet."""
    part, parts = shard_of(config)
    mine = [i for i in range(len(inputs.samples)) if i % parts == part - 1]
    ledger = states.ledger_path(out_dir, (part, parts))
    done = find_done(out_dir, ledger, inputs.samples)
    todo = [i for i in mine if i not in done]
    if todo:
        states.faults_path(ledger).unlink(missing_ok=True)
        states.write_sorted_ledger(ledger, done.values())
        logger.info("%s of %s samples are done, extracting %s", len(done), len(mine), len(todo))
        _check_space(config, inputs, out_dir, todo)
        canary = _extract(config, inputs, out_dir, ledger, todo)
        done = states.read_ledger(ledger)
    else:
        canary = Canary(None)
    states.write_sorted_ledger(ledger, done.values())
    return Outcome(
        counts={
            "samples": len(done),
            "tokens": sum(entry.tokens for entry in done.values()),
            "bytes": sum(entry.bytes for entry in done.values()),
            "hidden_size": inputs.verifier.hidden_size,
            "canaries": canary.asked,
            "canary_agreement": canary.agreement,
        },
        outputs=[ledger],
        complete=parts == 1,
    )


def find_done(out_dir: Path, ledger: Path, samples: Samples) -> dict[int, LedgerEntry]:
    """Ledger entries that belong to these samples and whose files are there; the last few are re-read."""
    entries = states.read_ledger(ledger)
    recent = set(list(entries)[-DEEP_CHECKED:])
    return {
        index: entry
        for index, entry in entries.items()
        if index < len(samples)
        and samples.sample_ids[index] == entry.sample_id
        and states.is_intact(out_dir, entry, deep=index in recent)
    }


def _check_space(config: Config, inputs: Inputs, out_dir: Path, todo: Sequence[int]) -> None:
    slots = len(config.extract.aux_layer_ids) + 1
    a_token = states.bytes_per_token(slots, inputs.verifier.hidden_size, config.extract.dtype)
    needed = int(inputs.samples.num_tokens[list(todo)].sum()) * a_token
    free = free_bytes(out_dir) - config.extract.min_free_bytes
    if needed > free:
        what = f"{format_bytes(needed)} are needed, {format_bytes(max(free, 0))} can be used on {out_dir}"
        fix = "free some space, set extract.dtype: float8_e4m3fn, or take fewer samples and train in rounds"
        raise PipelineError(Problem("disk", what, fix))


# ---- the work --------------------------------------------------------------------------------------------------------


def _extract(config: Config, inputs: Inputs, out_dir: Path, ledger: Path, todo: Sequence[int]) -> "Canary":
    speculative, kv_transfer = engine.extraction_settings(
        config.extract.aux_layer_ids,
        inputs.verifier.num_layers,
        samples_path=inputs.samples.path.resolve(),
        out_dir=out_dir.resolve(),
        dtype=config.extract.dtype,
        ledger=ledger.resolve(),
    )
    options = engine.options_for(
        config.verifier,
        inputs.verifier.path,
        max_model_len=int(inputs.samples.num_tokens.max()) + 1,
        max_num_seqs=config.extract.max_num_seqs,
        max_num_batched_tokens=config.extract.max_num_batched_tokens,
        speculative=speculative,
        kv_transfer=kv_transfer,
        log_path=config.run.dir / "logs" / f"{states.DIR_NAME}.vllm.log",
    )
    canary = Canary(load_head(inputs.verifier), config.extract.min_canary_agreement)
    llm = engine.start_llm(options)
    try:
        _stream(llm, config, inputs, out_dir, ledger, todo, canary)
    finally:
        engine.stop_llm(llm)
    return canary


def _stream(
    llm: Any, config: Config, inputs: Inputs, out_dir: Path, ledger: Path, todo: Sequence[int], canary: "Canary"
) -> None:
    chosen = choose_canaries(todo, config.extract.canary_share, config.run.seed)
    said: dict[int, int] = {}
    watch = Watch(out_dir, ledger, config.extract.min_free_bytes)
    total = int(inputs.samples.num_tokens[list(todo)].sum())
    requests = (
        engine.extraction_request(i, inputs.samples[i].input_ids.tolist(), (out_dir / f"data_{i}.pt").resolve())
        for i in todo
    )
    with Progress(out_dir, total=total, desc="extract", unit="tokens") as bar:

        def settle(max_unwritten: int) -> None:
            for entry in watch.wait_until(max_unwritten):
                bar.update(entry.tokens, bytes=watch.bytes)
                if entry.index in said:
                    canary.ask(states.data_path(out_dir, entry.index), said.pop(entry.index))

        for key, output in engine.stream_requests(llm, requests, max_in_flight=2 * config.extract.max_num_seqs):
            if int(key) in chosen:
                said[int(key)] = output.outputs[0].token_ids[0]
            watch.unwritten += 1
            settle(MAX_UNWRITTEN)
        settle(0)
    canary.judge(final=True)


def choose_canaries(todo: Sequence[int], share: float, seed: int) -> set[int]:
    """The first few, so that a wrong layer stops the run at once, and some at random on the way."""
    drawn = random.Random(seed)
    return set(todo[:FIRST_CANARIES]) | {i for i in todo if drawn.random() < share}


@dataclass
class Watch:
    """Follows what the worker writes: the ledger's new lines, the faults, and the space left."""

    out_dir: Path
    ledger: Path
    min_free_bytes: int
    unwritten: int = 0  # finished by the engine, not yet in the ledger
    bytes: int = 0
    _offset: int = field(init=False)
    _looked: float = 0.0

    def __post_init__(self) -> None:
        self._offset = self.ledger.stat().st_size if self.ledger.exists() else 0

    def wait_until(self, max_unwritten: int) -> Iterator[LedgerEntry]:
        """Yields new entries until at most `max_unwritten` finished samples are missing from the ledger.

        Raises: PipelineError for what the worker reported, for a disk that is nearly full, and for a stall.
        """
        progressed = time.monotonic()
        while True:
            self._raise_faults()
            self._check_disk()
            for entry in self._new_entries():
                self.unwritten -= 1
                self.bytes += entry.bytes
                progressed = time.monotonic()
                yield entry
            if self.unwritten <= max_unwritten:
                return
            if time.monotonic() - progressed > STALLED_SECONDS:
                what = f"{self.unwritten} samples were computed and not written for {STALLED_SECONDS:.0f} s"
                raise PipelineError(Problem(str(self.out_dir), what, "see logs/hidden_states.vllm.log, then run again"))
            time.sleep(0.01)

    def _new_entries(self) -> Iterator[LedgerEntry]:
        if not self.ledger.exists():
            return
        with self.ledger.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        yield from (LedgerEntry(**json.loads(line)) for line in whole.splitlines())

    def _raise_faults(self) -> None:
        faults = states.read_faults(states.faults_path(self.ledger))
        if not faults:
            return
        kinds = {fault["kind"] for fault in faults}
        fix = "free some space, then run the same command: it resumes" if "disk_full" in kinds else ""
        fix = fix or "nothing of these samples was written; check the verifier and the version of vLLM"
        raise PipelineError(*[Problem(str(self.out_dir / f["file"]), f["what"], fix) for f in faults[:3]])

    def _check_disk(self) -> None:
        if time.monotonic() - self._looked < DISK_CHECK_SECONDS:
            return
        self._looked = time.monotonic()
        left = free_bytes(self.out_dir)
        if left < self.min_free_bytes:
            what = f"{format_bytes(left)} left, less than extract.min_free_bytes; what is written stays"
            raise PipelineError(Problem(str(self.out_dir), what, "free some space, then run the same command"))


class Canary:
    """argmax(head(norm(last hidden state of the last token))) must be the engine's own greedy next token.

    A wrong last layer, a norm applied twice or states of another request fail at once; bf16 near ties flip one
    answer in a thousand (99.86% of 700 agreed on SmolLM2-135M).
    """

    def __init__(self, head: VerifierHead | None, min_agreement: float = 0.9) -> None:
        self._head, self._min_agreement = head, min_agreement
        self.asked = self.agreed = 0

    @property
    def agreement(self) -> float:
        return self.agreed / self.asked if self.asked else 1.0

    def ask(self, path: Path, said: int) -> None:
        assert self._head is not None
        last = states.load_hidden_states(path).last[-1:]
        self.asked += 1
        self.agreed += int(self._head.logits(last).argmax()) == said
        self.judge(final=False)

    def judge(self, *, final: bool) -> None:
        """Raises: PipelineError when too few agree, after the first few and at the end."""
        if self.asked and (final or self.asked >= FIRST_CANARIES) and self.agreement < self._min_agreement:
            what = f"the last hidden state says what the verifier says for {self.agreed} of {self.asked} samples"
            fix = "these are not the states before the final norm of this verifier: check the layer ids, the version"
            fix += " of vLLM and the weights; remove what is there with --overwrite"
            raise PipelineError(Problem("hidden states", what, fix))


# ---- other commands --------------------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verify", action="store_true", help="re-read every file against the ledger, then stop")
    parser.add_argument("--merge", action="store_true", help="join the ledgers of all shards, then finish the artifact")


def instead(invocation: Invocation, inputs: Inputs) -> int | None:
    out_dir = invocation.config.run.dir / states.DIR_NAME
    if invocation.flags.verify:
        return verify(out_dir, inputs.samples)
    if invocation.flags.merge:
        merge(out_dir, inputs.samples)
        return None
    shards = sorted(out_dir.glob("ledger.*-of-*.jsonl"))
    if shard_of(invocation.config) == (1, 1) and shards:
        what = f"other runs shared the work: {some([path.name for path in shards])}"
        raise PipelineError(Problem(str(out_dir), what, "join them with --merge, or go on with --extract.shard"))
    return None


def verify(out_dir: Path, samples: Samples) -> int:
    """Strikes damaged samples from the ledger, and the manifest with them, so that the next run redoes them.

    Raises: PipelineError naming the damaged files.
    """
    ledger = states.ledger_path(out_dir)
    entries = states.read_ledger(ledger)
    good = {
        i: e
        for i, e in entries.items()
        if i < len(samples) and e.sample_id == samples.sample_ids[i] and states.is_intact(out_dir, e, deep=True)
    }
    damaged = sorted(entries.keys() - good.keys())
    if damaged:
        (out_dir / MANIFEST_NAME).unlink(missing_ok=True)
        states.write_sorted_ledger(ledger, good.values())
        names = some([f"data_{i}.pt" for i in damaged])
        what = f"{len(damaged)} of {len(entries)} files are missing, damaged or of other samples: {names}"
        raise PipelineError(Problem(str(out_dir), what, "run 02_extract_hidden_states.py again, it redoes these"))
    logger.info("%s: all %s files are as the ledger says", out_dir, format_count(len(entries)))
    return 0


def merge(out_dir: Path, samples: Samples) -> None:
    """Joins `ledger.*-of-*.jsonl` into ledger.jsonl. Raises: PipelineError when samples are missing from them."""
    joined: dict[int, LedgerEntry] = {}
    for path in sorted(out_dir.glob("ledger*.jsonl")):
        joined |= find_done(out_dir, path, samples)
    missing = [i for i in range(len(samples)) if i not in joined]
    if missing:
        what = f"{len(missing)} of {len(samples)} samples are in no ledger: {some(missing)}"
        raise PipelineError(Problem(str(out_dir), what, "run the missing shards, or copy their files and ledger here"))
    states.write_sorted_ledger(states.ledger_path(out_dir), joined.values())
    for path in out_dir.glob("ledger.*-of-*.jsonl"):
        path.unlink()


STAGE = Stage(
    script="02_extract_hidden_states",
    output=states.DIR_NAME,
    sections=("verifier", "extract"),
    description=__doc__,
    check=check,
    estimate=estimate,
    run=run,
    owns=states.OWNED,
    next_script="03_build_vocab_mapping",
    add_flags=add_flags,
    instead=instead,
    lock_name=lambda config: f"{states.DIR_NAME}.{config.extract.shard.replace('/', '-of-')}",
)


def main(argv: Sequence[str] | None = None) -> int:
    return run_stage(STAGE, argv)


if __name__ == "__main__":
    sys.exit(main())
