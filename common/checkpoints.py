"""Training checkpoints: what lies in `checkpoints/`, and which of them a name means.

    checkpoints/
        0/, 1/, ...             one directory an epoch, newest last; each is a plain speculators draft:
            config.json, model.safetensors      bf16, with t2d and d2t; vLLM loads the directory as it is
            val_metrics.json                    validation after that epoch, once it has run
            exact_state/                        only in the newest: what exact continuation needs
                masters.safetensors             float32 trainable weights
                optimizer.pt, scheduler.pt      as they are in memory (speculators' own files are bf16)
                position.json                   epoch, step, tokens seen, what was skipped
                random.pt                       random states of every rank
        checkpoint_best         link to the epoch with the best simulated acceptance length
        training_log.jsonl      one object a step, and one a validation
        manifest.json           written last

A directory that is being written is `.N.saving`; the one that it replaces is `.N.old` for a moment. `recover` puts
right what a kill in between has left. Knows nothing of how training works.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from common.errors import PipelineError, Problem
from common.files import fsync_path, read_json, write_json

DIR_NAME = "checkpoints"
BEST_LINK = "checkpoint_best"
LOG_FILE = "training_log.jsonl"
CONFIG_FILE, WEIGHTS_FILE, VAL_METRICS_FILE = "config.json", "model.safetensors", "val_metrics.json"
STATE_DIR = "exact_state"
MASTERS_FILE, OPTIMIZER_FILE, SCHEDULER_FILE = "masters.safetensors", "optimizer.pt", "scheduler.pt"
POSITION_FILE, RANDOM_FILE = "position.json", "random.pt"
SAVING, OLD = ".{}.saving", ".{}.old"
OWNED = ("[0-9]*", ".[0-9]*.saving", ".[0-9]*.old", BEST_LINK, LOG_FILE)


@dataclass(frozen=True)
class Position:
    """How far training has come.

    epoch: the epoch begun, counted from 0 in this directory. batches: packs of it consumed by each process; 0 when
    the epoch is complete. steps: optimiser steps taken, over all rounds. tokens: tokens trained on, over all ranks
    and rounds. skipped: steps without a supervised token, which left the weights alone.
    """

    epoch: int
    batches: int
    steps: int
    tokens: int = 0
    skipped: int = 0


def list_checkpoints(checkpoints_dir: Path) -> list[int]:
    """Numbers of the finished checkpoint directories, ascending."""
    names = (path.name for path in checkpoints_dir.glob("[0-9]*") if path.is_dir() and not path.is_symlink())
    return sorted(int(name) for name in names if name.isdigit())


def find_checkpoint(run_dir: Path, which: str) -> Path:
    """Directory of the checkpoint called "best", "last" or by its number.

    Raises:
        PipelineError: there is none of that name, or it lacks its configuration or weights.
    """
    checkpoints_dir = run_dir / DIR_NAME
    numbers = list_checkpoints(checkpoints_dir)
    if not numbers:
        raise PipelineError(Problem("checkpoints", f"{checkpoints_dir} holds none", "run 04_train.py"))
    link = checkpoints_dir / BEST_LINK
    if which == "last":
        found = checkpoints_dir / str(numbers[-1])
    elif which == "best" and link.exists():
        found = link.resolve()
    elif which.isdigit() and int(which) in numbers:
        found = checkpoints_dir / which
    else:
        names = ", ".join([*(["best"] if link.exists() else []), "last", *map(str, numbers)])
        raise PipelineError(Problem("export.checkpoint", f"{checkpoints_dir} has no {which!r}", f"use one of {names}"))
    check_checkpoint(found)
    return found


def check_checkpoint(path: Path) -> None:
    """Refuse a checkpoint directory without configuration or weights."""
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (path / name).is_file()]
    if missing:
        raise PipelineError(Problem("checkpoints", f"{path} lacks {' and '.join(missing)}", "use another checkpoint"))


def read_position(checkpoint: Path) -> Position | None:
    """Where the run stood when `checkpoint` was saved; None when it can't be continued exactly."""
    path = checkpoint / STATE_DIR / POSITION_FILE
    return Position(**read_json(path)) if path.is_file() else None


def write_position(checkpoint: Path, position: Position) -> None:
    write_json(checkpoint / STATE_DIR / POSITION_FILE, asdict(position))


def saving_path(checkpoints_dir: Path, number: int) -> Path:
    return checkpoints_dir / SAVING.format(number)


def begin_saving(checkpoints_dir: Path, number: int) -> Path:
    """An empty directory to write checkpoint `number` into, until `finish_saving` gives it its name."""
    saving = saving_path(checkpoints_dir, number)
    shutil.rmtree(saving, ignore_errors=True)
    (saving / STATE_DIR).mkdir(parents=True)
    return saving


def finish_saving(checkpoints_dir: Path, number: int) -> Path:
    """Put the written directory in its place, then take the exact state out of the older ones.

    Only the newest can be continued from; the state is several times the size of the weights.
    """
    saving, final = saving_path(checkpoints_dir, number), checkpoints_dir / str(number)
    old = checkpoints_dir / OLD.format(number)
    readable = (saving / CONFIG_FILE).stat().st_mode
    for path in [*saving.rglob("*"), saving]:
        if path.is_file():
            path.chmod(readable)  # safetensors makes its files 0600, which would shut a server's user out
        fsync_path(path)
    if final.exists():
        final.rename(old)
    saving.rename(final)
    fsync_path(checkpoints_dir)
    shutil.rmtree(old, ignore_errors=True)
    for earlier in list_checkpoints(checkpoints_dir):
        if earlier < number:
            shutil.rmtree(checkpoints_dir / str(earlier) / STATE_DIR, ignore_errors=True)
    return final


def recover(checkpoints_dir: Path) -> None:
    """Undo what a kill in the middle of saving has left: nothing half-written stays, nothing finished is lost."""
    for saving in checkpoints_dir.glob(SAVING.format("[0-9]*")):
        shutil.rmtree(saving)
    for old in checkpoints_dir.glob(OLD.format("[0-9]*")):
        final = checkpoints_dir / old.name.removeprefix(".").removesuffix(".old")
        if final.exists():
            shutil.rmtree(old)
        else:
            old.rename(final)


def link_best(checkpoints_dir: Path, number: int) -> None:
    """Point `checkpoint_best` at an epoch, by rename."""
    temporary = checkpoints_dir / f".{BEST_LINK}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(str(number), target_is_directory=True)
    temporary.replace(checkpoints_dir / BEST_LINK)


def best_number(checkpoints_dir: Path) -> int | None:
    """The epoch that `checkpoint_best` points to."""
    link = checkpoints_dir / BEST_LINK
    return int(link.readlink().name) if link.is_symlink() else None


def read_val_metrics(checkpoints_dir: Path, number: int) -> dict[str, float] | None:
    """Metrics of the validation after epoch `number`; None when it hasn't run."""
    path = checkpoints_dir / str(number) / VAL_METRICS_FILE
    return read_json(path) if path.is_file() else None


def write_val_metrics(checkpoints_dir: Path, number: int, metrics: dict[str, float]) -> None:
    write_json(checkpoints_dir / str(number) / VAL_METRICS_FILE, metrics)


def list_outputs(checkpoints_dir: Path) -> list[Path]:
    """The files that a finished run's manifest covers: drafts, their metrics and the log, not the exact state."""
    names = (CONFIG_FILE, WEIGHTS_FILE, VAL_METRICS_FILE)
    files = [checkpoints_dir / str(n) / name for n in list_checkpoints(checkpoints_dir) for name in names]
    return [path for path in [*files, checkpoints_dir / LOG_FILE] if path.is_file()]
