"""The runner that all stages share: parse, check, run, manifest.

It knows the order of events and the table of output directories (DESIGN.md); what a stage reads, checks and does is
the stage's own. Exit status: 0 done, 1 a bug (traceback), 2 the operator can mend it, 130 interrupted and resumable.
"""

import argparse
import dataclasses
import errno
import logging
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

import filelock
from rich.console import Console
from rich.table import Table

from common import manifest as records
from common import preflight
from common.config import Config, Invocation, build_parser, default_settings, parse_invocation, print_config
from common.errors import PipelineError, Problem
from common.files import TEMPORARY_SUFFIX, format_count, format_duration
from common.manifest import Identity, Manifest

logger = logging.getLogger("pipeline")

Plan = Literal["run", "resume", "done"]


class Inputs(Protocol):
    """What a stage's `check` opened."""

    @property
    def parents(self) -> Mapping[str, Manifest]: ...

    @property
    def fingerprints(self) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class Outcome:
    """What a stage made. `complete=False`: only this host's part is done, so no manifest is written yet."""

    counts: dict[str, Any]
    outputs: list[Path]
    fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
    complete: bool = True


@dataclass(frozen=True)
class Stage:
    """One numbered script. `check` opens the inputs or raises every problem; `run` does the work in `out_dir`."""

    script: str
    output: str
    sections: tuple[str, ...]
    description: str
    check: Callable[..., Any]  # (config) -> Inputs
    estimate: Callable[..., Mapping[str, str]]  # (config, inputs) -> rows of the --check table
    run: Callable[..., Outcome]  # (config, inputs, out_dir) -> Outcome
    owns: tuple[str, ...]  # globs of what it writes in out_dir, removed by --overwrite and before starting over
    resumable: bool = True
    next_script: str = ""  # the stage that reads this artifact
    add_flags: Callable[[argparse.ArgumentParser], None] | None = None
    # A flag that replaces the run, such as --verify: (invocation, inputs) -> exit status, or None to go on.
    instead: Callable[[Invocation, Any], int | None] | None = None
    lock_name: Callable[[Config], str] | None = None  # where several hosts may share the directory


def run_stage(stage: Stage, argv: Sequence[str] | None = None) -> int:
    """Runs one stage from its command line. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    _log_to_terminal()
    try:
        return _run(stage, argv)
    except PipelineError as error:
        _report(stage.script, error)
        return 2
    except KeyboardInterrupt:
        logger.error("%s: interrupted; the same command resumes it", stage.script)
        return 130
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        what = f"the disk is full: {error}"
        _report(stage.script, PipelineError(Problem(str(error.filename or "disk"), what, "free some, run it again")))
        return 2


def _run(stage: Stage, argv: Sequence[str]) -> int:
    parser = build_parser(stage.script, stage.description)
    if stage.add_flags:
        stage.add_flags(parser)
    invocation = parse_invocation(parser, argv)
    config = invocation.config
    if invocation.print_config:
        sys.stdout.write(print_config(config))
        return 0
    inputs = stage.check(config)
    if stage.instead and (status := stage.instead(invocation, inputs)) is not None:
        return status
    out_dir = config.run.dir / stage.output
    identity = _identity(stage, config, inputs)
    machine = _look_at_the_machine(stage, config, inputs) if not records.is_complete(out_dir) else {}
    if invocation.check:
        _print_estimate(stage, {**stage.estimate(config, inputs), **machine})
        plan_output(stage, out_dir, identity, overwrite=invocation.overwrite)
        return 0
    if not _is_main_process():
        if plan_output(stage, out_dir, identity, overwrite=invocation.overwrite) != "done":
            stage.run(config, inputs, out_dir)
        return 0
    with _only_one(stage, config, out_dir), _log_to_file(config.run.dir, stage.output), _terminable():
        return _run_locked(stage, invocation, inputs, identity, out_dir, argv)


def _look_at_the_machine(stage: Stage, config: Config, inputs: Any) -> Mapping[str, str]:
    """Warns of what works badly here. Raises: PipelineError for what can't work."""
    verifier = getattr(inputs, "verifier", None)
    if verifier is None or not _is_main_process():
        return {}
    warnings, rows = preflight.check_host(stage.script, config, verifier)
    for warning in warnings:
        logger.warning("%s", warning)
    return rows


def _run_locked(
    stage: Stage, invocation: Invocation, inputs: Any, identity: Identity, out_dir: Path, argv: Sequence[str]
) -> int:
    config = invocation.config
    plan = plan_output(stage, out_dir, identity, overwrite=invocation.overwrite)
    if plan == "done":
        counts = records.read_manifest(out_dir).counts
        logger.info("%s: %s is complete with these inputs and settings: %s", stage.script, out_dir, _line(counts))
        return 0
    if invocation.overwrite or (plan == "resume" and not stage.resumable):
        remove_owned(stage, out_dir)
    for name, parent in inputs.parents.items():
        logger.info("%s: reads %s (%s)", stage.script, config.run.dir / name, _line(parent.counts))
    logger.info("%s: %s %s", stage.script, "resumes" if plan == "resume" else "writes", out_dir)
    began = time.monotonic()
    command = shlex.join(["python", f"{stage.script}.py", *argv])
    records.write_run_state(out_dir, stage.script, identity, command)
    outcome = stage.run(config, inputs, out_dir)
    seconds = time.monotonic() - began
    if outcome.complete:
        _write_manifest(stage, config, identity, outcome, out_dir, seconds, command)
    logger.info("%s: %s in %s: %s", stage.script, out_dir, format_duration(seconds), _line(outcome.counts))
    if outcome.complete:
        _write_report(config.run.dir)
    if stage.next_script and outcome.complete:
        logger.info("next: python %s.py --config %s", stage.next_script, invocation.config_path)
    return 0


def _identity(stage: Stage, config: Config, inputs: Inputs) -> Identity:
    settings = config.settings(stage.sections) | {"run.seed": config.run.seed}
    digests = {name: parent.digest for name, parent in inputs.parents.items()}
    return Identity(settings, digests, dict(inputs.fingerprints))


def _write_manifest(
    stage: Stage,
    config: Config,
    identity: Identity,
    outcome: Outcome,
    out_dir: Path,
    seconds: float,
    command: str,
) -> None:
    manifest = Manifest(
        stage=stage.script,
        schema_version=records.SCHEMA_VERSION,
        settings=identity.settings,
        inputs=identity.inputs,
        fingerprints=identity.fingerprints | outcome.fingerprints,
        outputs=records.describe_outputs(out_dir, outcome.outputs),
        counts=outcome.counts,
        config=config.model_dump(mode="json"),
        command=command,
        commit=records.project_commit(),
        packages=records.package_versions(),
        seconds=round(seconds, 3),
        created=records.now(),
    )
    records.write_manifest(out_dir, manifest)


# ---- the output directory --------------------------------------------------------------------------------------------


def plan_output(stage: Stage, out_dir: Path, identity: Identity, *, overwrite: bool) -> Plan:
    """What DESIGN.md's table of output directories says of this one.

    Raises: PipelineError listing what differs, or naming files of unknown origin; --overwrite mends both.
    """
    if overwrite or not _holds_files(out_dir):
        return "run"
    complete = records.is_complete(out_dir)
    if complete:
        was: Identity | None = _comparable(records.read_manifest(out_dir).identity, identity)
    else:
        state = records.read_run_state(out_dir)
        was = _comparable(state.identity, identity) if state else None
    fix = f"another run.dir, or {stage.script}.py --overwrite, which removes what is there"
    if was is None:
        raise PipelineError(Problem(str(out_dir), "holds files, but no record of the run that wrote them", fix))
    if differences := was.differences(identity):
        what = f"was made with other inputs or settings: {'; '.join(differences)}"
        raise PipelineError(Problem(str(out_dir), what, fix))
    return "done" if complete else "resume"


def _comparable(was: Identity, now: Identity) -> Identity:
    """An earlier record beside today's: without the fingerprints that a run adds at its end, and with the defaults of
    keys that this version added, so that a newer version goes on with an older run.
    """
    settings = default_settings([key for key in now.settings if key not in was.settings]) | was.settings
    known = {key: value for key, value in was.fingerprints.items() if key in now.fingerprints}
    return dataclasses.replace(was, settings=settings, fingerprints=known)


def _holds_files(out_dir: Path) -> bool:
    return out_dir.is_dir() and any(path.name != records.RUN_STATE_NAME for path in out_dir.iterdir())


def remove_owned(stage: Stage, out_dir: Path) -> None:
    """Removes what the stage itself writes, the manifest first, so that no half-removed artifact looks complete."""
    patterns = (records.MANIFEST_NAME, records.RUN_STATE_NAME, f".*{TEMPORARY_SUFFIX}", *stage.owns)
    for pattern in patterns:
        for path in out_dir.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


class _only_one:  # noqa: N801, used as a function
    """Holds the lock of one output directory. Raises: PipelineError when another process holds it."""

    def __init__(self, stage: Stage, config: Config, out_dir: Path) -> None:
        name = stage.lock_name(config) if stage.lock_name else stage.output
        self._out_dir, self._path = out_dir, config.run.dir / "logs" / f"{name}.lock"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = filelock.FileLock(self._path, blocking=False)

    def __enter__(self) -> None:
        try:
            self._lock.acquire()
        except filelock.Timeout:
            state = records.read_run_state(self._out_dir)
            who = f"process {state.pid} on {state.host}, started {state.started}," if state else "another process"
            what = f"{who} is writing it"
            raise PipelineError(Problem(str(self._out_dir), what, "wait for it, or end it, then run again")) from None

    def __exit__(self, *_exc: object) -> None:
        self._lock.release()


def _write_report(run_dir: Path) -> None:
    """The page for people. Whatever is wrong with it, the stage's own work is done and stays done."""
    from common.report import write_report  # plots take a second to import, and only a finished stage draws any

    try:
        logger.info("report: %s", write_report(run_dir))
    except Exception as error:
        logger.warning("the report could not be written: %s", str(error).splitlines()[0] if str(error) else repr(error))
        logging.getLogger("pipeline.report").debug("report", exc_info=True)


# ---- logs and signals ------------------------------------------------------------------------------------------------


def _is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _log_to_terminal() -> None:
    """Our own lines on stderr, rank 0 only; the libraries' go to the log file."""
    logger.setLevel(logging.INFO if _is_main_process() else logging.ERROR)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)


class _log_to_file:  # noqa: N801, used as a function
    """Sends everything that is logged in this process to RUN_DIR/logs/NAME.log as well."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self._path = run_dir / "logs" / f"{name}.log"

    def __enter__(self) -> None:
        self._handler = _LogFile(self._path, encoding="utf-8")
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(self._handler)

    def __exit__(self, *_exc: object) -> None:
        logging.getLogger().removeHandler(self._handler)
        self._handler.close()


class _LogFile(logging.FileHandler):
    """On a full disk a line is lost; logging's own way is a traceback on the terminal for each."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, logging's name
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class _terminable:  # noqa: N801, used as a function
    """SIGTERM ends a stage as Ctrl-C does, so that what is open is closed and the status is 130."""

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGTERM, self._interrupt)

    def _interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def __exit__(self, *_exc: object) -> None:
        signal.signal(signal.SIGTERM, self._before)


def _report(script: str, error: PipelineError) -> None:
    count = len(error.problems)
    lines = [f"{script}: {count} problem{'s' if count > 1 else ''}"]
    lines += ["  " + line for problem in error.problems for line in str(problem).splitlines()]
    logger.error("%s", "\n".join(lines))


def _print_estimate(stage: Stage, rows: Mapping[str, str]) -> None:
    table = Table(title=f"{stage.script} --check", show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, value)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _line(counts: Mapping[str, Any]) -> str:
    shown = [f"{key} {_number(value)}" for key, value in counts.items() if not isinstance(value, dict | list)]
    return ", ".join(shown) or "nothing counted"


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return format_count(value) if isinstance(value, int) else f"{value:.4g}"
