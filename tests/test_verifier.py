"""Opening a verifier: what is read, from where, and what is refused. Field faults B4, F9, H6, J1."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.config import VerifierSection
from common.embedded import chatterbot_prompts, embedded_verifier, human_eval_prompts, mt_bench_prompts
from common.errors import PipelineError
from common.verifier import (
    LAYER_TENSORS,
    check_special_tokens,
    control_token_ids,
    load_head,
    load_layer,
    load_tokenizer,
    open_verifier,
)

V, D = 32, 8


def make_verifier(path, tensors, *, nested=False, shards=1, **changes):
    """A directory with this configuration and these tensors, in one file or sharded with an index."""
    text = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": 3, "rms_norm_eps": 1e-5, **changes}
    # Above the nested part everything is a decoy, as in Kimi-K2.5.
    config = {"model_type": "kimi_k25", "tie_word_embeddings": True, "text_config": text} if nested else text
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
    else:
        weight_map = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(tensors)}
        for file in set(weight_map.values()):
            save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, path / file)
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return open_verifier(VerifierSection(path=str(path)))


def tensors_of(prefix="", *, tied=False):
    torch.manual_seed(0)
    named = {
        f"{prefix}model.embed_tokens.weight": torch.randn(V, D),
        f"{prefix}model.norm.weight": torch.rand(D) + 0.5,
    }
    return named if tied else {**named, f"{prefix}lm_head.weight": torch.randn(V, D)}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_head_embeddings_and_norm_are_read(tmp_path, tied, shards):  # J1
    tensors = tensors_of(tied=tied)
    head = load_head(make_verifier(tmp_path / "v", tensors, shards=shards, tie_word_embeddings=tied))
    assert torch.equal(head.embed, tensors["model.embed_tokens.weight"])
    assert torch.equal(head.head, tensors["model.embed_tokens.weight" if tied else "lm_head.weight"])
    assert torch.equal(head.norm, tensors["model.norm.weight"])


def test_a_nested_text_config_wins_over_the_decoys_above_it(tmp_path):  # F9
    tensors = tensors_of("language_model.") | {"vision_tower.model.norm.weight": torch.zeros(5)}
    verifier = make_verifier(tmp_path / "v", tensors, nested=True, tie_word_embeddings=False)
    assert not verifier.tie_word_embeddings
    assert load_head(verifier).eps == 1e-5
    assert torch.equal(load_head(verifier).head, tensors["language_model.lm_head.weight"])


def test_only_the_shards_that_are_needed_are_opened(tmp_path):
    tensors = tensors_of() | {"model.layers.0.x": torch.zeros(1), "model.layers.1.x": torch.zeros(1)}
    verifier = make_verifier(tmp_path / "v", tensors, shards=5)
    for name in ("model-3.safetensors", "model-4.safetensors"):
        (tmp_path / "v" / name).write_bytes(b"not a safetensors file")
    assert load_head(verifier).embed.shape == (V, D)


def test_logits_are_those_of_the_final_norm_and_the_head(tmp_path):
    head = load_head(make_verifier(tmp_path / "v", tensors_of()))
    states = torch.randn(4, D)
    for row, logits in zip(states, head.logits(states), strict=True):
        rms = (sum(float(x) ** 2 for x in row) / D + 1e-5) ** 0.5
        normed = torch.tensor([float(x) / rms * float(w) for x, w in zip(row, head.norm, strict=True)])
        torch.testing.assert_close(logits, head.head @ normed, rtol=1e-4, atol=1e-5)


def test_an_absent_final_norm_is_refused(tmp_path):  # F9
    tensors = {n: t for n, t in tensors_of().items() if "norm" not in n}
    with pytest.raises(PipelineError, match=r"has no tensor named \.\.\.model\.norm\.weight"):
        load_head(make_verifier(tmp_path / "v", tensors))


def test_a_head_that_should_be_there_and_is_not_is_refused(tmp_path):
    with pytest.raises(PipelineError, match=r"has no tensor named \.\.\.lm_head\.weight"):
        load_head(make_verifier(tmp_path / "v", tensors_of(tied=True), tie_word_embeddings=False))


def test_embeddings_of_another_size_are_refused(tmp_path):  # B4
    with pytest.raises(PipelineError, match=r"is \[32, 8\], config.json says \[40, 8\]"):
        load_head(make_verifier(tmp_path / "v", tensors_of(), vocab_size=40))


def test_weights_that_are_not_finite_are_refused(tmp_path):
    tensors = tensors_of()
    tensors["model.norm.weight"][3] = float("nan")
    with pytest.raises(PipelineError, match=r"model\.norm\.weight: holds values that are not finite"):
        load_head(make_verifier(tmp_path / "v", tensors))


def layer_tensors(layer, prefix=""):
    return {f"{prefix}model.layers.{layer}.{name}": torch.randn(D, D) for name in LAYER_TENSORS}


def test_one_layer_is_read_and_no_other(tmp_path):
    wanted = layer_tensors(1, "language_model.")
    others = layer_tensors(0, "language_model.") | layer_tensors(1, "vision_tower.")
    # Layers 1 and 11 begin alike.
    tensors = tensors_of("language_model.") | others | wanted | layer_tensors(11, "language_model.")
    layer = load_layer(make_verifier(tmp_path / "v", tensors, shards=3, num_hidden_layers=12), 1)
    assert layer.keys() == set(LAYER_TENSORS)
    assert all(torch.equal(layer[name], wanted[f"language_model.model.layers.1.{name}"]) for name in LAYER_TENSORS)


@pytest.mark.parametrize(
    ("layer", "extra", "words"),
    [
        (3, {}, "3; the verifier has layers 0 to 2"),
        (2, {}, "layer 2 of .* is not Llama's: input_layernorm.weight"),
        (1, {"model.layers.1.self_attn.q_norm.weight": torch.ones(4)}, "is not Llama's: self_attn.q_norm.weight"),
        (1, {"model.layers.1.self_attn.q_proj.bias": torch.ones(4)}, "is not Llama's: self_attn.q_proj.bias"),
    ],
)
def test_a_layer_that_a_llama_draft_cannot_hold_is_refused(tmp_path, layer, extra, words):
    verifier = make_verifier(tmp_path / "v", tensors_of() | layer_tensors(1) | extra)
    with pytest.raises(PipelineError, match=words):
        load_layer(verifier, layer)


def test_a_directory_that_is_absent_is_refused():
    with pytest.raises(PipelineError, match="is not a directory"):
        open_verifier(VerifierSection(path="./absent"))


def test_a_configuration_without_sizes_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PipelineError, match="has no vocab_size, hidden_size, num_hidden_layers"):
        open_verifier(VerifierSection(path=str(tmp_path)))


def test_one_edited_character_of_the_template_is_another_template(tmp_path, smollm2):  # H6
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((smollm2 / name).read_bytes())
    before = open_verifier(VerifierSection(path=str(tmp_path))).fingerprints
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace("assistant", "assistanT", 1)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    after = open_verifier(VerifierSection(path=str(tmp_path))).fingerprints
    assert before["chat_template"] != after["chat_template"]
    assert before["tokenizer"] == after["tokenizer"]


def test_special_tokens_of_the_embedded_verifier_agree(smollm2, smollm2_tokenizer):
    verifier = open_verifier(VerifierSection(path=str(smollm2)))
    check_special_tokens(verifier, smollm2_tokenizer, {"<|im_start|>": 1, "<|im_end|>": 2})
    assert control_token_ids(verifier, smollm2_tokenizer)["<|im_end|>"] == 2


def test_the_first_special_token_that_moved_is_named(smollm2, smollm2_tokenizer):
    verifier = open_verifier(VerifierSection(path=str(smollm2)))
    with pytest.raises(PipelineError, match=r"<\|im_end\|> should be 3, the loaded tokenizer gives 2"):
        check_special_tokens(verifier, smollm2_tokenizer, {"<|im_start|>": 1, "<|im_end|>": 3, "<repo_name>": 9})


def test_a_declared_id_that_a_loader_moved_is_named(tmp_path, smollm2, smollm2_tokenizer):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((smollm2 / name).read_bytes())
    declared = {"added_tokens_decoder": {"1": {"content": "<|im_start|>"}, "5": {"content": "<|im_end|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared))
    with pytest.raises(PipelineError, match=r"tokenizer_config.json: <\|im_end\|> should be 5"):
        check_special_tokens(open_verifier(VerifierSection(path=str(tmp_path))), smollm2_tokenizer, {})


def test_code_beside_the_verifier_runs_only_when_it_is_trusted(tmp_path, smollm2):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((smollm2 / name).read_bytes())
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["own.T", None]}}))
    with pytest.raises(PipelineError, match=r"set verifier\.trust_remote_code: true"):
        load_tokenizer(open_verifier(VerifierSection(path=str(tmp_path))))


def test_the_embedded_verifier_is_converted_once_and_says_what_it_is(smollm2):
    before = (smollm2 / "model.safetensors").stat().st_mtime_ns
    assert embedded_verifier("embedded:smollm2-135m") == smollm2
    assert (smollm2 / "model.safetensors").stat().st_mtime_ns == before
    verifier = open_verifier(VerifierSection())
    assert (verifier.vocab_size, verifier.hidden_size, verifier.num_layers) == (49152, 576, 30)
    assert verifier.tie_word_embeddings


def test_the_embedded_tokenizer_splits_every_digit(smollm2_tokenizer):
    assert len(smollm2_tokenizer.encode("2026", add_special_tokens=False)) == 4


def test_another_gguf_than_the_one_that_was_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_CACHE", str(tmp_path))
    monkeypatch.setattr("common.embedded.SMOLLM2_SHA256", "0" * 64)
    with pytest.raises(PipelineError, match="has checksum b179c9523d0e, expected 000000000000"):
        embedded_verifier("embedded:smollm2-135m")
    assert not list(tmp_path.iterdir())


def test_the_embedded_rotary_layout_is_hugging_faces(smollm2):
    """llama.cpp stores q and k with the two rotary halves interleaved; left so, the model answers nonsense."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer.encode("The capital of France is", return_tensors="pt")
    assert "Paris" in tokenizer.decode(model.generate(ids, max_new_tokens=4, do_sample=False)[0])
    assert load_file(smollm2 / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("read", "count"), [(mt_bench_prompts, 80), (human_eval_prompts, 164), (chatterbot_prompts, 749)]
)
def test_embedded_prompts_are_complete_and_named_apart(read, count):
    prompts = read()
    assert len(prompts) == len({p.prompt_id for p in prompts}) == count
    assert all(p.text.strip() for p in prompts)
