"""All five stages on the tiny Kimi through vLLM's own KimiK25ForConditionalGeneration, as subprocesses.

What the CPU build of vLLM (0.32.0) can't do: its fused-MoE kernels know INT4 experts with softmax routing only, so for
`noaux_tc` it refuses ("No WNA16 MoE backend supports the deployment configuration"). Stages that start an engine run on
the bf16 twin, whose experts are the INT4 ones decompressed; stages 3 and 4, which read tokenizer and outer tensors
alone, are the same on both, and a test holds them to it. The vision part isn't loaded: `language_model_only`.
"""

import json
from pathlib import Path

import pytest
import torch
import yaml

from common import hidden_states as hs
from common.config import VerifierSection
from common.manifest import read_manifest, verify_outputs
from common.samples import open_samples
from common.verifier import load_head, load_tokenizer, open_verifier
from common.vocab_mapping import open_vocab_mapping
from tests import tiny_kimi
from tests.test_pipeline import STAGES, run_script
from tests.tiny_kimi import AUX, HIDDEN, LAYERS, SPECIAL

# Stages 1 to 4 pass; in stage 5 vLLM does not start with the draft beside it yet, see issue 7.
pytestmark = [pytest.mark.slow, pytest.mark.skip(reason="vLLM does not start with the draft beside the tiny Kimi yet")]
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "functions.clock:0", "type": "function", "function": {"name": "clock", "arguments": "{}"}}


def conversations(count: int = 24):
    """Plain questions, questions after a plain answer, and the middle of a chain of tool calls; each ends open."""
    for i in range(count):
        messages = [
            {"role": "system", "content": f"You are number {i}."},
            {"role": "user", "content": f"Question {i * 37 % 101}: what is it?"},
        ]
        if i % 3 == 1:
            messages.append({"role": "assistant", "reasoning_content": "Hm.", "content": "Good."})
            messages.append({"role": "user", "content": f"And then, {i}?"})
        if i % 3 == 2:
            messages.append({"role": "assistant", "reasoning_content": "Ask.", "content": "", "tool_calls": [CALL]})
            messages.append({"role": "tool", "tool_call_id": CALL["id"], "content": f"noon {i}"})
        yield {"messages": messages, "tools": TOOLS}


def write_run(root: Path, verifier: Path) -> Path:
    prompts = root / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in conversations()))
    text = tiny_kimi.text_config(int4=False)
    config = {
        "run": {"dir": str(root / "run")},
        "verifier": {
            "path": str(verifier),
            "trust_remote_code": True,
            "expected_token_ids": SPECIAL,
            "engine_args": {"language_model_only": True},
        },
        "prepare": {
            "sources": [{"path": str(prompts)}],
            "max_tokens": 256,
            "val_fraction": 0.3,
            "near_duplicate_threshold": 1.0,
            "drop_looping": False,
            "held_out": [],
        },
        "generate": {"temperature": 0.0, "max_tokens": 40, "cpu_kv_cache_gib": 1},
        "extract": {"aux_layer_ids": list(AUX), "min_free_bytes": 0},
        "vocab": {"size": 256},
        "draft": {
            "hidden_size": HIDDEN,
            "intermediate_size": 256,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "rope_theta": text["rope_theta"],
            "rope_scaling": {**text["rope_scaling"], "rope_type": "yarn"},
        },
        "train": {"lr": 3e-3, "num_epochs": 8, "max_tokens_per_batch": 256, "dtype": "float32", "loggers": []},
        "export": {
            "prompt_sets": ["val"],
            "max_tokens": 32,
            "max_model_len": 256,
            "batch": 8,
            "lossless_prompts": 0,
            "serve_flags": "--tool-call-parser kimi_k2 --reasoning-parser kimi_k2",
        },
    }
    del config["draft"]["rope_scaling"]["type"]
    path = root / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The run directory after all five scripts, the configuration, and both verifiers."""
    root = tmp_path_factory.mktemp("kimi")
    int4, twin = (tiny_kimi.write_tiny_kimi(root / name, int4=name == "int4") for name in ("int4", "bf16"))
    config = write_run(root, twin)
    for name in STAGES:
        done = run_script(name, config)
        assert done.returncode == 0, f"{name}: {done.stderr[-3000:]}"
    return root / "run", config, int4, twin


def opened(path):
    return open_verifier(VerifierSection(path=str(path), trust_remote_code=True))


def test_all_five_stages_of_kimi_are_done(finished):
    for name, output in STAGES.items():
        manifest = read_manifest(finished[0] / output)
        verify_outputs(finished[0] / output, manifest)
        assert manifest.stage == name


def test_kimi_reasons_answers_and_calls_a_tool_under_the_mask(finished):
    run_dir, _, _, twin = finished
    tokenizer = load_tokenizer(opened(twin))
    written = [tokenizer.decode(s.input_ids[s.loss_mask].tolist()) for s in open_samples(run_dir)]
    assert len(written) == 24
    assert sum(text == tiny_kimi.ANSWER for text in written) >= 12
    for sample in open_samples(run_dir):
        shown = tokenizer.decode(sample.input_ids[~sample.loss_mask].tolist())
        assert shown.endswith("<|im_assistant|>assistant<|im_middle|><think>")


def test_kimi_is_shown_a_running_chain_with_its_reasoning_and_history_without(finished):
    run_dir, _, _, twin = finished
    tokenizer = load_tokenizer(opened(twin))
    shown = [tokenizer.decode(s.input_ids[~s.loss_mask].tolist()) for s in open_samples(run_dir)]
    assert sum("<think>Ask.</think><|tool_calls_section_begin|>" in text for text in shown) == 8
    assert sum("<think></think>Good." in text for text in shown) == 8
    assert not any("Hm." in text for text in shown)


def test_kimis_states_are_those_of_transformers(finished):
    """vLLM in bf16 against transformers in float32 on the same weights; by token."""
    from tests.test_pipeline import relative_error

    run_dir, _, _, twin = finished
    model = tiny_kimi.load_text_model(twin)
    last = []
    model.model.norm.register_forward_hook(lambda _m, inputs, _o: last.append(inputs[0][0]))
    found = hs.load_hidden_states(hs.data_path(run_dir / "hidden_states", 0))
    with torch.no_grad():
        states = [s[0] for s in model(found.input_ids[None], output_hidden_states=True).hidden_states]
    assert len(states) == LAYERS + 1 and len(found.aux) == len(AUX)
    for mine, theirs in zip([*found.aux, found.last], [*(states[i] for i in AUX), last[0]], strict=True):
        assert relative_error(mine, theirs) < 0.02


def test_the_canary_agrees_on_kimi(finished):
    counts = read_manifest(finished[0] / "hidden_states").counts
    assert counts["canaries"] >= 8 and counts["canary_agreement"] >= 0.9


def test_kimis_control_tokens_are_in_the_draft_vocabulary(finished):
    _, mapping = open_vocab_mapping(finished[0])
    names = [name for name in SPECIAL if "tool" in name or "think" in name or name == "<|im_end|>"]
    assert all(mapping.t2d[SPECIAL[name]] for name in names) and mapping.vocab_size == tiny_kimi.VOCAB


def test_the_int4_directory_gives_the_outer_tensors_and_tokens_of_its_twin(finished):
    _, _, int4, twin = finished
    ours, theirs = load_head(opened(int4)), load_head(opened(twin))
    assert torch.equal(ours.embed, theirs.embed) and torch.equal(ours.head, theirs.head)
    assert torch.equal(ours.norm, theirs.norm)
    assert opened(int4).tokenizer_fingerprint == opened(twin).tokenizer_fingerprint
    assert opened(int4).chat_template_fingerprint == opened(twin).chat_template_fingerprint


def test_the_draft_was_served_beside_kimi(finished):
    report = json.loads((finished[0] / "draft" / "serving_report.json").read_text())
    (entry,) = report["runs"]
    assert entry["num_drafts"] > 0 and entry["acceptance_length"] > 1.3
    card = (finished[0] / "draft" / "README.md").read_text()
    assert "--trust-remote-code --tool-call-parser kimi_k2 --reasoning-parser kimi_k2" in card


def test_kimis_draft_has_nothing_of_the_verifiers_attention(finished):
    shape = json.loads((finished[0] / "draft" / "config.json").read_text())["transformer_layer_config"]
    assert shape["head_dim"] == 64 and shape["rope_parameters"]["factor"] == 64.0
    assert not [key for key in shape if "lora" in key or "expert" in key or "qk_" in key]
