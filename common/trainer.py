"""Training the draft: speculators' data path, samplers, optimisers, schedulers and Trainer, and what they leave open.

What is worked around, all seen in speculators 0.9.0 (`speculators/train/`):

- the Trainer takes its device from the accelerator, and its step timer calls `torch.accelerator.synchronize`: on a
  CPU both need telling;
- `maybe_setup_distributed` wants an accelerator: with gloo the process group and its module state are set here;
- checkpoints hold weights and optimiser in bf16 and no random state, are written in place, and on a CPU can't be
  loaded: `_Checkpointer` keeps float32 and writes by rename;
- gradients are clipped at a constant 1.0 on every batch, and there is no accumulation: clipping is replaced for
  the time of an epoch, and the optimiser steps at the end of a window;
- the best checkpoint is the one of lowest loss; here it is the one of longest simulated acceptance;
- signals raise in the middle of a step: within an epoch they are taken at the next step instead;
- after `max_steps` every further epoch still takes one batch: the number of epochs is cut to what is needed.

Knows the states only through a function that loads one sample, and nothing of how a verifier directory is read.
"""

import contextlib
import json
import logging
import math
import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import speculators.train.distributed as topology
import speculators.train.trainer as library
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from speculators.losses import resolve_loss_config
from speculators.train.checkpointer import BaseCheckpointer, convert_float_dtype, patch_config_dtype
from speculators.train.graceful_shutdown import TrainingInterruptedError, with_graceful_shutdown
from speculators.train.trainer import Trainer, TrainerConfig
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import logging as transformers_logging

from common import checkpoints
from common.checkpoints import Position
from common.config import TrainSection
from common.draft import ARCHITECTURE, DTYPES, SupervisedRowsEagle3
from common.errors import PipelineError, Problem
from common.files import read_json, write_text
from common.packing import PackLoader, SplitRows, make_loader
from common.progress import Progress
from common.training_log import Reporter, TrainingLog, metric_handlers

logger = logging.getLogger("pipeline")


# ---- where it runs -------------------------------------------------------------------------------------------------


def start_distributed() -> None:
    """Join the process group that torchrun describes; does nothing in a single process.

    speculators does it where there is an accelerator. With gloo its module state is set by hand (0.9.0).
    """
    if "LOCAL_RANK" not in os.environ or dist.is_initialized():
        return
    if torch.accelerator.is_available():
        topology.maybe_setup_distributed()
        return
    dist.init_process_group("gloo")
    topology._is_distributed = True
    topology._local_rank, topology._rank = int(os.environ["LOCAL_RANK"]), dist.get_rank()
    topology._world_size = dist.get_world_size()
    topology._init_sp_process_groups(dist.get_rank(), dist.get_world_size(), 1)


def stop_distributed() -> None:
    """Leave the process group, so that torchrun sees a clean end."""
    topology.maybe_destroy_distributed()


def training_device() -> torch.device:
    """This process's accelerator, or the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(accelerator.type, topology.get_local_rank())


# ---- checkpoints ---------------------------------------------------------------------------------------------------


class _Checkpointer(BaseCheckpointer):
    """Loads the exact state of one checkpoint. `source` is its directory; None starts afresh."""

    def __init__(self, path: Path, source: Path | None) -> None:
        self._source = source
        super().__init__(path)

    def _get_previous_epoch(self) -> int:
        return -1 if self._source is None else int(self._source.name)

    def _state(self, name: str) -> Path:
        assert self._source is not None
        return self._source / checkpoints.STATE_DIR / name

    def load_model_state_dict(self, model: torch.nn.Module, float_dtype: torch.dtype | None = None) -> None:  # noqa: ARG002
        masters = load_file(self._state(checkpoints.MASTERS_FILE))
        with torch.no_grad():
            for name, parameter in trainable_parameters(model).items():
                parameter.copy_(masters.pop(name))
        assert not masters, f"unexpected weights {list(masters)}"

    def load_optimizer_state_dict(
        self,
        model: torch.nn.Module,  # noqa: ARG002
        optimizer: Any,
        float_dtype: torch.dtype | None = None,  # noqa: ARG002
    ) -> None:
        saved = torch.load(self._state(checkpoints.OPTIMIZER_FILE), map_location="cpu", weights_only=True)
        for one, state in zip(optimizer, saved, strict=True):
            one.load_state_dict(state)

    def load_scheduler_state_dict(self, scheduler: Any) -> None:
        saved = torch.load(self._state(checkpoints.SCHEDULER_FILE), weights_only=True)
        for one, state in zip(scheduler, saved, strict=True):
            one.load_state_dict(state)
            for group, rate in zip(one.optimizer.param_groups, one.get_last_lr(), strict=True):
                group["lr"] = rate

    def save_checkpoint(
        self, model: torch.nn.Module, optimizer: Any, epoch: int | str, float_dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """The plain draft as speculators' `SingleGPUCheckpointer` writes it, and the float32 state beside it."""
        directory = checkpoints.begin_saving(self.path, int(epoch))
        save_draft(unwrapped(model), directory, float_dtype)
        masters = {name: p.detach().cpu().contiguous() for name, p in trainable_parameters(model).items()}
        save_file(masters, directory / checkpoints.STATE_DIR / checkpoints.MASTERS_FILE)
        states = [one.state_dict() for one in optimizer]
        torch.save(states, directory / checkpoints.STATE_DIR / checkpoints.OPTIMIZER_FILE)

    def finish_checkpoint(self, schedulers: Sequence[Any], random_states: Sequence[Any], position: Position) -> None:
        """Add what the library doesn't pass to `save_checkpoint`, then give the directory its name."""
        directory = checkpoints.saving_path(self.path, position.epoch)
        state_dir = directory / checkpoints.STATE_DIR
        torch.save([one.state_dict() for one in schedulers], state_dir / checkpoints.SCHEDULER_FILE)
        torch.save(list(random_states), state_dir / checkpoints.RANDOM_FILE)
        checkpoints.write_position(directory, position)
        checkpoints.finish_saving(self.path, position.epoch)

    def load_random_states(self, rank: int) -> None:
        states = torch.load(self._state(checkpoints.RANDOM_FILE), weights_only=True)
        set_random_state(states[min(rank, len(states) - 1)])


def save_draft(model: SupervisedRowsEagle3, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a plain speculators checkpoint, as its `SingleGPUCheckpointer.save_checkpoint` does (0.9.0)."""
    transformers_logging.disable_progress_bar()
    model.save_pretrained(directory, state_dict=convert_float_dtype(model.state_dict(), dtype))
    config_path = directory / checkpoints.CONFIG_FILE
    patch_config_dtype(config_path, dtype)
    config = read_json(config_path) | {"architectures": [ARCHITECTURE]}
    write_text(config_path, json.dumps(config, indent=2) + "\n")


def unwrapped(model: torch.nn.Module) -> SupervisedRowsEagle3:
    return model.module if isinstance(model, DistributedDataParallel) else model  # type: ignore[return-value]


def trainable_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in unwrapped(model).named_parameters() if p.requires_grad}


def random_state() -> dict[str, Any]:
    """Python's, numpy's and torch's random states, in types that `weights_only` loading accepts."""
    legacy: Any = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": (legacy[0], legacy[1].tolist(), *legacy[2:]),
        "python": (version, list(internal), gauss_next),
    }
    if torch.accelerator.is_available():
        state["accelerator"] = torch.get_device_module().get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if torch.accelerator.is_available() and "accelerator" in state:
        torch.get_device_module().set_rng_state(state["accelerator"])


# ---- the trainer ---------------------------------------------------------------------------------------------------


_CLIP_GRAD_NORM = torch.nn.utils.clip_grad_norm_


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let `owner.name` be `value` within the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _StopEarlyError(Exception):
    """Raised out of the library's loop when validation has stopped getting better."""


class DraftTrainer(Trainer):
    """speculators' Trainer with the gaps of the module's docstring closed. One instance trains one directory."""

    def __init__(
        self,
        model: SupervisedRowsEagle3,
        config: TrainerConfig,
        train_loader: PackLoader,
        val_loader: PackLoader | None,
        *,
        settings: TrainSection,
        start: Position,
        source: Path | None,
        on_step: Callable[..., None],
    ) -> None:
        self._settings, self._start, self._source, self._on_step = settings, start, source, on_step
        self._out_dir = Path(config.save_path)
        self._position, self._saved = start, start
        self._micro, self._grad_norm = 0, 0.0
        self._window: list[Mapping[str, Any]] = []
        self._signalled = False
        self.interrupted = self.stopped_early = False
        super().__init__(model, config, train_loader, val_loader)

    @property
    def position(self) -> Position:
        return self._position

    # -- set-up: called by the library's constructor

    def setup_trainer(self) -> None:
        """Device and starting point; the library would read them from the accelerator and its own state files."""
        device = training_device()
        self.local_rank, self.device_type = device, device.type  # type: ignore[assignment]
        self.checkpointer: _Checkpointer = _Checkpointer(self._out_dir, self._source)
        self.resume_from_checkpoint = self._source is not None
        epoch_done = self._start.batches == 0 and self._source is not None and self._source.parent == self._out_dir
        self.current_epoch = self._start.epoch + 1 if epoch_done else self._start.epoch
        self._resume_local_step = self._start.batches
        self._resume_global_step = self.global_step = self._start.steps * self._settings.accumulation
        self._best, self._since_best = self._replay_validations()

    def _replay_validations(self) -> tuple[float, int]:
        """Best acceptance so far and the number of validations since, from what lies in the directory."""
        best, since = -math.inf, 0
        for number in checkpoints.list_checkpoints(self._out_dir):
            metrics = checkpoints.read_val_metrics(self._out_dir, number)
            if metrics and metrics.get("acceptance_length_epoch", -math.inf) > best:
                best, since = metrics["acceptance_length_epoch"], 0
            elif metrics:
                since += 1
        return best, since

    def setup_optimizer(self) -> None:
        super().setup_optimizer()
        if self._source is not None:
            self.checkpointer.load_random_states(self.rank)

    # -- one batch: the library calls these in this order

    def _optimizers_zero_grad(self) -> None:
        if self._micro == 0:
            super()._optimizers_zero_grad()

    def _clip(self, parameters: Iterator[torch.nn.Parameter], _library_norm: float) -> None:
        """Stands in for `clip_grad_norm_` during an epoch: average the window, then clip to the configured norm."""
        if self._micro + 1 < self._settings.accumulation:
            return
        trained = [p for p in parameters if p.grad is not None]
        if self._settings.accumulation > 1:
            for parameter in trained:
                parameter.grad.mul_(1 / self._settings.accumulation)  # type: ignore[union-attr]
        norm = _CLIP_GRAD_NORM(trained, self._settings.max_grad_norm)
        self._grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not math.isfinite(self._grad_norm):
            what = f"the gradient of step {self._position.steps + 1} is not a number"
            raise PipelineError(Problem("training", what, "lower train.lr, or look for broken states with 02 --verify"))

    def _optimizers_step(self) -> None:
        self._micro += 1
        if self._micro < self._settings.accumulation:
            return
        self._micro = 0
        # All gradients are zero only where no rank had a supervised token: weight decay and momentum must not act.
        empty = self._grad_norm == 0.0
        if not empty:
            super()._optimizers_step()
        at = self._position
        self._position = replace(at, steps=at.steps + 1, skipped=at.skipped + empty)

    def _schedulers_step(self) -> None:
        if self._micro == 0:
            super()._schedulers_step()

    def receive_metrics(self, record: Mapping[str, Any]) -> None:
        """Take the library's metrics of one batch; hand on those of a step once its window is full."""
        if "train" not in record:
            return
        self._window.append(record)
        world_size = dist.get_world_size() if self.is_distributed else 1
        tokens = round(record["train"]["tokens"] * world_size)
        self._position = replace(self._position, tokens=self._position.tokens + tokens)
        if self._micro == 0:
            window, self._window = self._window, []
            self._on_step(self._position, window, grad_norm=self._grad_norm)

    def _after_batch(self) -> None:
        self._position = replace(self._position, batches=self._position.batches + 1)
        if self._micro:
            return
        if self._agree(self._signalled):
            raise TrainingInterruptedError("signal")
        every = self._settings.checkpoint_steps
        if every and self._position.steps % every == 0 and self._position.batches < self._num_batches:
            self._save()

    def _agree(self, flag: bool) -> bool:
        """True on all ranks if it is on one: they must leave the loop at the same step."""
        if not self.is_distributed:
            return flag
        votes = torch.tensor(int(flag), device=self.local_rank)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return bool(votes)

    # -- epochs

    def train_epoch(self, epoch: int, *, step_callback: Callable[[], None] | None = None) -> None:
        assert step_callback is None, "the library's loop passes none"
        started = self._resume_local_step if epoch == self.current_epoch else 0
        self._position = replace(self._position, epoch=epoch, batches=started)
        self.train_loader.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
        self._num_batches = len(self.train_loader)
        with self._library_mended(), self._signals_wait():
            super().train_epoch(epoch, step_callback=self._after_batch)
        self._position = replace(self._position, batches=0)

    def val_epoch(self, epoch: int) -> dict[str, float] | None:
        with self._library_mended():
            return super().val_epoch(epoch)

    @contextlib.contextmanager
    def _library_mended(self) -> Iterator[None]:
        """Within an epoch: our clipping, no second progress bar, and no call into an accelerator that isn't there."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(torch.nn.utils, "clip_grad_norm_", self._clip))
            stack.enter_context(replaced(library, "tqdm", lambda loader, **_: loader))
            if self.device_type == "cpu":
                stack.enter_context(replaced(torch.accelerator, "synchronize", lambda *_: None))
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", message=".*CPU [Aa]utocast.*")  # float32 runs are meant to have none
            yield

    @contextlib.contextmanager
    def _signals_wait(self) -> Iterator[None]:
        """Take SIGTERM and SIGINT at the next step: raised in the middle of one they leave half-updated weights."""

        def note(*_: Any) -> None:
            self._signalled = True

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @with_graceful_shutdown()
    def run_training(self) -> None:
        """The library's loop, after the validation that an interrupted run still owes."""
        epoch = self._start.epoch
        owed = self._source is not None and self.current_epoch == epoch + 1
        if owed and checkpoints.read_val_metrics(self._out_dir, epoch) is None:
            self.maybe_update_best(epoch, self.val_epoch(epoch))
        super().run_training()

    # -- checkpoints

    def maybe_save_checkpoint(self, epoch: int | str, local_step: int = 0) -> None:  # noqa: ARG002
        """Called after each epoch, and with "interrupted" on a signal, when a position may be unsaved yet."""
        if epoch == "interrupted":
            self.interrupted = True
        if self._saved != self._position:
            self._save()

    def _save(self) -> None:
        random_states: list[Any] = [random_state()]
        if self.is_distributed:
            random_states = [None] * dist.get_world_size()
            dist.all_gather_object(random_states, random_state())
        if self.rank == 0:
            self.checkpointer.save_checkpoint(self.model, self.optimizers, self._position.epoch)
            self.checkpointer.finish_checkpoint(self.schedulers, random_states, self._position)
        if self.is_distributed:
            dist.barrier()
        self._saved = self._position

    def maybe_update_best(self, epoch: int, val_metrics: dict[str, float] | None) -> None:
        """Best by simulated acceptance length; the library takes the lowest loss, which decay and K distort."""
        metrics = val_metrics or {}
        length = metrics.get("acceptance_length_epoch", math.nan)
        better = not metrics or length > self._best or self._best == -math.inf
        if self.rank == 0:
            if metrics:
                checkpoints.write_val_metrics(self._out_dir, epoch, metrics)
            if better:
                checkpoints.link_best(self._out_dir, epoch)
        self._since_best = 0 if better else self._since_best + 1
        self._best = length if better and metrics and not math.isnan(length) else self._best
        if self._settings.early_stop and self._since_best >= self._settings.early_stop:
            self.stopped_early = True
            raise _StopEarlyError

    def run(self) -> None:
        """Train until the last epoch, an early stop, or a signal (`interrupted`)."""
        if self._settings.early_stop and self._since_best >= self._settings.early_stop:
            self.stopped_early = True
            return
        with contextlib.suppress(_StopEarlyError):
            self.run_training()


# ---- a whole run ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What a run will do, as far as it is known before it starts.

    num_epochs and total_steps (of the schedule) count optimiser steps; start and source say where it begins.
    """

    num_epochs: int
    steps_per_epoch: int
    total_steps: int
    start: Position
    source: Path | None


def plan_run(settings: TrainSection, num_packs: int, out_dir: Path) -> Plan:
    """Where to begin and how far to go, from the packs that a process has in an epoch and what lies on disk."""
    steps = num_packs // settings.accumulation
    epochs = settings.num_epochs
    if settings.max_steps:
        epochs = min(epochs, math.ceil(settings.max_steps / max(1, steps)))
    start, source = find_start(settings, out_dir)
    total = settings.total_steps or min(settings.max_steps or math.inf, epochs * steps)
    return Plan(epochs, steps, int(total), start, source)


def find_start(settings: TrainSection, out_dir: Path) -> tuple[Position, Path | None]:
    """The newest checkpoint of this directory, else the last of the round before, else nothing."""
    checkpoints.recover(out_dir)
    numbers = checkpoints.list_checkpoints(out_dir)
    if numbers:
        newest = out_dir / str(numbers[-1])
        position = checkpoints.read_position(newest)
        if position is None:
            what = f"{newest} has no {checkpoints.STATE_DIR}, so it can't be continued exactly"
            raise PipelineError(Problem("checkpoints", what, "run 04_train.py --overwrite"))
        return position, newest
    if settings.continue_from:
        before = checkpoints.find_checkpoint(settings.continue_from, "last")
        position = checkpoints.read_position(before)
        if position is None or position.batches:
            what = f"{before} has no {checkpoints.STATE_DIR} of a finished epoch"
            raise PipelineError(Problem("train.continue_from", what, "finish that round first"))
        return replace(position, epoch=0), before
    return Position(epoch=0, batches=0, steps=0), None


def trainer_config(settings: TrainSection, plan: Plan, out_dir: Path) -> TrainerConfig:
    """Our settings in the library's words. Its steps are batches, ours optimiser steps."""
    loss = settings.loss if isinstance(settings.loss, str) else json.dumps(settings.loss)
    # The fused losses need Triton, which the CPU build of torch hasn't; the eager ones are its reference.
    implementation = "fused" if torch.cuda.is_available() else "eager"
    call = {
        "ttt_steps": settings.ttt_steps,
        "ttt_step_loss_decay": settings.ttt_step_loss_decay,
        "loss_config": resolve_loss_config(loss, implementation),
    }
    return TrainerConfig(
        lr=settings.lr,
        num_epochs=plan.num_epochs,
        save_path=str(out_dir),
        train_call_kwargs=call,
        val_call_kwargs=call,
        optimizer=settings.optimizer,
        weight_decay=settings.weight_decay,
        muon_lr=settings.muon_lr,
        muon_momentum=settings.muon_momentum,
        muon_weight_decay=settings.muon_weight_decay,
        scheduler_type=settings.scheduler,
        scheduler_warmup_ratio=settings.warmup_ratio,
        scheduler_total_steps=plan.total_steps,
        hidden_states_dtype=DTYPES[settings.dtype],
        fsdp_shard=settings.fsdp,
        max_steps=settings.max_steps and settings.max_steps * settings.accumulation,
    )


@dataclass(frozen=True)
class TrainingResult:
    """Where training ended, the best checkpoint and its metrics, and why it stopped."""

    position: Position
    best: int | None
    best_metrics: dict[str, float]
    unreadable: int
    interrupted: bool
    stopped_early: bool


def train_draft(
    model: SupervisedRowsEagle3, settings: TrainSection, train: SplitRows, val: SplitRows, *, out_dir: Path, seed: int
) -> TrainingResult:
    """Train `model` into `out_dir`, continuing what lies there.

    Raises:
        PipelineError: a sample can't be read, a gradient isn't a number, or a split is too small for one step.
    """
    shape = {"hidden_size": model.hidden_size, "num_aux": model.fc.in_features // model.hidden_size}
    options = {"seed": seed, "tolerance": settings.max_unreadable_samples, **shape}
    loader = make_loader(train, settings, accumulation=settings.accumulation, **options)
    val_loader = make_loader(val, settings, accumulation=1, **options) if len(val.indices) else None
    plan = plan_run(settings, len(loader), out_dir)
    if plan.steps_per_epoch == 0:
        what = f"{len(train.indices)} training samples don't fill one step of every rank"
        raise PipelineError(Problem("train.accumulation", what, "lower it, or train on fewer ranks or more samples"))
    log = TrainingLog(out_dir / checkpoints.LOG_FILE, plan.start) if topology.get_rank() == 0 else None
    before = plan.start.tokens if plan.source is None or plan.source.parent != out_dir else 0
    expected = before + plan.num_epochs * sum(min(n, settings.max_tokens_per_batch) for n in train.lengths)
    done = plan.start.tokens
    with Progress(
        out_dir, total=expected, desc="training", unit="tokens", start=done, shown=log is not None
    ) as progress:
        reporter = Reporter(log, progress, plan.start)
        trainer = DraftTrainer(
            model,
            trainer_config(settings, plan, out_dir),
            loader,
            val_loader,
            settings=settings,
            start=plan.start,
            source=plan.source,
            on_step=reporter.step,
        )

        def receive(record: Mapping[str, Any]) -> None:
            trainer.receive_metrics(record)
            if "val" in record:
                reporter.validation(record)

        with metric_handlers(receive, settings.loggers, out_dir.parent / "logs" / "metrics", out_dir.parent.name):
            trainer.run()
    if log:
        log.close()
    best = checkpoints.best_number(out_dir)
    metrics = checkpoints.read_val_metrics(out_dir, best) if best is not None else None
    return TrainingResult(
        trainer.position,
        best,
        metrics or {},
        len(loader.unreadable),
        trainer.interrupted,
        trainer.stopped_early,
    )
