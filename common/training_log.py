"""What a training run says while it runs: training_log.jsonl, the progress bar, and speculators' metric loggers."""

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import speculators.train.distributed as topology
from speculators.train import logger as library_loggers

from common.checkpoints import Position
from common.files import write_text
from common.progress import Progress

logger = logging.getLogger("pipeline")


class TrainingLog:
    """training_log.jsonl: one object a step, one a validation. Lines after `position` are of steps to be redone."""

    def __init__(self, path: Path, position: Position) -> None:
        kept = []
        if path.is_file():
            lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            kept = [line for line in lines if _precedes(line, position)]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, **fields: Any) -> None:
        self._file.write(json.dumps({k: _rounded(v) for k, v in fields.items()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _precedes(line: Mapping[str, Any], position: Position) -> bool:
    if "validation" in line:
        return line["epoch"] < position.epoch or (line["epoch"] == position.epoch and position.batches == 0)
    return line["step"] <= position.steps


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list) else value


class _Bridge(logging.Handler):
    """Hands the Trainer's own metric records to a function."""

    def __init__(self, receive: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__()
        self._receive = receive

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, Mapping):
            self._receive(record.msg)


@contextlib.contextmanager
def metric_handlers(
    receive: Callable[[Mapping[str, Any]], None], loggers: Sequence[str], log_dir: Path, run_name: str
) -> Iterator[None]:
    """Attach our log and speculators' loggers (TensorBoard, Weights & Biases, trackio, MLflow) for one run.

    The library's `setup_metric_logger` goes through `dictConfig`, which closes every handler of the process (0.9.0).
    """
    classes = {
        "tensorboard": library_loggers.TensorBoardHandler,
        "wandb": library_loggers.WandbHandler,
        "trackio": library_loggers.TrackioHandler,
        "mlflow": library_loggers.MLFlowHandler,
    }
    handlers: list[logging.Handler] = [_Bridge(receive)]
    if topology.get_rank() == 0:
        handlers += [classes[name](run_name=run_name, log_dir=str(log_dir)) for name in loggers]
    metrics = logging.getLogger("speculators.metrics")
    metrics.setLevel(logging.INFO)
    metrics.propagate = False
    for handler in handlers:
        handler.addFilter(library_loggers.IsMappingFilter())
        metrics.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            metrics.removeHandler(handler)
            handler.close()


class Reporter:
    """Turns the library's metrics into the log's lines and the bar's fields."""

    def __init__(self, log: TrainingLog | None, progress: Progress, start: Position) -> None:
        self._log, self._progress, self._tokens = log, progress, start.tokens

    def step(self, position: Position, window: Sequence[Mapping[str, Any]], *, grad_norm: float) -> None:
        """One line for one optimiser step; a window's metrics are averaged."""
        names = [name for name in window[0]["train"] if name not in ("tokens", "error_records")]
        metrics = {name: sum(float(r["train"][name]) for r in window) / len(window) for name in names}
        seconds = sum(r["profile"]["step_ms"] for r in window) / 1000
        tokens, self._tokens = position.tokens - self._tokens, position.tokens
        self._progress.update(
            tokens, step=position.steps, loss=f"{metrics['loss']:.3f}", acc=f"{metrics['full_acc_0']:.3f}"
        )
        if self._log:
            self._log.write(
                step=position.steps,
                epoch=position.epoch,
                **metrics,
                lr=window[-1]["lr"],
                grad_norm=grad_norm,
                tokens=tokens,
                seconds=seconds,
                tokens_per_second=tokens / seconds if seconds else 0.0,
                skipped_steps=position.skipped,
            )

    def validation(self, record: Mapping[str, Any]) -> None:
        metrics = {name.removesuffix("_epoch"): value for name, value in record["val"].items()}
        if self._log:
            self._log.write(validation=metrics, epoch=record["epoch"])
        length, accuracy = metrics.get("acceptance_length", math.nan), metrics.get("full_acc_0", math.nan)
        logger.info(
            "after epoch %d: simulated acceptance length %.3f, first step right %.3f, loss %.3f",
            record["epoch"],
            length,
            accuracy,
            metrics.get("loss", math.nan),
        )
