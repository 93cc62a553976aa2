"""Progress of long work: a bar with rate and ETA on a terminal, one plain line a minute without one.

RUN_DIR/logs/NAME.progress.json   the latest counts, replaced every few seconds, for `common.status`
"""

import contextlib
import json
import logging
import os
import socket
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from common.files import format_count, format_duration

LINE_SECONDS = 60.0
FILE_SECONDS = 5.0

logger = logging.getLogger("pipeline")


def progress_path(out_dir: Path) -> Path:
    return out_dir.parent / "logs" / f"{out_dir.name}.progress.json"


def read_progress(out_dir: Path) -> dict[str, Any] | None:
    """The latest counts of a stage; None where it never reported."""
    try:
        return json.loads(progress_path(out_dir).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None


class Progress:
    """Counts work of one stage.

    start: what an earlier run did already; it counts, but not for the rate.
    shown: false in all ranks but one, which neither print nor write.
    """

    def __init__(self, out_dir: Path, *, total: int, desc: str, unit: str, start: int = 0, shown: bool = True) -> None:
        self._shown = shown
        self._path = progress_path(out_dir)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._desc, self._unit, self._total, self._start, self._done = desc, unit, total, start, start
        self._fields: dict[str, Any] = {}
        self._began = self._last_line = time.monotonic()
        self._last_file = 0.0
        self._is_terminal = shown and sys.stderr.isatty()
        self._bar = tqdm(total=total, initial=start, desc=desc, unit=f" {unit}", disable=not self._is_terminal)

    def update(self, amount: int = 1, **fields: Any) -> None:
        """Adds `amount` units; `fields` are shown beside the counts, such as loss=1.2 or bytes=10."""
        self._done += amount
        self._fields.update(fields)
        self._bar.update(amount)
        now = time.monotonic()
        if now - self._last_file >= FILE_SECONDS:
            self._write(now)
        if self._shown and not self._is_terminal and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            logger.info("%s", self._line(now))

    def _rate(self, now: float) -> float:
        return (self._done - self._start) / max(now - self._began, 1e-9)

    def _line(self, now: float) -> str:
        rate = self._rate(now)
        eta = format_duration((self._total - self._done) / rate) if rate > 0 else "unknown"
        counts = f"{format_count(self._done)} of {format_count(self._total)} {self._unit}"
        fields = "".join(f", {key} {value}" for key, value in self._fields.items())
        return f"{self._desc}: {counts}, {rate:,.1f} {self._unit}/s, {eta} left{fields}"

    def _write(self, now: float) -> None:
        self._last_file = now
        if not self._shown:
            return
        record = {
            "desc": self._desc,
            "unit": self._unit,
            "done": self._done,
            "total": self._total,
            "rate": self._rate(now),
            "time": time.time(),
            **self._fields,
        }
        # Shards of an extraction may share the file: with one name, one would take the other's away before its rename.
        temporary = self._path.with_suffix(f".{socket.gethostname()}-{os.getpid()}.tmp")
        # No fsync, and no error where the disk is full: lost progress harms nobody, and the stage has its own words.
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(record), encoding="utf-8")
            temporary.replace(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._bar.close()
        self._write(time.monotonic())
