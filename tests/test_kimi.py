"""Kimi-K2.5: the shipped configurations against the published facts, and every property that has broken others, on a
tiny verifier of the same shape (tests/tiny_kimi.py)."""

import shlex
from pathlib import Path

import pytest

from common.config import load_config
from common.engine import options_for
from common.errors import PipelineError

ROOT = Path(__file__).parent.parent
CONFIGS = [ROOT / "configs" / name for name in ("kimi_k25_int4.yaml", "kimi_k25_int4_pilot.yaml")]
# The published configuration and tokenizer_config.json of Kimi-K2.5.
SPECIAL = {
    "[BOS]": 163584,
    "[EOS]": 163585,
    "<|im_end|>": 163586,
    "<|im_user|>": 163587,
    "<|im_assistant|>": 163588,
    "<|im_system|>": 163594,
    "<|tool_calls_section_begin|>": 163595,
    "<|tool_calls_section_end|>": 163596,
    "<|tool_call_begin|>": 163597,
    "<|tool_call_argument_begin|>": 163598,
    "<|tool_call_end|>": 163599,
    "<|im_middle|>": 163601,
    "<think>": 163606,
    "</think>": 163607,
    "[UNK]": 163838,
    "[PAD]": 163839,
}
FORCED = {name for name in SPECIAL if "tool" in name or "think" in name or name in ("[EOS]", "<|im_end|>")}
NUM_LAYERS, HIDDEN, VOCAB = 61, 7168, 163840


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
    import torch
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
