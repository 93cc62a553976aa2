"""What a run is doing and what it made, read from disk alone: safe at any time, from any terminal.

    python -m common.status RUN_DIR [--json] [--watch]

A stage is `done` (manifest), `running` (its process lives), `interrupted` (its process is gone and there is no
manifest), `stale` (it runs on another host that has not reported for ten minutes) or `absent`.
"""

import argparse
import dataclasses
import json
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.console import Console
from rich.live import Live
from rich.table import Table

from common import checkpoints, manifest
from common.errors import PipelineError
from common.files import format_bytes, format_count, format_duration
from common.progress import read_progress

STAGES = {
    "01_prepare_data": "samples",
    "02_extract_hidden_states": "hidden_states",
    "03_build_vocab_mapping": "vocab_mapping",
    "04_train": "checkpoints",
    "05_convert_checkpoint": "draft",
}
REPORT_NAME = "serving_report.json"
STALE_SECONDS = 600.0
WATCH_SECONDS = 2.0
State = Literal["done", "running", "interrupted", "stale", "absent"]


@dataclass(frozen=True)
class StageStatus:
    script: str
    output: str
    state: State
    counts: dict[str, Any]
    bytes: int
    seconds: float | None = None
    who: str = ""  # pid and host of a stage that is not done
    progress: dict[str, Any] | None = None
    command: str = ""


@dataclass(frozen=True)
class RunStatus:
    run_dir: str
    stages: list[StageStatus]
    loss: float | None
    served: list[dict[str, Any]]
    next_command: str


def read_status(run_dir: Path) -> RunStatus:
    stages = [_stage_status(run_dir, script, output) for script, output in STAGES.items()]
    return RunStatus(str(run_dir), stages, _last_loss(run_dir), _served(run_dir), _next_command(stages))


def _stage_status(run_dir: Path, script: str, output: str) -> StageStatus:
    out_dir = run_dir / output
    if manifest.is_complete(out_dir):
        done = manifest.read_manifest(out_dir)
        return StageStatus(script, output, "done", done.counts, _bytes_of(out_dir), done.seconds, command=done.command)
    state = manifest.read_run_state(out_dir) if out_dir.is_dir() else None
    if state is None:
        return StageStatus(script, output, "absent", {}, 0)
    progress = read_progress(out_dir)
    return StageStatus(
        script,
        output,
        _liveness(state, progress),
        {},
        _bytes_of(out_dir),
        who=f"pid {state.pid} on {state.host}",
        progress=progress,
        command=state.command,
    )


def _liveness(state: manifest.RunState, progress: dict[str, Any] | None) -> State:
    if state.host == socket.gethostname():
        return "running" if _is_alive(state) else "interrupted"
    reported = progress["time"] if progress else 0.0
    return "running" if time.time() - reported < STALE_SECONDS else "stale"


def _is_alive(state: manifest.RunState) -> bool:
    """A process of that number that is older than the record: a number that was given out again is younger."""
    try:
        created = psutil.Process(state.pid).create_time()
    except psutil.Error:
        return False
    return created <= time.mktime(time.strptime(state.started[:19], "%Y-%m-%dT%H:%M:%S")) + 1


def _bytes_of(out_dir: Path) -> int:
    """Bytes of all files below; those that vanish while we look don't count."""
    total = 0
    for folder, _, names in os.walk(out_dir):
        for name in names:
            try:
                total += (Path(folder) / name).lstat().st_size
            except FileNotFoundError:
                continue
    return total


def _last_loss(run_dir: Path) -> float | None:
    """Loss of the last training step in the log."""
    path = run_dir / checkpoints.DIR_NAME / checkpoints.LOG_FILE
    if not path.is_file():
        return None
    for line in reversed(path.read_text(encoding="utf-8").splitlines()[-200:]):
        found = re.search(r'"loss": ([0-9.eE+-]+)', line)
        if found:
            return float(found[1])
    return None


def _served(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / STAGES["05_convert_checkpoint"] / REPORT_NAME
    try:
        return json.loads(path.read_text(encoding="utf-8"))["runs"]
    except (OSError, json.JSONDecodeError, KeyError):
        return []


def _next_command(stages: Sequence[StageStatus]) -> str:
    """The command of the first stage that is not done; nothing while one is running or when all are done."""
    config = next((found[1] for s in stages if (found := re.search(r"--config[ =](\S+)", s.command))), "configs/X.yaml")
    for stage in stages:
        if stage.state == "running":
            return ""
        if stage.state != "done":
            return stage.command or f"python {stage.script}.py --config {config}"
    return ""


def render(status: RunStatus) -> Table:
    table = Table(title=status.run_dir, title_justify="left")
    for name in ("stage", "state", "time", "on disk", "what"):
        table.add_column(name, justify="right" if name in ("time", "on disk") else "left")
    for stage in status.stages:
        seconds = format_duration(stage.seconds) if stage.seconds is not None else ""
        size = format_bytes(stage.bytes) if stage.bytes else ""
        table.add_row(stage.script, stage.state, seconds, size, _what(stage))
    total = sum(s.seconds or 0.0 for s in status.stages)
    table.add_section()
    table.add_row("all", "", format_duration(total), format_bytes(sum(s.bytes for s in status.stages)), _result(status))
    if status.next_command:
        table.caption = f"next: {status.next_command}"
    return table


def _what(stage: StageStatus) -> str:
    if stage.progress and stage.state != "done":
        p = stage.progress
        left = format_duration((p["total"] - p["done"]) / p["rate"]) if p["rate"] > 0 else "unknown"
        return (
            f"{stage.who}: {format_count(p['done'])} of {format_count(p['total'])} {p['unit']}, "
            f"{p['rate']:,.1f}/s, {left} left"
        )
    shown = {key: value for key, value in stage.counts.items() if isinstance(value, int | float | str)}
    parts = [f"{key} {_number(value)}" for key, value in list(shown.items())[:6]]
    return ", ".join(parts) or stage.who


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return format_count(value) if isinstance(value, int) else f"{value:.3f}"


def _result(status: RunStatus) -> str:
    lines = [
        f"{run['prompt_set']}: acceptance length {run['acceptance_length']:.3f} at {run['num_draft_tokens']} draft "
        f"tokens, by position {', '.join(f'{share:.3f}' for share in run['acceptance_by_position'])}"
        for run in status.served
    ]
    if not lines and status.loss is not None:
        lines = [f"last loss {status.loss:.4f}"]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m common.status", description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="run.dir of the configuration")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--watch", action="store_true", help="redraw every two seconds until Ctrl-C")
    arguments = parser.parse_args(argv)
    if not arguments.run_dir.is_dir():
        parser.exit(2, f"{arguments.run_dir}: no such run directory\n")
    try:
        return _show(arguments)
    except PipelineError as error:
        parser.exit(2, f"{error}\n")
    except KeyboardInterrupt:
        return 0


def _show(arguments: argparse.Namespace) -> int:
    if arguments.json:
        sys.stdout.write(json.dumps(dataclasses.asdict(read_status(arguments.run_dir)), indent=2) + "\n")
        return 0
    console = Console(width=None if sys.stdout.isatty() else 140)
    if not arguments.watch:
        console.print(render(read_status(arguments.run_dir)))
        return 0
    with Live(render(read_status(arguments.run_dir)), console=console) as live:
        while True:
            time.sleep(WATCH_SECONDS)
            live.update(render(read_status(arguments.run_dir)))


if __name__ == "__main__":
    sys.exit(main())
