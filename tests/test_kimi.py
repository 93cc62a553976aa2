"""Kimi-K2.5: the shipped configurations against the published facts, and every property that has broken others, on a
tiny verifier of the same shape (tests/tiny_kimi.py)."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from common.config import VerifierSection, load_config
from common.engine import check_can_extract, options_for
from common.errors import PipelineError, Problems
from common.verifier import check_special_tokens, check_weight_files, load_head, load_tokenizer, open_verifier
from common.vocab_mapping import build_vocab_mapping
from tests import tiny_kimi
from tests.conftest import script

ROOT = Path(__file__).parent.parent
CONFIGS = [ROOT / "configs" / name for name in ("kimi_k25_int4.yaml", "kimi_k25_int4_pilot.yaml")]
MEDIA = ("<|media_start|>", "<|media_end|>", "<|media_pad|>")
# The published tokenizer_config.json; the draft sees text only.
SPECIAL = {name: token_id for name, token_id in tiny_kimi.SPECIAL.items() if name not in MEDIA}
FORCED = {name for name in SPECIAL if "tool" in name or "think" in name or name in ("[EOS]", "<|im_end|>")}
NUM_LAYERS, HIDDEN, VOCAB, NUM_BASE = 61, 7168, 163840, 163584


@pytest.fixture(params=CONFIGS, ids=lambda path: path.stem)
def shipped(request):
    return load_config(request.param)


# ---- the shipped configurations ----


def test_the_shipped_configurations_expect_the_published_token_ids(shipped):
    assert shipped.verifier.expected_token_ids == SPECIAL
    assert set(shipped.vocab.forced_tokens) == FORCED and shipped.vocab.size == 32000


def test_the_shipped_configurations_have_the_published_sizes(shipped):
    draft = shipped.draft
    assert (draft.hidden_size, draft.num_attention_heads, draft.head_dim) == (HIDDEN, 64, 128)
    assert shipped.extract.aux_layer_ids == [2, 30, 58] and NUM_LAYERS not in shipped.extract.aux_layer_ids
    assert draft.rope_theta == 50000.0 and draft.rms_norm_eps == 1e-5
    assert draft.rope_scaling == {
        "rope_type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    assert draft.max_position_embeddings == 64 * 4096
    assert 12288 <= draft.intermediate_size <= 18432


def test_the_shipped_draft_is_plain_eagle3(shipped):
    draft = shipped.draft
    assert not (draft.norm_before_fc or draft.fc_norm or draft.norm_output or draft.norm_before_residual)
    train = shipped.train
    assert (train.optimizer, train.lr, train.warmup_ratio) == ("adamw", 5e-5, 0.015)
    assert train.ttt_steps in (3, 4) and 0.8 <= train.ttt_step_loss_decay <= 0.9 and 0.5 <= train.max_grad_norm <= 1


def test_float32_is_not_asked_of_a_quantised_verifier(shipped):
    assert shipped.verifier.dtype == "bfloat16" and shipped.export.lossless_prompts == 0


def test_engine_arguments_are_those_that_vllm_knows(shipped):
    from vllm.engine.arg_utils import EngineArgs

    assert shipped.verifier.tensor_parallel_size == 8 and shipped.verifier.trust_remote_code
    assert shipped.verifier.engine_args.keys() <= set(EngineArgs.__dataclass_fields__)
    assert shipped.verifier.engine_args["language_model_only"]


def test_serve_flags_are_those_that_vllm_knows(shipped):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words = shlex.split(shipped.export.serve_flags)
    flags = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "x", *words])
    validate_parsed_serve_args(flags)
    assert (flags.tool_call_parser, flags.reasoning_parser) == ("kimi_k2", "kimi_k2")


def test_what_the_pilot_changes_is_little(shipped):
    full, pilot = (load_config(path) for path in CONFIGS)
    for section in ("verifier", "extract", "vocab", "draft"):
        assert getattr(full, section) == getattr(pilot, section), section
    assert pilot.prepare.sources[0].max_rows == 10


def test_engine_arguments_that_a_stage_sets_are_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("verifier: {engine_args: {max_model_len: 8, block_size: 16}}")
    with pytest.raises(
        PipelineError, match=r"verifier\.engine_args: max_model_len: set by the stages, from keys of their own"
    ):
        load_config(path)


def test_engine_arguments_reach_vllm(shipped):
    options = options_for(shipped.verifier, Path("x"), max_model_len=8)
    assert options.extra == shipped.verifier.engine_args


def test_rotary_positions_mean_the_same_in_training_and_in_vllm(shipped):
    """YaRN scales attention unless both mscale keys are there; a library that ignored them would rotate 1.4 times."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    from common.draft import draft_shape

    config = draft_shape(shipped.draft, VOCAB)
    positions = torch.tensor([[0, 1, 77, 4095, 4096, 30000]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    with set_current_vllm_config(VllmConfig()):
        served = get_rope(128, 8192 * 32, rope_parameters=config.rope_parameters, dtype=torch.float32)
    table = served.cos_sin_cache[positions[0]]
    torch.testing.assert_close(cos[0, :, :64].float(), table[:, :64], atol=2e-5, rtol=0)
    torch.testing.assert_close(sin[0, :, :64].float(), table[:, 64:], atol=2e-5, rtol=0)
    assert float(cos.abs().max()) <= 1.0


# ---- a tiny verifier of the same shape ----


@pytest.fixture(scope="session")
def kimi(tmp_path_factory):
    """The INT4 directory. Nobody writes into it."""
    return tiny_kimi.write_tiny_kimi(tmp_path_factory.mktemp("kimi") / "int4", int4=True)


@pytest.fixture
def copied(kimi, tmp_path):
    """A copy that a test may break: small files are copied, shards are links."""
    path = tmp_path / "copy"
    path.mkdir()
    for file in kimi.iterdir():
        if file.suffix == ".safetensors":
            (path / file.name).symlink_to(file)
        elif file.is_file():
            shutil.copy(file, path)
    return path


def opened(path, *, trusted=True):
    return open_verifier(VerifierSection(path=str(path), trust_remote_code=trusted))


def edit(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_sizes_come_from_the_text_config_not_from_the_decoys_around_it(kimi):
    verifier = opened(kimi)
    assert (verifier.vocab_size, verifier.hidden_size, verifier.num_layers) == (VOCAB, 128, 5)
    assert verifier.rms_norm_eps == 1e-5 and verifier.rope_theta == 50000.0
    assert not verifier.tie_word_embeddings and verifier.config["tie_word_embeddings"]
    assert verifier.stop_token_ids == (SPECIAL["<|im_end|>"],)


def test_embeddings_head_and_norm_are_those_of_the_language_model(kimi):
    head = load_head(opened(kimi))
    with safe_open(kimi / tiny_kimi.HEAD_SHARD, framework="pt") as file:
        for found, name in ((head.embed, "model.embed_tokens"), (head.head, "lm_head"), (head.norm, "model.norm")):
            assert torch.equal(found, file.get_tensor(f"language_model.{name}.weight"))
    assert not torch.equal(head.embed, head.head)


def test_training_needs_only_the_shard_that_holds_embeddings_head_and_norm(copied):
    for name in tiny_kimi.OTHER_SHARDS:
        (copied / name).unlink()
    check_weight_files(opened(copied), whole=False)
    assert load_head(opened(copied)).head.shape == (VOCAB, 128)
    with pytest.raises(PipelineError, match=r"model-00001-of-000064.safetensors: can't be read: No such file"):
        check_weight_files(opened(copied), whole=True)


@pytest.mark.parametrize("whole", [True, False])
def test_a_copy_without_shard_62_is_refused_before_anything_is_loaded(copied, whole):
    (copied / tiny_kimi.HEAD_SHARD).unlink()
    with pytest.raises(PipelineError, match=r"model-00062-of-000064.safetensors: can't be read: No such file") as error:
        check_weight_files(opened(copied), whole=whole)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    ("kept", "words"), [(1000, "is not a safetensors file"), (90000, "has 90,000 bytes, its header")]
)
def test_a_truncated_shard_is_named_with_the_bytes_that_it_lacks(copied, kimi, kept, words):
    name = tiny_kimi.OTHER_SHARDS[1]
    content = (kimi / name).read_bytes()
    (copied / name).unlink()
    (copied / name).write_bytes(content[:kept])
    check_weight_files(opened(copied), whole=False)
    with pytest.raises(PipelineError, match=f"{name}: {words}"):
        check_weight_files(opened(copied), whole=True)


def test_whole_weight_files_are_left_in_peace(kimi, smollm2):
    check_weight_files(opened(kimi), whole=True)
    check_weight_files(opened(smollm2), whole=True)


# ---- tokens ----


@pytest.fixture(scope="session")
def tokenizer(kimi):
    return load_tokenizer(opened(kimi))


def test_the_tokenizer_is_slow_remote_code_and_gives_the_published_ids(kimi, tokenizer):
    assert not tokenizer.is_fast and type(tokenizer).__module__.startswith("transformers_modules.")
    check_special_tokens(opened(kimi), tokenizer, SPECIAL)
    assert tokenizer.encode("Hi<|im_end|><think>")[-2:] == [163586, 163606]
    assert tokenizer.decode(tokenizer.encode("Grüße, 你好\n")) == "Grüße, 你好\n"


def test_code_beside_kimi_runs_only_when_it_is_trusted(kimi):
    with pytest.raises(PipelineError, match=r"set verifier\.trust_remote_code: true"):
        load_tokenizer(opened(kimi, trusted=False))


def test_a_loader_that_closes_the_holes_is_told_by_the_first_token_that_moved(copied):
    tiny_kimi.write_tokenizer(copied, close_holes=True)
    verifier = opened(copied)
    with pytest.raises(
        PipelineError, match=r"<\|im_system\|> should be 163594, the loaded tokenizer gives 163589"
    ) as error:
        check_special_tokens(verifier, load_tokenizer(verifier), SPECIAL)
    assert [problem.where for problem in error.value.problems] == [
        "tokenizer_config.json",
        "verifier.expected_token_ids",
    ]


def test_control_tokens_at_the_top_of_the_ids_are_in_the_draft_vocabulary(kimi, tokenizer):
    """A map that fills up with the lowest unused ids would never reach them."""
    forced = script("03_build_vocab_mapping").forced_tokens([], opened(kimi), tokenizer)
    assert forced.keys() >= FORCED
    counts = torch.zeros(VOCAB, dtype=torch.int64).numpy()
    counts[:500] = 1
    t2d = build_vocab_mapping(counts, 1000, forced.values()).t2d
    assert t2d.shape == (VOCAB,) and all(t2d[SPECIAL[name]] for name in FORCED)
    assert not build_vocab_mapping(counts, 1000).t2d[NUM_BASE:].any()


# ---- what is refused, or handled, before anything expensive starts ----


def test_a_text_config_that_calls_itself_kimi_k2_is_read_alike(copied):
    edit(copied / "config.json", lambda config: config["text_config"].update(model_type="kimi_k2"))
    assert opened(copied).vocab_size == VOCAB
    assert load_head(opened(copied)).head.shape == (VOCAB, 128)


def test_a_vllm_too_old_for_the_last_layer_is_refused(monkeypatch):
    from packaging.version import Version

    monkeypatch.setattr("common.engine.installed_version", lambda: Version("0.25.0"))
    with pytest.raises(
        PipelineError, match=r"0\.25\.0 can't return the states of the last layer; 0\.25\.1 and later can"
    ):
        check_can_extract()


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 29, 57], r"\[1, 29, 57\] is how SGLang counts.*\n.*set it to \[2, 30, 58\]: every id one higher"),
        ([2, 30, 58, 61], "61 is the last layer, which is added by itself"),
        ([2, 30, 62], "the verifier has 61 layers, found 62"),
    ],
)
def test_layer_ids_counted_otherwise_are_refused(copied, ids, words):
    edit(copied / "config.json", lambda config: config["text_config"].update(num_hidden_layers=NUM_LAYERS))
    problems = Problems()
    script("02_extract_hidden_states")._check_layers(problems, ids, opened(copied))
    with pytest.raises(PipelineError, match=words):
        problems.raise_if_any()


def test_the_shipped_layer_ids_are_accepted(copied, shipped):
    edit(copied / "config.json", lambda config: config["text_config"].update(num_hidden_layers=NUM_LAYERS))
    problems = Problems()
    script("02_extract_hidden_states")._check_layers(problems, shipped.extract.aux_layer_ids, opened(copied))
    assert not problems


def test_a_head_dim_left_to_the_library_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_text("draft: {head_dim: null}")
    with pytest.raises(PipelineError, match=r"draft\.head_dim: Input should be a valid integer, found None"):
        load_config(tmp_path / "run.yaml")


# ---- INT4 ----


def test_only_routed_experts_are_quantised_and_they_unpack_to_the_bf16_twin(kimi, tmp_path):
    """Unpacked by hand: eight values of four bits an int32, lowest first, offset by 8, one scale for 32 columns."""
    torch.manual_seed(3)
    weight = torch.randn(64, 128)
    packed = tiny_kimi.expert_tensors("e", weight, int4=True)
    twin = tiny_kimi.expert_tensors("e", weight, int4=False)["e.weight"]
    words = packed["e.weight_packed"]
    values = torch.stack([(words >> (4 * i)) & 15 for i in range(8)], -1).reshape(64, 128) - 8
    scales = packed["e.weight_scale"].float().repeat_interleave(32, 1)
    assert torch.equal((values * scales).bfloat16(), twin)
    index = json.loads((kimi / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name.split(".experts.")[0].rpartition(".")[2] for name in index if "weight_packed" in name} == {"mlp"}
    assert not [name for name in index if ".experts." in name and name.endswith(".weight")]
