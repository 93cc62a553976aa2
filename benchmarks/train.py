"""Stage 4's recipe against speculators' defaults, over the samples of a finished run.

    python -m benchmarks.train [--config configs/smollm2_135m.yaml] [--steps 8]

What "speculators' defaults" are: the configuration that its `train` command resolves for an EAGLE-3 draft of this
verifier when nothing else is said (0.9.0: Muon and AdamW at 1e-3, decay 1.0, sliding window, norm_before_fc and
norm_output on), its model built by its own code, its forward, its `Trainer`, its collate function and its packing.
Set for it are what the run fixes (data, vocabulary map, aux layers, epochs, seed, pack size), and what a CPU needs:
SDPA attention and the eager loss (flex attention has no backward there, the fused loss needs Triton), no worker
processes, and the device.

The two train in turn for some steps on the same packs; rates are tokens over wall time, from the end of one step to
the end of another, loading included. Then the defaults train for as long as the run's own training took: as many
steps as their rate, beside ours, allows, with their schedule over just these. Their checkpoints stay in DIR
(--keep); stage 5 serves them with --import. Takes about the time of the run's training and three minutes.
"""

import argparse
import contextlib
import copy
import importlib
import itertools
import json
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, shift_batch
from speculators.train import cli as library
from speculators.train.config import TrainConfig
from speculators.train.data import CollateFn
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from speculators.train.trainer import Trainer, TrainerConfig
from torch.utils.data import DataLoader

from benchmarks.record import Claim, alternating, claim_of, record, show
from common import checkpoints
from common.config import Config, DraftSection, load_config
from common.draft import DTYPES, SupervisedRowsEagle3, build_draft
from common.files import read_json
from common.packing import PackedStates, SplitRows, make_loader
from common.trainer import replaced, train_draft, training_device
from common.verifier import VerifierHead, load_head

stage = importlib.import_module("04_train")

ROUNDS, STEPS_A_ROUND, WARM_UP, LOSS_PACKS = 3, 14, 2, 8
TOLERANCE = 1e-3


class Experiment:
    """What both arms share: the run's configuration, its opened inputs, and the verifier's weights."""

    def __init__(self, config: Config) -> None:
        self.config, self.inputs = config, stage.check(config)
        self.head: VerifierHead = load_head(self.inputs.verifier)
        self.train, self.val = self.inputs.rows("train"), self.inputs.rows("val")

    def draft(self, section: DraftSection, init_from: Path | None = None) -> SupervisedRowsEagle3:
        return build_draft(
            section,
            self.config.train.model_copy(update={"init_from": init_from}),
            mapping=self.inputs.mapping,
            weights=self.head,
            verifier_path=str(self.inputs.verifier.path),
            aux_layer_ids=self.inputs.states.aux_layer_ids,
            seed=self.config.run.seed,
        )

    def packs(self, rows: SplitRows) -> Iterator[dict[str, Any]]:
        """The packs of the first epoch, as the forward takes them."""
        sizes = {"hidden_size": self.config.draft.hidden_size, "num_aux": len(self.inputs.states.aux_layer_ids)}
        options = {"accumulation": 1, "seed": self.config.run.seed, "tolerance": 0, **sizes}
        for pack in make_loader(rows, self.config.train, **options):
            yield {name: value for name, value in pack.items() if name != "error_records"}


class StepClock(logging.Handler):
    """Notes when each step of a Trainer ended and how many tokens it had, from the library's own metric records."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[float, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, dict) and "train" in record.msg:
            profile = record.msg["profile"]
            self.steps.append((time.perf_counter(), profile["tokens_per_s"] * profile["step_ms"] / 1000))

    def rate(self) -> float:
        """Tokens a second after the warm-up."""
        begin, *rest = self.steps[WARM_UP - 1 :]
        return sum(tokens for _, tokens in rest) / (rest[-1][0] - begin[0])


def clocked(train: Callable[[Path], Any]) -> float:
    """Tokens a second of one short training into a directory that is thrown away."""
    clock, metrics = StepClock(), logging.getLogger("speculators.metrics")
    metrics.addHandler(clock)
    try:
        with tempfile.TemporaryDirectory() as folder:
            train(Path(folder))
    finally:
        metrics.removeHandler(clock)
    return clock.rate()


# ---- the two arms --------------------------------------------------------------------------------------------------


def train_ours(experiment: Experiment, out_dir: Path, max_steps: int, *, seed: int) -> None:
    settings = experiment.config.train.model_copy(update={"max_steps": max_steps, "loggers": []})
    model = experiment.draft(experiment.config.draft)
    no_val = SplitRows(experiment.val.load, [], [])
    train_draft(model, settings, experiment.train, no_val, out_dir=out_dir, seed=seed)


class LibraryTrainer(Trainer):
    """speculators' Trainer; on a CPU it has to be told where it is."""

    def setup_trainer(self) -> None:
        super().setup_trainer()
        device = training_device()
        self.local_rank, self.device_type = device, device.type  # type: ignore[assignment]


def library_defaults(experiment: Experiment, out_dir: Path, max_steps: int, seed: int) -> argparse.Namespace:
    """What speculators' `train` command resolves, given only what the run fixes."""
    on_cpu = training_device().type == "cpu"
    given = {
        "speculator-type": "eagle3",
        "verifier-name-or-path": str(experiment.inputs.verifier.path),
        "draft-vocab-size": experiment.inputs.mapping.size,
        "save-path": str(out_dir),
        "total-seq-len": experiment.config.train.max_tokens_per_batch,
        "epochs": math.ceil(max_steps / len(library_loader(experiment, experiment.train, 0))),
        "max-steps": max_steps,
        "seed": seed,
    }
    if on_cpu:
        given |= {"draft-attn-impl": "sdpa", "loss-implementation": "eager"}
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    layers = [str(i) for i in experiment.inputs.states.aux_layer_ids]
    return argparse.Namespace(**TrainConfig.resolve([*flags, "--target-layer-ids", *layers]).flatten())


def library_loader(experiment: Experiment, rows: SplitRows, seed: int) -> DataLoader:
    """speculators' `_setup_dataloader` over `data_N.pt`, whose layout is its own but whose reader is Arrow's."""
    settings, states = experiment.config.train, experiment.inputs.states
    dtype = DTYPES[settings.dtype]
    sampler = MultipackDistributedBatchSamplerV2(settings.max_tokens_per_batch, rows.lengths, 1, 0, seed=seed)
    collate = CollateFn(
        settings.max_tokens_per_batch, states.hidden_size, len(states.aux_layer_ids), dtype, shift_batch
    )
    dataset = PackedStates(rows, max_tokens=settings.max_tokens_per_batch, dtype=dtype)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)


def train_library(experiment: Experiment, out_dir: Path, max_steps: int, *, seed: int, validate: bool) -> None:
    """speculators' `train` command (`speculators/train/cli.py`, `main`), without its own reading of data."""
    args, mapping = library_defaults(experiment, out_dir, max_steps, seed), experiment.inputs.mapping
    library.set_seed(args.seed)
    model = library.build_draft_model(args, Eagle3DraftModel, mapping.t2d, mapping.d2t, mapping.size)
    train_kwargs, val_kwargs = Eagle3DraftModel.get_trainer_kwargs(**vars(args))
    same_names = {name: getattr(args, name) for name in TrainerConfig._fields if hasattr(args, name)}
    settings = TrainerConfig(
        **same_names
        | {
            "num_epochs": args.epochs,
            "resume_from_checkpoint": False,
            "train_call_kwargs": train_kwargs,
            "val_call_kwargs": val_kwargs,
            "hidden_states_dtype": DTYPES[experiment.config.train.dtype],
        }
    )
    loader = library_loader(experiment, experiment.train, args.seed)
    val_loader = library_loader(experiment, experiment.val, 0) if validate else None  # seed 0 there, too
    metrics = logging.getLogger("speculators.metrics")
    metrics.setLevel(logging.INFO)
    with contextlib.ExitStack() as stack:
        if training_device().type == "cpu":
            stack.enter_context(replaced(torch.accelerator, "synchronize", lambda *_: None))
        LibraryTrainer(model, settings, loader, val_loader).run_training()


# ---- what is compared ----------------------------------------------------------------------------------------------


def best_of(checkpoints_dir: Path) -> Path:
    link = checkpoints_dir / checkpoints.BEST_LINK
    return link.resolve() if link.exists() else checkpoints_dir / str(checkpoints.list_checkpoints(checkpoints_dir)[-1])


def section_of(checkpoint: Path) -> DraftSection:
    """The draft section that describes a saved draft."""
    saved = read_json(checkpoint / checkpoints.CONFIG_FILE)
    saved |= saved["transformer_layer_config"]
    rope = saved["rope_parameters"]
    fields = {name: saved[name] for name in DraftSection.model_fields if saved.get(name) is not None}
    return DraftSection(**fields | {"rope_theta": rope["rope_theta"]})


@torch.no_grad()
def simulated_acceptance(experiment: Experiment, checkpoint: Path) -> dict[str, Any]:
    """Acceptance length and shares by position over the validation split, as stage 4 simulates them."""
    model = experiment.draft(section_of(checkpoint), checkpoint).to(training_device()).eval()
    sums: dict[str, float] = {}
    for pack in experiment.packs(experiment.val):
        with torch.autocast(training_device().type, dtype=DTYPES[experiment.config.train.dtype]):
            _, _, metrics = model(**moved(pack), ttt_steps=3)
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    names = ["acceptance_length", *(f"acceptance_{position}" for position in range(3))]
    length, *by_position = (round(sums[f"{name}_sum"] / sums[f"{name}_total"], 4) for name in names)
    return {"length": length, "by_position": by_position, "checkpoint": str(checkpoint)}


def moved(pack: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(training_device()) for name, value in pack.items()}


@torch.no_grad()
def loss_differences(experiment: Experiment, checkpoint: Path) -> list[tuple[float, float]]:
    """(ours, the library's) loss of the trained draft on some training packs: same weights, batch and settings."""
    model = experiment.draft(section_of(checkpoint), checkpoint)
    config = copy.deepcopy(model.config)
    config.transformer_layer_config._attn_implementation = "sdpa"
    twin = Eagle3DraftModel(config=config)
    twin.load_state_dict(model.state_dict())
    twin.verifier_norm.variance_epsilon = model.verifier_norm.variance_epsilon
    train = experiment.config.train
    loss = train.loss if isinstance(train.loss, str) else json.dumps(train.loss)
    how = {"ttt_steps": train.ttt_steps, "ttt_step_loss_decay": train.ttt_step_loss_decay}
    how |= {"loss_config": resolve_loss_config(loss, "eager")}
    pairs = []
    for pack, _ in zip(experiment.packs(experiment.train), range(LOSS_PACKS), strict=False):
        with torch.autocast("cpu", dtype=DTYPES[train.dtype]):
            pairs.append(tuple(float(one.train()(**pack, **how)[1]) for one in (model, twin)))
    return pairs


# ---- the claims ----------------------------------------------------------------------------------------------------


def speed_claim(experiment: Experiment, steps: int) -> Claim:
    """Both in turn, with other packs in each round: oneDNN keeps what it built for the shapes of an earlier one."""
    our_seeds, their_seeds = itertools.count(), itertools.count()

    def ours(path: Path) -> None:
        train_ours(experiment, path, steps, seed=next(our_seeds))

    def theirs(path: Path) -> None:
        train_library(experiment, path, steps, seed=next(their_seeds), validate=False)

    our_rates, their_rates = alternating(ROUNDS, lambda: clocked(ours), lambda: clocked(theirs))
    figures = {"steps_a_round": steps, "warm_up_steps": WARM_UP, "threads": torch.get_num_threads()}
    return claim_of("training tokens/s, beside speculators' defaults", our_rates, their_rates, at_least=1.3, **figures)


def loss_claim(experiment: Experiment, checkpoint: Path) -> Claim:
    pairs = loss_differences(experiment, checkpoint)
    ratios = sorted(TOLERANCE / max(abs(ours - theirs), 1e-9) for ours, theirs in pairs)
    text = "1e-3 over the difference from the library's loss, same weights and batch (the smallest of the packs)"
    figures = {"ours": [round(a, 6) for a, _ in pairs], "theirs": [round(b, 6) for _, b in pairs]}
    return Claim(text, round(ratios[0], 3), 1.0, [round(ratios[0], 3), round(ratios[-1], 3)], figures)


def acceptance_claim(experiment: Experiment, speed: Claim, keep: Path, steps: int | None) -> Claim:
    """Train the defaults for the wall time of the run's own training, and simulate both on the validation split."""
    run = experiment.config.run.dir / checkpoints.DIR_NAME
    own_steps = read_json(run / "manifest.json")["counts"]["steps"]
    equal_time = round(
        own_steps * statistics.median(speed.figures["theirs"]) / statistics.median(speed.figures["ours"])
    )
    max_steps = steps or equal_time
    train_library(experiment, keep, max_steps, seed=experiment.config.run.seed, validate=True)
    ours, theirs = (simulated_acceptance(experiment, best_of(path)) for path in (run, keep))
    ratio = round(ours["length"] / theirs["length"], 3)
    figures = {"ours": ours, "theirs": theirs, "own_steps": own_steps, "their_steps": max_steps}
    text = "simulated acceptance length at the same wall time, beside speculators' defaults"
    return Claim(text, ratio, 1.05, [ratio, ratio], figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/smollm2_135m.yaml"), help="of the finished run")
    parser.add_argument("--run-dir", type=Path, help="instead of the configuration's run.dir")
    parser.add_argument("--keep", type=Path, default=Path("runs/speculators_defaults"), help="where they train")
    parser.add_argument("--steps", type=int, help="a smoke test: train so many steps, write no result")
    options = parser.parse_args()
    config = load_config(options.config)
    if options.run_dir:
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": options.run_dir})})
    experiment = Experiment(config)
    checkpoint = best_of(config.run.dir / checkpoints.DIR_NAME)
    speed = speed_claim(experiment, min(options.steps or STEPS_A_ROUND, STEPS_A_ROUND))
    claims = [speed, loss_claim(experiment, checkpoint)]
    claims.append(acceptance_claim(experiment, speed, options.keep, options.steps))
    if options.steps:
        show(claims)
    else:
        record("train", claims)
    served = f"--import {best_of(options.keep)} --run.dir {options.keep}_served"
    print(f"to serve theirs: python 05_convert_checkpoint.py --config {options.config} {served}")


if __name__ == "__main__":
    main()
