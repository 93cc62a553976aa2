"""The runner: exit status, the table of output directories, the lock, the manifest written last."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import PipelineError, Problem, Problems
from common.files import write_text
from common.manifest import Manifest, read_manifest, require_same, verify_outputs
from common.stage import Outcome, Stage, run_stage

ROOT = Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class NoInputs:
    parents: dict = dataclasses.field(default_factory=dict)
    fingerprints: dict = dataclasses.field(default_factory=lambda: {"verifier": "abc"})


def write_words(config, inputs, out_dir):
    write_text(out_dir / "words.txt", f"{config.prepare.max_tokens}\n")
    return Outcome({"words": 1}, [out_dir / "words.txt"])


def stage(**changes) -> Stage:
    made = Stage(
        script="01_words",
        output="samples",
        sections=("prepare",),
        description="Writes words.",
        check=lambda config: NoInputs(),
        estimate=lambda config, inputs: {"rows": "1"},
        run=write_words,
        owns=("words.txt",),
        next_script="02_letters",
    )
    return dataclasses.replace(made, **changes)


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    """Words are nothing to draw."""
    monkeypatch.setattr("common.stage._write_report", lambda run_dir: None)


@pytest.fixture
def argv(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(f"run: {{dir: {tmp_path}/run}}\n")
    return ["--config", str(path)]


@pytest.fixture
def out_dir(tmp_path):
    return tmp_path / "run" / "samples"


def test_a_complete_run_leaves_the_output_the_record_and_the_manifest(argv, out_dir):
    assert run_stage(stage(), argv) == 0
    assert sorted(p.name for p in out_dir.iterdir()) == ["manifest.json", "run_state.json", "words.txt"]
    manifest = read_manifest(out_dir)
    verify_outputs(out_dir, manifest)
    assert manifest.counts == {"words": 1}
    assert manifest.settings["prepare.max_tokens"] == 4096
    assert manifest.packages["torch"].startswith("2.")


def test_the_next_command_is_said_at_the_end(argv, caplog):
    run_stage(stage(), argv)
    assert f"next: python 02_letters.py --config {argv[1]}" in caplog.text


def test_a_report_that_fails_leaves_the_stage_done(argv, out_dir, monkeypatch, caplog):
    monkeypatch.undo()
    monkeypatch.setattr("common.report.write_report", lambda run_dir: 1 // 0)
    assert run_stage(stage(), argv) == 0
    assert "the report could not be written: integer division" in caplog.text
    assert (out_dir / "manifest.json").exists()


def test_a_second_run_does_nothing(argv, out_dir, caplog):
    run_stage(stage(), argv)
    before = (out_dir / "manifest.json").stat().st_mtime_ns
    assert run_stage(stage(run=lambda *_: pytest.fail("ran again")), argv) == 0
    assert (out_dir / "manifest.json").stat().st_mtime_ns == before
    assert "is complete with these inputs and settings" in caplog.text


def test_other_settings_are_refused_and_named(argv, out_dir, caplog):
    run_stage(stage(), argv)
    assert run_stage(stage(), [*argv, "--prepare.max_tokens", "8"]) == 2
    assert "prepare.max_tokens: was 4096, is 8" in caplog.text
    assert "--overwrite" in caplog.text
    assert (out_dir / "words.txt").read_text() == "4096\n"


def test_overwrite_removes_what_the_stage_owns_and_nothing_else(argv, out_dir):
    run_stage(stage(), argv)
    (out_dir / "mine.txt").write_text("keep")
    assert run_stage(stage(), [*argv, "--prepare.max_tokens", "8", "--overwrite"]) == 0
    assert (out_dir / "words.txt").read_text() == "8\n"
    assert (out_dir / "mine.txt").read_text() == "keep"


def interrupted(config, inputs, out_dir):
    write_text(out_dir / "words.txt", "half")
    raise KeyboardInterrupt


def test_an_interrupted_run_has_status_130_and_resumes(argv, out_dir, caplog):
    assert run_stage(stage(run=interrupted), argv) == 130
    assert not (out_dir / "manifest.json").exists()
    assert run_stage(stage(), argv) == 0
    assert "resumes" in caplog.text
    assert (out_dir / "manifest.json").exists()


def test_an_interrupted_run_with_other_settings_is_refused(argv, out_dir, caplog):
    run_stage(stage(run=interrupted), argv)
    assert run_stage(stage(), [*argv, "--prepare.max_tokens", "8"]) == 2
    assert "prepare.max_tokens: was 4096, is 8" in caplog.text


def test_a_deleted_manifest_does_not_hide_other_settings(argv, out_dir, caplog):  # field fault H2
    run_stage(stage(), argv)
    (out_dir / "manifest.json").unlink()
    assert run_stage(stage(), [*argv, "--prepare.max_tokens", "8"]) == 2
    assert "prepare.max_tokens: was 4096, is 8" in caplog.text


def test_files_of_unknown_origin_are_refused(argv, out_dir, caplog):
    out_dir.mkdir(parents=True)
    (out_dir / "words.txt").write_text("?")
    assert run_stage(stage(), argv) == 2
    assert "no record of the run that wrote them" in caplog.text


def test_a_stage_that_cannot_resume_starts_over(argv, out_dir):
    def check_empty(config, inputs, out_dir):
        assert not (out_dir / "words.txt").exists()
        return write_words(config, inputs, out_dir)

    run_stage(stage(run=interrupted), argv)
    assert run_stage(stage(run=check_empty, resumable=False), argv) == 0


def test_a_key_that_this_version_added_counts_with_its_default(argv, out_dir, caplog):
    run_stage(stage(), argv)
    path = out_dir / "manifest.json"
    record = json.loads(path.read_text())
    del record["settings"]["prepare.max_tokens"]
    path.write_text(json.dumps(record))
    assert run_stage(stage(), argv) == 0
    assert run_stage(stage(), [*argv, "--prepare.max_tokens", "8"]) == 2
    assert "prepare.max_tokens: was 4096, is 8" in caplog.text


def test_another_verifier_is_refused(argv, out_dir, caplog):
    run_stage(stage(), argv)
    other = stage(check=lambda config: NoInputs(fingerprints={"verifier": "xyz"}))
    assert run_stage(other, argv) == 2
    assert "fingerprints verifier: was 'abc', is 'xyz'" in caplog.text


def test_all_problems_of_a_check_are_printed_and_nothing_is_created(argv, out_dir, caplog):
    def check(config):
        raise PipelineError(Problem("a", "is wrong", "mend a"), Problem("b", "is wrong too"))

    assert run_stage(stage(check=check), argv) == 2
    assert "01_words: 2 problems\n  a: is wrong\n    fix: mend a\n  b: is wrong too" in caplog.text
    assert not out_dir.parent.exists()


def test_check_prints_the_estimate_and_creates_nothing(argv, out_dir, capsys):
    assert run_stage(stage(), [*argv, "--check"]) == 0
    assert "rows" in capsys.readouterr().out
    assert not out_dir.parent.exists()


def test_print_config_shows_the_resolved_values(argv, capsys):
    assert run_stage(stage(), [*argv, "--prepare.max_tokens", "8", "--print-config"]) == 0
    assert "max_tokens: 8" in capsys.readouterr().out


def test_a_bug_keeps_its_traceback(argv):
    with pytest.raises(ZeroDivisionError):
        run_stage(stage(run=lambda *_: 1 // 0), argv)


def test_a_full_disk_is_for_the_operator_to_mend(argv, caplog):
    def fill(config, inputs, out_dir):
        raise OSError(28, "No space left on device", "data_3.pt")

    assert run_stage(stage(run=fill), argv) == 2
    assert "data_3.pt: the disk is full" in caplog.text


def test_a_second_run_on_the_same_directory_is_refused(argv, out_dir, caplog):
    def run_again(config, inputs, out_dir):
        code = (
            "import sys; sys.path.insert(0, '.');"
            "from tests.test_stage import stage, run_stage; sys.exit(run_stage(stage(), sys.argv[1:]))"
        )
        second = subprocess.run([sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True, text=True)
        assert second.returncode == 2, second.stderr
        assert "is writing it" in second.stderr
        return write_words(config, inputs, out_dir)

    assert run_stage(stage(run=run_again), argv) == 0


def manifest(**changes) -> Manifest:
    empty = Manifest("s", 1, {}, {}, {}, [], {}, {}, "", "", {}, 0.0, "")
    return dataclasses.replace(empty, **changes)


def test_artifacts_of_different_verifiers_are_told_apart():
    problems = Problems()
    made = {"samples": manifest(fingerprints={"verifier": "a"}), "vocab": manifest(fingerprints={"verifier": "b"})}
    require_same(problems, made)
    assert "don't descend from the same verifier: samples has a, vocab has b" in str(next(iter(problems)))


def test_an_artifact_made_from_other_samples_is_told_apart():
    samples = manifest(settings={"x": 1})
    problems = Problems()
    require_same(problems, {"samples": samples, "hidden_states": manifest(inputs={"samples": samples.digest})})
    assert not problems
    require_same(problems, {"samples": samples, "hidden_states": manifest(inputs={"samples": "older"})})
    assert "samples itself has" in str(next(iter(problems)))


def test_a_digest_ignores_time_and_command_and_sees_the_settings():
    assert manifest(seconds=3.0, command="x").digest == manifest().digest
    assert manifest(settings={"a": 1}).digest != manifest().digest


def test_a_changed_output_is_named(argv, out_dir):
    run_stage(stage(), argv)
    (out_dir / "words.txt").write_text("4097\n")
    with pytest.raises(PipelineError, match=r"words\.txt: differs from its checksum"):
        verify_outputs(out_dir, read_manifest(out_dir))


def test_a_manifest_of_another_schema_is_refused(argv, out_dir):
    run_stage(stage(), argv)
    path = out_dir / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 99}))
    with pytest.raises(PipelineError, match="schema version 99, expected 1"):
        read_manifest(out_dir)
