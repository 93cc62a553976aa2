"""Stage 4 as the operator meets it: what it leaves behind, what it refuses, and runs that are ended from outside."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from safetensors.torch import load_file

from common import checkpoints, hidden_states, samples
from common import vocab_mapping as vm
from common.manifest import read_manifest, verify_outputs
from tests import train_rig
from tests.conftest import ROOT

stage = importlib.import_module("04_train")
vocab = importlib.import_module("03_build_vocab_mapping")
ARTIFACTS = (samples.DIR_NAME, hidden_states.DIR_NAME, vm.DIR_NAME)


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """The YAML of a run that stage 4 can start from."""
    path = train_rig.make_run(tmp_path_factory.mktemp("ready"), num_train=12, num_val=4, vocab_size=96)
    assert vocab.main(["--config", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def finished(ready, tmp_path_factory):
    """The run directory of an uninterrupted run."""
    run_dir = link(ready, tmp_path_factory.mktemp("finished"))
    assert run(ready, run_dir) == 0
    return run_dir


def link(ready, run_dir):
    """A run directory of its own, over the inputs of `ready`."""
    for name in ARTIFACTS:
        (run_dir / name).symlink_to(ready.parent / "run" / name)
    return run_dir


def run(path, run_dir, *flags):
    return stage.main(["--config", str(path), "--run.dir", str(run_dir), *flags])


def weights(run_dir, number=1):
    return load_file(run_dir / "checkpoints" / str(number) / checkpoints.STATE_DIR / checkpoints.MASTERS_FILE)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- a run


def test_a_run_leaves_exactly_its_files(finished):
    out_dir = finished / "checkpoints"
    draft = {"config.json", "config.py", "model.safetensors", "val_metrics.json"}
    exact = {"masters.safetensors", "optimizer.pt", "scheduler.pt", "position.json", "random.pt"}
    assert {str(path.relative_to(out_dir)) for path in out_dir.rglob("*") if not path.is_dir()} == {
        *("manifest.json", "run_state.json", "training_log.jsonl"),
        *(f"0/{name}" for name in draft),
        *(f"1/{name}" for name in draft),
        *(f"1/exact_state/{name}" for name in exact),
    } | ({"checkpoint_best"} & {path.name for path in out_dir.iterdir() if not path.is_dir()})
    assert (out_dir / "checkpoint_best").is_symlink()
    verify_outputs(out_dir, read_manifest(out_dir))


def test_the_manifest_says_what_was_trained_on(finished):
    manifest = read_manifest(finished / "checkpoints", "04_train")
    assert set(manifest.inputs) == {"samples", "hidden_states", "vocab_mapping"}
    assert manifest.fingerprints["vocab_mapping"] == vm.open_vocab_mapping(finished)[1].fingerprint
    counts = manifest.counts
    assert counts["parts"] == [
        {
            "samples": read_manifest(finished / "samples").digest,
            "hidden_states": read_manifest(finished / "hidden_states").digest,
            "num_samples": 16,
            "steps_at_end": counts["steps"],
            "tokens_at_end": counts["tokens"],
        }
    ]
    assert counts["acceptance_length"] == counts["best_metrics"]["acceptance_length"] >= 1


def test_a_second_run_does_nothing_and_other_settings_are_refused(ready, finished, caplog):
    before = {path: path.stat().st_mtime_ns for path in (finished / "checkpoints").rglob("*")}
    assert run(ready, finished) == 0
    assert "is complete with these inputs and settings" in caplog.text
    assert run(ready, finished, "--train.lr", "0.1") == 2
    assert "train.lr: was 0.003, is 0.1" in caplog.text and "--overwrite" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in (finished / "checkpoints").rglob("*")} == before


def test_overwrite_trains_again_and_keeps_what_is_not_its_own(ready, finished, tmp_path):
    link(ready, tmp_path)
    shutil.copytree(finished / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    (tmp_path / "checkpoints" / "notes.txt").write_text("mine")
    assert run(ready, tmp_path, "--train.num_epochs", "1", "--overwrite") == 0
    assert checkpoints.list_checkpoints(tmp_path / "checkpoints") == [0]
    assert (tmp_path / "checkpoints" / "notes.txt").read_text() == "mine"


def test_check_prints_the_estimate_and_writes_nothing(ready, tmp_path, capsys):
    link(ready, tmp_path)
    assert run(ready, tmp_path, "--check", "--train.max_tokens_per_batch", "40") == 0
    shown = capsys.readouterr().out
    assert "optimiser steps" in shown and "trainable weights" in shown and "are cut to 40" in shown
    assert {path.name for path in tmp_path.iterdir()} == set(ARTIFACTS)


# ---- ended from outside


def start(ready, run_dir, *flags):
    """The script in a process of its own; many epochs, so that there is time to end it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "04_train.py"), "--config", str(ready), "--run.dir", str(run_dir)]
    return subprocess.Popen([*command, *flags], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def wait_for_steps(process, run_dir, steps):
    log = run_dir / "checkpoints" / checkpoints.LOG_FILE
    while process.poll() is None and not (log.exists() and f'"step": {steps},' in log.read_text()):
        time.sleep(0.02)
    assert process.poll() is None, process.stderr.read()


LONG = ("--train.num_epochs", "6", "--train.checkpoint_steps", "1")


@pytest.fixture(scope="module")
def ended(ready, tmp_path_factory):
    """A run ended by SIGTERM, continued, ended by SIGKILL, and continued to its end: (status, stderr, directory)."""
    run_dir = link(ready, tmp_path_factory.mktemp("ended"))
    process = start(ready, run_dir, *LONG)
    wait_for_steps(process, run_dir, 3)
    process.terminate()
    stderr = process.communicate(timeout=120)[1]
    first = (process.returncode, stderr, sorted(path.name for path in (run_dir / "checkpoints").iterdir()))
    last = checkpoints.read_position(run_dir / "checkpoints" / str(newest(run_dir)))
    process = start(ready, run_dir, *LONG)
    wait_for_steps(process, run_dir, last.steps + 3)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=120)
    assert not (run_dir / "checkpoints" / "manifest.json").exists()
    assert run(ready, run_dir, *LONG) == 0
    return first, run_dir


def newest(run_dir):
    return checkpoints.list_checkpoints(run_dir / "checkpoints")[-1]


def test_sigterm_saves_exits_130_and_names_the_way_on(ended):
    (status, stderr, names), _ = ended
    assert status == 130
    assert "interrupted; the same command resumes it" in stderr and "Traceback" not in stderr
    assert "manifest.json" not in names and "0" in names


def test_a_run_ended_by_sigterm_and_by_sigkill_has_the_weights_of_one_that_was_not(ready, ended, tmp_path):
    _, run_dir = ended
    whole = link(ready, tmp_path)
    assert run(ready, whole, *LONG) == 0
    assert equal(weights(run_dir, 5), weights(whole, 5))
    lines = [json.loads(line) for line in (run_dir / "checkpoints" / checkpoints.LOG_FILE).read_text().splitlines()]
    steps = [line["step"] for line in lines if "step" in line]
    assert steps == list(range(1, read_manifest(whole / "checkpoints").counts["steps"] + 1))


# ---- several processes


def torchrun(ready, run_dir, *flags):
    """Stage 4 in two processes with gloo: (exit status, stderr)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "04_train.py"), "--config", str(ready), "--run.dir", str(run_dir), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr


@pytest.mark.slow
def test_two_ranks_train_what_one_process_with_twice_the_accumulation_does(ready, finished, tmp_path):
    for name in ("ranks", "alone"):
        (tmp_path / name).mkdir()
    ranks, alone = link(ready, tmp_path / "ranks"), link(ready, tmp_path / "alone")
    status, stderr = torchrun(ready, ranks)
    assert status == 0, stderr[-3000:]
    assert run(ready, alone, "--train.accumulation", "2") == 0
    of_ranks, of_one = weights(ranks), weights(alone)
    assert of_ranks.keys() == of_one.keys()
    for name, weight in of_one.items():
        torch.testing.assert_close(of_ranks[name], weight, rtol=1e-4, atol=1e-5, msg=name)
    other = weights(finished)  # the same without accumulation
    assert any((other[name] - weight).abs().max() > 1e-3 for name, weight in of_one.items())
    counts = [read_manifest(run_dir / "checkpoints").counts for run_dir in (ranks, alone)]
    assert counts[0]["steps"] == counts[1]["steps"] and counts[0]["tokens"] == counts[1]["tokens"]
    assert counts[0]["acceptance_length"] == pytest.approx(counts[1]["acceptance_length"], abs=1e-3)
    lines = (ranks / "checkpoints" / checkpoints.LOG_FILE).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "step" in line] == list(range(1, counts[0]["steps"] + 1))


# ---- refusals


@pytest.fixture
def copied(ready, tmp_path):
    """A run whose inputs may be broken."""
    for name in ARTIFACTS:
        shutil.copytree(ready.parent / "run" / name, tmp_path / name)
    return tmp_path


def change_yaml(ready, run_dir, **sections):
    config = yaml.safe_load(ready.read_text())
    for name, keys in sections.items():
        config[name] = config.get(name, {}) | keys
    path = run_dir / "changed.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


SETTINGS = {
    "another width": (
        {"draft": {"hidden_size": 64}},
        "draft.hidden_size: 64; the verifier has 32, the stored states 32",
    ),
    "heads that don't divide": (
        {"draft": {"num_key_value_heads": 3}},
        "draft.num_key_value_heads: 4 query heads don't divide into 3 key heads",
    ),
    "both norms": (
        {"draft": {"norm_before_fc": True, "fc_norm": True}},
        "draft.fc_norm: excludes draft.norm_before_fc",
    ),
    "another vocabulary": (
        {"vocab": {"size": 64}},
        "vocab_mapping was built for 96, the configuration says 64",
    ),
    "other layers": ({"extract": {"aux_layer_ids": [1, 2]}}, "extract.aux_layer_ids: [1, 2]; the stored states are of"),
    "an unknown loss": ({"train": {"loss": "hinge"}}, "train.loss:"),
    "shards": ({"train": {"fsdp": True}}, "train.fsdp: checkpoints are written by the first rank"),
    "a round and a warm start": (
        {"train": {"init_from": "nowhere", "continue_from": "nowhere"}},
        "train.init_from: excludes train.continue_from",
    ),
    "two starts": (
        {"train": {"init_from": "nowhere", "init_verifier_layer": 1}},
        "train.init_verifier_layer: excludes train.init_from and train.continue_from",
    ),
    "a layer that the verifier hasn't": (
        {"train": {"init_verifier_layer": 4}},
        "train.init_verifier_layer: 4; the verifier has layers 0 to 3",
    ),
    "a round without one schedule": (
        {"train": {"continue_from": "nowhere"}},
        "train.total_steps: rounds need one schedule",
    ),
    "an earlier draft that is not there": ({"train": {"init_from": "nowhere"}}, "nowhere lacks config.json"),
}


@pytest.mark.parametrize(("sections", "words"), SETTINGS.values(), ids=SETTINGS.keys())
def test_settings_that_cannot_work_are_refused(ready, tmp_path, caplog, sections, words):
    link(ready, tmp_path)
    assert run(change_yaml(ready, tmp_path, **sections), tmp_path) == 2
    assert words in caplog.text
    assert not (tmp_path / "checkpoints").exists()


def test_a_logger_that_is_not_installed_is_refused(ready, tmp_path, caplog):
    link(ready, tmp_path)
    absent = next(name for name in ("wandb", "trackio", "mlflow") if importlib.util.find_spec(name) is None)
    assert run(ready, tmp_path, "--train.loggers", f'["{absent}"]') == 2
    assert f"train.loggers: {absent} is not installed" in caplog.text


def rewrite_split(run_dir, split):
    """All samples in one split."""
    path = run_dir / samples.DIR_NAME / samples.FILE_NAME
    rows = [
        samples.Sample(s.input_ids, s.loss_mask, s.conversation_id, split, s.source)
        for s in samples.Samples(path, None)
    ]
    samples.write_samples(path.parent, rows)


def lose_a_sample(run_dir):
    path = run_dir / samples.DIR_NAME / samples.FILE_NAME
    samples.write_samples(path.parent, list(samples.Samples(path, None))[:-1])


def lose_the_manifest(run_dir):
    (run_dir / hidden_states.DIR_NAME / "manifest.json").unlink()


def descend_from_other_samples(run_dir):
    change_manifest(run_dir / hidden_states.DIR_NAME, inputs={"samples": "0" * 64})


def come_from_another_verifier(run_dir):
    was = read_manifest(run_dir / hidden_states.DIR_NAME).fingerprints
    change_manifest(run_dir / hidden_states.DIR_NAME, fingerprints=was | {"verifier": "0" * 64})


def change_manifest(out_dir, **fields):
    path = out_dir / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


INPUTS = {
    "no training split": (lambda d: rewrite_split(d, "val"), (), "samples: the training split has no supervised token"),
    "nothing to judge by": (
        lambda d: rewrite_split(d, "train"),
        ("--train.early_stop", "2"),
        "train.early_stop: there is no validation split to judge by",
    ),
    "a sample less": (lose_a_sample, (), "16 samples have states"),
    "states that are not finished": (lose_the_manifest, (), "has no manifest"),
    "states of other samples": (
        descend_from_other_samples,
        (),
        "the artifacts don't descend from the same samples",
    ),
    "states of another verifier": (come_from_another_verifier, (), "hidden_states: was made with another verifier"),
}


@pytest.mark.parametrize(("damage", "flags", "words"), INPUTS.values(), ids=INPUTS.keys())
def test_inputs_that_do_not_belong_together_are_refused(ready, copied, caplog, damage, flags, words):
    damage(copied)
    assert run(ready, copied, *flags) == 2
    assert words in caplog.text
    assert not (copied / "checkpoints").exists()


def test_everything_that_is_wrong_is_said_at_once(ready, copied, caplog):
    lose_the_manifest(copied)
    path = change_yaml(ready, copied, draft={"num_key_value_heads": 3}, train={"loss": "hinge"})
    assert run(path, copied) == 2
    assert "3 problems" in caplog.text


def rewrite_states(ready, run_dir, change):
    """All data_N.pt again, with `change(last hidden states [T, D])`."""
    for path in (run_dir / hidden_states.DIR_NAME).glob("data_*.pt"):
        content = torch.load(path, weights_only=True)
        content["hidden_states"][-1] = change(content["hidden_states"][-1])
        torch.save(content, path)


def test_states_that_do_not_explain_the_text_stop_the_run_before_its_first_step(ready, copied, caplog):
    rewrite_states(ready, copied, lambda last: last.roll(1, 0))
    assert run(ready, copied) == 2
    assert "the verifier's head doesn't explain the text" in caplog.text
    assert "the states stand one token late" in caplog.text
    assert not (copied / "checkpoints" / checkpoints.LOG_FILE).exists()


def test_a_torn_file_of_states_stops_the_run_with_its_name_or_is_left_out_and_counted(ready, copied, caplog):
    (copied / hidden_states.DIR_NAME / "data_5.pt").write_bytes(b"torn")
    assert run(ready, copied) == 2
    assert "data_5.pt: can't be read" in caplog.text
    assert run(ready, copied, "--train.max_unreadable_samples", "2", "--overwrite") == 0
    assert read_manifest(copied / "checkpoints").counts["unreadable_samples"] == 2  # once an epoch


# ---- warm starts and rounds


def test_a_warm_start_brings_its_map_and_the_manifest_says_so(ready, finished, tmp_path, caplog):
    other = train_rig.make_run(tmp_path, num_train=12, num_val=4, vocab_size=64)
    assert vocab.main(["--config", str(other)]) == 0
    earlier = finished / "checkpoints" / "1"
    assert run(other, tmp_path / "run", "--train.init_from", str(earlier), "--train.num_epochs", "1") == 0
    assert "(96 tokens) takes the place of vocab_mapping/ (64 tokens)" in caplog.text
    fingerprints = read_manifest(tmp_path / "run" / "checkpoints").fingerprints
    assert fingerprints["warm_start_vocab_mapping"] == vm.open_vocab_mapping(finished)[1].fingerprint
    saved = load_file(tmp_path / "run" / "checkpoints" / "0" / checkpoints.WEIGHTS_FILE)
    assert torch.equal(saved["d2t"], load_file(earlier / checkpoints.WEIGHTS_FILE)["d2t"])


@pytest.fixture(scope="module")
def first_round(ready, tmp_path_factory):
    run_dir = link(ready, tmp_path_factory.mktemp("first"))
    assert run(ready, run_dir, "--train.num_epochs", "1", "--train.total_steps", "12") == 0
    return run_dir


def next_round(first_round, *flags):
    return ("--train.num_epochs", "1", "--train.total_steps", "12", "--train.continue_from", str(first_round), *flags)


def test_a_round_goes_on_and_its_manifest_lists_the_parts(ready, first_round, tmp_path):
    link(ready, tmp_path)
    assert run(ready, tmp_path, *next_round(first_round)) == 0
    first, second = (read_manifest(d / "checkpoints").counts for d in (first_round, tmp_path))
    assert second["steps"] == 2 * first["steps"] and len(second["parts"]) == 2
    assert second["parts"][0] == first["parts"][0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--train.total_steps", "13"), "train.total_steps: 13; the round before had 12"),
        (("--train.accumulation", "2"), "train.accumulation: 2; the round before had 1"),
        (("--train.optimizer", "muon"), "train.optimizer: muon; the round before had adamw"),
    ],
)
def test_a_round_with_another_schedule_is_refused(ready, first_round, tmp_path, caplog, flags, words):
    link(ready, tmp_path)
    assert run(ready, tmp_path, *next_round(first_round), *flags) == 2
    assert words in caplog.text


def test_a_round_with_another_map_is_refused(ready, first_round, copied, caplog):
    assert vocab.main(["--config", str(ready), "--run.dir", str(copied), "--vocab.size", "64", "--overwrite"]) == 0
    assert run(ready, copied, "--vocab.size", "64", *next_round(first_round)) == 2
    assert "was trained with another vocab_mapping" in caplog.text
