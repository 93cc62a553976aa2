"""One YAML a run, dotted flags on top, unknown keys named."""

from pathlib import Path

import pytest
import yaml

from common.config import build_parser, known_keys, load_config, parse_invocation
from common.errors import PipelineError

ROOT = Path(__file__).parent.parent


@pytest.fixture
def config_path(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("run: {dir: runs/a}\nprepare: {max_tokens: 77, val_fraction: 0.1}\n")
    return path


def parse(path, *flags):
    return parse_invocation(build_parser("01_prepare_data", ""), ["--config", str(path), *flags])


def test_a_flag_overrides_the_yaml_and_leaves_its_neighbours(config_path):
    config = parse(config_path, "--prepare.max_tokens", "99").config
    assert (config.prepare.max_tokens, config.prepare.val_fraction) == (99, 0.1)


def test_lists_booleans_and_null_can_be_given_as_flags(config_path):
    flags = ["--extract.aux_layer_ids", "2,15,27", "--export.serve_check", "false", "--generate.endpoint", "null"]
    config = parse(config_path, *flags).config
    assert config.extract.aux_layer_ids == [2, 15, 27]
    assert config.export.serve_check is False
    assert config.generate.endpoint is None


def test_an_environment_variable_changes_nothing(config_path, monkeypatch):
    monkeypatch.setenv("PREPARE", '{"max_tokens": 3}')
    monkeypatch.setenv("PREPARE__MAX_TOKENS", "3")
    assert parse(config_path).config.prepare.max_tokens == 77


def test_an_unknown_flag_names_the_closest(config_path):
    with pytest.raises(PipelineError, match=r"unknown flag --prepare\.max_token\n.*did you mean --prepare\.max_tokens"):
        parse(config_path, "--prepare.max_token", "9")


def test_all_faults_of_a_yaml_are_reported_at_once(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("run: {dirr: x}\nprepar: {}\ntrain: {lr: -1}\n")
    with pytest.raises(PipelineError) as error:
        parse(path)
    text = str(error.value)
    assert "unknown key run.dirr\n  fix: did you mean run.dir?" in text
    assert "unknown key prepar\n  fix: did you mean prepare?" in text
    assert "train.lr: Input should be greater than 0, found -1" in text


@pytest.mark.parametrize(("content", "words"), [("a: [", "is not YAML"), ("- 1", "holds a list")])
def test_a_file_that_is_no_configuration_is_named(tmp_path, content, words):
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(PipelineError, match=words):
        load_config(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PipelineError, match="no such file"):
        load_config(tmp_path / "absent.yaml")


def test_keys_without_effect_on_the_bytes_are_left_out_of_the_settings(config_path):
    settings = parse(config_path, "--extract.shard", "2/8").config.settings(["run", "extract"])
    assert "extract.aux_layer_ids" in settings
    assert not settings.keys() & {"extract.shard", "extract.endpoint", "run.dir"}


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_configuration_parses(path):
    config = load_config(path)
    assert yaml.safe_load(path.read_text())["run"]["dir"] == str(config.run.dir)


def test_every_key_has_a_description():
    from common.config import Config

    for section in Config.model_fields.values():
        for key, info in section.annotation.model_fields.items():
            assert info.description, key
    assert "train.ttt_steps" in known_keys()
