"""Stage 5 as the operator meets it: what it leaves behind, what it refuses, and broken exports caught without vLLM."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common import export
from common.manifest import read_manifest, verify_outputs
from tests.train_rig import make_run

stage = importlib.import_module("05_convert_checkpoint")
OFF = ("--export.serve_check", "false")


def train(path: Path, *flags: str) -> None:
    for name in ("03_build_vocab_mapping", "04_train"):
        assert importlib.import_module(name).main(["--config", str(path), *flags]) == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The YAML of a run whose tiny draft is trained; its map is no identity."""
    path = make_run(tmp_path_factory.mktemp("run"), vocab_size=48, num_epochs=1)
    train(path)
    return path


def convert(trained: Path, out: Path, *flags: str) -> int:
    """Stage 5 over these inputs, into a run directory of its own."""
    if not out.exists():
        out.mkdir()
        for name in ("samples", "hidden_states", "vocab_mapping", "checkpoints"):
            (out / name).symlink_to(trained.parent / "run" / name)
    return stage.main(["--config", str(trained), "--run.dir", str(out), *flags])


@pytest.mark.parametrize("layout", ["speculators", "llama_eagle3"])
def test_a_run_leaves_exactly_its_files(trained, tmp_path, layout):
    assert convert(trained, tmp_path / "run", *OFF, "--export.format", layout) == 0
    draft_dir = tmp_path / "run" / "draft"
    expected = {"config.json", "model.safetensors", "README.md", "manifest.json", "run_state.json"}
    assert {path.name for path in draft_dir.iterdir()} == expected
    verify_outputs(draft_dir, read_manifest(draft_dir))


def test_a_second_run_does_nothing_and_another_format_is_refused(trained, tmp_path, caplog):
    assert convert(trained, tmp_path / "run", *OFF) == 0
    assert convert(trained, tmp_path / "run", *OFF) == 0
    assert "is complete with these inputs and settings" in caplog.text
    assert convert(trained, tmp_path / "run", *OFF, "--export.format", "llama_eagle3") == 2
    assert "export.format: was 'speculators', is 'llama_eagle3'" in caplog.text


def test_the_same_checkpoint_gives_the_same_bytes(trained, tmp_path):
    for name in ("one", "two"):
        assert convert(trained, tmp_path / name, *OFF) == 0
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "one/draft" / file).read_bytes() == (tmp_path / "two/draft" / file).read_bytes()


def test_an_interrupted_run_starts_over_and_removes_only_what_it_owns(trained, tmp_path, monkeypatch):
    def stop(*_args, **_kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stage, "prove_round_trip", stop)
        assert convert(trained, tmp_path / "run", *OFF) == 130
    draft_dir = tmp_path / "run" / "draft"
    assert not (draft_dir / "manifest.json").exists()
    for name in ("serving_report.json", "notes.txt"):
        (draft_dir / name).write_text("{}")
    assert convert(trained, tmp_path / "run", *OFF) == 0
    assert (draft_dir / "notes.txt").exists() and not (draft_dir / "serving_report.json").exists()


def test_check_loads_nothing_and_writes_nothing(trained, tmp_path, capsys):
    assert convert(trained, tmp_path / "run", "--check", "--export.num_draft_tokens", "[1,3,5]") == 0
    assert not (tmp_path / "run" / "draft").exists()
    assert "engines" in capsys.readouterr().out


def test_a_draft_that_was_warm_started_with_its_own_map_is_exported(trained, tmp_path, caplog):
    assert convert(trained, tmp_path / "first", *OFF) == 0
    path = make_run(tmp_path, vocab_size=40, num_epochs=1, max_steps=1)
    train(path, "--train.init_from", str(tmp_path / "first" / "draft"))
    assert stage.main(["--config", str(path), *OFF]) == 0
    assert len(export.read_draft(tmp_path / "run" / "draft").tensors["d2t"]) == 48


# ---- refusals ----


def refused(trained: Path, tmp_path: Path, caplog, *flags: str) -> str:
    assert convert(trained, tmp_path / "run", *flags) == 2
    assert not (tmp_path / "run" / "draft" / "manifest.json").exists()
    return caplog.text


def test_a_run_without_checkpoints_names_the_stage_to_run(tmp_path, caplog):
    path = make_run(tmp_path)
    assert stage.main(["--config", str(path), *OFF]) == 2
    assert "run 04_train.py" in caplog.text and "03_build_vocab_mapping" in caplog.text
    assert not (tmp_path / "run" / "draft").exists()


def test_an_unknown_checkpoint_is_refused_with_those_that_exist(trained, tmp_path, caplog):
    assert "use one of best, last, 0" in refused(trained, tmp_path, caplog, *OFF, "--export.checkpoint", "7")


def test_a_map_rebuilt_after_training_is_refused(tmp_path, caplog):
    path = make_run(tmp_path, vocab_size=48, num_epochs=1)
    train(path)
    again = importlib.import_module("03_build_vocab_mapping")
    assert again.main(["--config", str(path), "--vocab.size", "40", "--overwrite"]) == 0
    assert stage.main(["--config", str(path), *OFF]) == 2
    assert "the artifacts don't descend from the same vocab_mapping" in caplog.text


def test_another_verifier_is_refused(trained, tmp_path, caplog):
    other = make_run(tmp_path / "other", seed=1).parent / "verifier"
    (other / "config.json").write_text((other / "config.json").read_text().replace("1e-06", "1e-05"))
    text = refused(trained, tmp_path, caplog, *OFF, "--verifier.path", str(other))
    assert "was made with another verifier" in text


def test_a_serve_check_without_prompts_is_refused(tmp_path, caplog):
    path = make_run(tmp_path, num_val=0, num_epochs=1)
    train(path)
    assert stage.main(["--config", str(path)]) == 2
    assert "names no prompts, and there is no validation split" in caplog.text
    assert stage.main(["--config", str(path), "--export.prompt_sets", '["val"]']) == 2
    assert "val is empty: no conversation was held out" in caplog.text


def test_a_prompt_file_that_is_absent_is_refused(trained, tmp_path, caplog):
    flags = ("--export.prompt_sets", '["nowhere/prompts.jsonl"]')
    assert "nowhere/prompts.jsonl does not exist" in refused(trained, tmp_path, caplog, *flags)


def test_an_imported_draft_has_no_validation_split(trained, tmp_path, caplog):
    assert convert(trained, tmp_path / "first", *OFF) == 0
    flags = ("--import", str(tmp_path / "first" / "draft"), "--export.prompt_sets", '["val"]')
    assert "an imported draft has no validation split" in refused(trained, tmp_path, caplog, *flags)


# ---- broken exports ----


def on_config(change):
    def apply(draft_dir: Path) -> None:
        file = draft_dir / "config.json"
        config = json.loads(file.read_text())
        change(config)
        file.write_text(json.dumps(config))

    return apply


def on_tensor(name, change):
    def apply(draft_dir: Path) -> None:
        file = draft_dir / "model.safetensors"
        tensors = load_file(file)
        changed = change(tensors)
        tensors = {key: t for key, t in tensors.items() if key != name} | ({} if changed is None else {name: changed})
        save_file(tensors, file)

    return apply


def lose_rope(config):
    shape = config["transformer_layer_config"]
    config["transformer_layer_config"] = {key: value for key, value in shape.items() if "rope" not in key}


def set_rope(config):
    config["transformer_layer_config"]["rope_parameters"]["rope_theta"] = 500.0


def with_duplicate(tensors):
    d2t = tensors["d2t"].clone()
    d2t[7] = d2t[6] - 1
    return d2t


IDS = "eagle_aux_hidden_state_layer_ids"
BROKEN = {
    "layer ids off by one": (on_config(lambda c: c.update({IDS: [0, 1, 2]})), "reads aux layers"),
    "layer ids absent": (on_config(lambda c: c.pop(IDS)), f"has no {IDS}"),
    "layer ids reordered": (on_config(lambda c: c.update({IDS: [2, 1, 3]})), "reads aux layers"),
    "layer ids with the last": (on_config(lambda c: c.update({IDS: [1, 2, 3, 4]})), "reads aux layers"),
    "d2t absolute": (on_tensor("d2t", lambda t: t["d2t"] + torch.arange(48)), "leads to verifier id"),
    "d2t zero": (on_tensor("d2t", lambda t: torch.zeros_like(t["d2t"])), "leads to verifier id"),
    "d2t with a duplicate": (on_tensor("d2t", with_duplicate), r"d2t[7] leads to verifier id"),
    "d2t int32": (on_tensor("d2t", lambda t: t["d2t"].int()), "d2t is int32"),
    "d2t missing": (on_tensor("d2t", lambda t: None), "lacks tensors that its config asks for: d2t"),
    "norm flag flipped": (on_config(lambda c: c.update(norm_before_residual=False)), "vLLM reads False"),
    "norm flag lost": (on_config(lambda c: c.pop("norm_before_fc")), "has no norm_before_fc"),
    "rope theta lost": (on_config(lose_rope), "has no rope_theta"),
    "rope theta changed": (on_config(set_rope), "rope rope_theta is 10000.0, vLLM reads 500.0"),
    "head rows permuted": (
        on_tensor("lm_head.weight", lambda t: t["lm_head.weight"].roll(1, 0)),
        "lm_head row 0 is not",
    ),
    "other embeddings": (
        on_tensor("embed_tokens.weight", lambda t: t["embed_tokens.weight"].flip(0)),
        "another verifier",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_export_is_refused_before_a_server_loads_it(trained, tmp_path, caplog, monkeypatch, fault):
    spoil, words = BROKEN[fault]
    write = export.write_draft

    def write_broken(out_dir, *args, **kwargs):
        paths = write(out_dir, *args, **kwargs)
        spoil(out_dir)
        return paths

    monkeypatch.setattr(export, "write_draft", write_broken)
    assert words in refused(trained, tmp_path, caplog, *OFF)


@pytest.mark.parametrize("change", [{"norm_before_residual": False}, {"norm_output": True}])
def test_logits_tell_what_the_config_lint_did_not(trained, tmp_path, caplog, monkeypatch, change):
    """With the lint off, a flipped flag still fails the comparison of logits."""
    write = export.write_draft

    def write_broken(out_dir, *args, **kwargs):
        paths = write(out_dir, *args, **kwargs)
        on_config(lambda config: config.update(change))(out_dir)
        return paths

    monkeypatch.setattr(export, "write_draft", write_broken)
    monkeypatch.setattr(export, "config_faults", lambda *_args: [])
    assert "differ from the checkpoint's at TTT step" in refused(trained, tmp_path, caplog, *OFF)
