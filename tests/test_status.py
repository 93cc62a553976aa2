"""What `python -m common.status` says of runs in every state."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common import status
from common.files import write_json
from common.manifest import Identity, Manifest, OutputFile, RunState, now, write_manifest
from common.progress import Progress, read_progress

ROOT = Path(__file__).parent.parent


def claim(run_dir: Path, output: str, *, pid: int, host: str | None = None) -> None:
    state = RunState("s", Identity({}, {}, {}), host or socket.gethostname(), pid, now(), "python s.py --config c.yaml")
    write_json(run_dir / output / "run_state.json", dataclasses.asdict(state))


def complete(run_dir: Path, output: str) -> None:
    outputs = [OutputFile("a", 1, "x")]
    made = Manifest("s", 1, {}, {}, {}, outputs, {"samples": 7}, {}, "python s.py --config c.yaml", "", {}, 61.0, "")
    write_manifest(run_dir / output, made)


def report(run_dir: Path, output: str, *, age_seconds: float = 0.0) -> None:
    record = {"desc": "extract", "unit": "tokens", "done": 40, "total": 100, "rate": 2.0, "time": time.time()}
    write_json(run_dir / "logs" / f"{output}.progress.json", record | {"time": time.time() - age_seconds})


@pytest.fixture
def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def states(run_dir):
    return [stage.state for stage in status.read_status(run_dir).stages]


def test_an_empty_run_has_five_absent_stages_and_begins_with_the_first(tmp_path):
    assert states(tmp_path) == ["absent"] * 5
    assert status.read_status(tmp_path).next_command == "python 01_prepare_data.py --config configs/X.yaml"


@pytest.mark.parametrize("output", list(status.STAGES.values()))
def test_a_killed_stage_is_interrupted_and_its_command_is_next(tmp_path, dead_pid, output):
    for earlier in status.STAGES.values():
        if earlier == output:
            break
        complete(tmp_path, earlier)
    claim(tmp_path, output, pid=dead_pid)
    report(tmp_path, output)
    found = status.read_status(tmp_path)
    assert next(stage for stage in found.stages if stage.output == output).state == "interrupted"
    assert found.next_command == "python s.py --config c.yaml"


def test_a_living_stage_is_running_with_its_rate_and_nothing_is_next(tmp_path):
    complete(tmp_path, "samples")
    claim(tmp_path, "hidden_states", pid=os.getpid())
    report(tmp_path, "hidden_states")
    found = status.read_status(tmp_path)
    assert (found.stages[1].state, found.next_command) == ("running", "")
    shown = status._what(found.stages[1])
    assert "40 of 100 tokens, 2.0/s, 30 s left" in shown


def test_another_host_is_running_while_it_reports_and_stale_when_it_stops(tmp_path):
    claim(tmp_path, "samples", pid=1, host="elsewhere")
    report(tmp_path, "samples")
    assert states(tmp_path)[0] == "running"
    report(tmp_path, "samples", age_seconds=3600)
    assert states(tmp_path)[0] == "stale"


def test_a_done_stage_is_followed_by_the_next_with_the_same_configuration(tmp_path):
    complete(tmp_path, "samples")
    assert status.read_status(tmp_path).next_command == "python 02_extract_hidden_states.py --config c.yaml"


def test_the_last_loss_and_the_served_acceptance_are_read(tmp_path):
    log = tmp_path / "checkpoints" / "training_log.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text('{"step": 1, "loss": 3.5}\n{"step": 2, "loss": 2.25}\n{"validation": 1}\n')
    entry = {"prompt_set": "val", "acceptance_length": 1.5, "num_draft_tokens": 3, "acceptance_by_position": [0.4, 0.1]}
    write_json(tmp_path / "draft" / "serving_report.json", {"runs": [entry]})
    found = status.read_status(tmp_path)
    assert found.loss == 2.25
    assert "val: acceptance length 1.500 at 3 draft tokens, by position 0.400, 0.100" in status._result(found)


def test_json_holds_the_same(tmp_path, capsys):
    complete(tmp_path, "samples")
    assert status.main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"][0]["counts"] == {"samples": 7}


def test_a_directory_that_is_absent_is_named():
    done = subprocess.run([sys.executable, "-m", "common.status", "absent"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, "absent: no such run directory" in done.stderr) == (2, True)


def test_one_of_several_processes_reports_progress_and_none_leaves_a_file_behind(tmp_path):
    with Progress(tmp_path / "checkpoints", total=4, desc="training", unit="tokens", shown=False) as hidden:
        hidden.update(1)
        with Progress(tmp_path / "checkpoints", total=4, desc="training", unit="tokens") as shown:
            shown.update(3)
    assert read_progress(tmp_path / "checkpoints")["done"] == 3
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["checkpoints.progress.json"]
