"""Public EAGLE-3 drafts in all three layouts, and what an absent key means in each."""

import json

import pytest
import torch
from safetensors.torch import save_file

from common import export
from common.config import VerifierSection
from common.draft_import import load_foreign_draft, open_foreign_draft
from common.errors import PipelineError
from common.verifier import load_head, open_verifier
from tests.train_rig import HIDDEN, VOCAB, make_text, write_verifier

K = 24
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "draft_vocab_size": K,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    path = write_verifier(tmp_path_factory.mktemp("verifier"), make_text(2), num_hidden_layers=30)
    return open_verifier(VerifierSection(path=str(path)))


@pytest.fixture(scope="module")
def head(verifier):
    return load_head(verifier)


def weights(*, first_layer="midlayer.", **changes):
    """A draft's tensors as public files name them; no embeddings."""
    torch.manual_seed(0)
    layer = {
        "self_attn.q_proj.weight": (32, 2 * HIDDEN),
        "self_attn.k_proj.weight": (16, 2 * HIDDEN),
        "self_attn.v_proj.weight": (16, 2 * HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, 32),
        "mlp.gate_proj.weight": (48, HIDDEN),
        "mlp.up_proj.weight": (48, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, 48),
        "input_layernorm.weight": (HIDDEN,),
        "hidden_norm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    made = {first_layer + name: torch.randn(shape) for name, shape in layer.items()}
    made |= {"fc.weight": torch.randn(HIDDEN, 3 * HIDDEN), "norm.weight": torch.ones(HIDDEN)}
    made |= {
        "lm_head.weight": torch.randn(K, HIDDEN),
        "d2t": 5 + torch.arange(K),
        "t2d": marked(5 + 2 * torch.arange(K)),
    }
    made |= changes
    return {name: tensor for name, tensor in made.items() if tensor is not None}


def marked(ids):
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    return t2d


def write(path, config, tensors, *, pickled=False):
    (path / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors")
    return path


def take(path, verifier, head):
    """The draft, checked as stage 5 checks it, and what was said about it."""
    foreign = open_foreign_draft(path, verifier)
    draft, mapping = load_foreign_draft(foreign, head)
    export.check_draft(draft, mapping, aux_layer_ids=draft.aux_layer_ids, where="import")
    export.check_embeddings(draft, head.embed, where="import")
    return draft, mapping, " | ".join(foreign.notes)


def test_the_original_layout_is_read_with_eagles_own_layers(tmp_path, verifier, head):
    config = LLAMA | {"architectures": ["LlamaForCausalLM"]}
    draft, mapping, notes = take(write(tmp_path, config, weights(), pickled=True), verifier, head)
    assert draft.aux_layer_ids == [2, 15, 27] and "EAGLE's own choice of [2, 15, 27]" in notes
    assert draft.config["norm_before_residual"] is False
    assert mapping.target_ids.tolist() == [5 + 2 * k for k in range(K)]
    assert draft.config["transformer_layer_config"]["rope_parameters"]["rope_theta"] == 500000.0
    assert "layers.0.self_attn.q_proj.weight" in draft.tensors
    assert torch.equal(draft.tensors["embed_tokens.weight"], head.embed)


def test_layer_ids_of_sglang_are_counted_one_higher(tmp_path, verifier, head):
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}}
    config = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]} | nested
    draft, _, notes = take(write(tmp_path, config, weights()), verifier, head)
    assert draft.aux_layer_ids == [2, 15, 27]
    assert "counts one lower than vLLM" in notes


def test_a_norm_flag_inside_eagle_config_is_read(tmp_path, verifier, head):
    nested = {"eagle_config": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [1, 14, 26]}}
    tensors = weights(**{"input_norm.weight": torch.ones(3 * HIDDEN)})
    path = write(tmp_path, LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]} | nested, tensors)
    assert take(path, verifier, head)[0].config["norm_before_fc"] is True


def test_layer_ids_at_the_top_level_are_taken_as_they_are(tmp_path, verifier, head):
    config = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [1, 14, 26]}
    assert take(write(tmp_path, config, weights()), verifier, head)[0].aux_layer_ids == [1, 14, 26]


def test_a_speculators_draft_without_the_flag_norms_before_the_residual(tmp_path, verifier, head):
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": LLAMA,
        "draft_vocab_size": K,
        "eagle_aux_hidden_state_layer_ids": [2, 15, -3],
    }
    draft, _, notes = take(write(tmp_path, config, weights(first_layer="layers.0.")), verifier, head)
    assert draft.config["norm_before_residual"] is True and "vLLM takes true for this layout" in notes
    assert draft.aux_layer_ids == [2, 15, 27]


def test_scaled_rotary_keys_of_the_older_form_are_kept(tmp_path, verifier, head):
    scaling = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 128}
    config = LLAMA | {"architectures": ["LlamaForCausalLM"], "rope_scaling": scaling}
    rope = take(write(tmp_path, config, weights()), verifier, head)[0].config["transformer_layer_config"]
    assert (
        rope["rope_parameters"] | {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}
        == rope["rope_parameters"]
    )


def test_an_older_map_that_holds_verifier_ids_is_converted(tmp_path, verifier, head):  # DESIGN.md, d2t
    config = LLAMA | {"architectures": ["LlamaForCausalLM"]}
    older = weights(d2t=5 + 2 * torch.arange(K))
    draft, _, notes = take(write(tmp_path, config, older), verifier, head)
    assert torch.equal(draft.tensors["d2t"], 5 + torch.arange(K)) and "was converted" in notes


def test_a_lost_t2d_is_rebuilt_from_the_offsets(tmp_path, verifier, head):
    config = LLAMA | {"architectures": ["LlamaForCausalLM"]}
    draft, _, notes = take(write(tmp_path, config, weights(t2d=None)), verifier, head)
    assert torch.equal(draft.tensors["t2d"], marked(5 + 2 * torch.arange(K))) and "holds no t2d" in notes


def test_a_whole_vocabulary_without_a_head_gets_the_verifiers(tmp_path, verifier, head):
    config = LLAMA | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": VOCAB}
    tensors = weights(**{"lm_head.weight": None, "d2t": None, "t2d": None})
    draft, mapping, _ = take(write(tmp_path, config, tensors), verifier, head)
    assert mapping.size == VOCAB and torch.equal(draft.tensors["lm_head.weight"], head.head)


def test_prefixes_and_rotary_buffers_of_other_tools_are_dropped(tmp_path, verifier, head):
    named = {f"model.{name}" if name not in ("d2t", "t2d") else name: t for name, t in weights().items()}
    named["model.midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    take(write(tmp_path, LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]}, named), verifier, head)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "holds Eagle3DeepseekV2ForCausalLM, not an EAGLE-3 draft"),
        ({"architectures": ["LlamaForCausalLM"], "hidden_size": 64}, "has hidden_size 64, the verifier has 32"),
        ({"architectures": ["LlamaForCausalLM"], "vocab_size": 99}, "has vocab_size 99, the verifier has 320"),
    ],
)
def test_what_is_no_draft_of_this_verifier_is_refused(tmp_path, verifier, config, words):
    with pytest.raises(PipelineError, match=words):
        open_foreign_draft(write(tmp_path, LLAMA | config, weights()), verifier)


def test_a_directory_without_weights_is_refused(tmp_path, verifier):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(PipelineError, match=r"has neither model\.safetensors nor pytorch_model\.bin"):
        open_foreign_draft(tmp_path, verifier)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d2t": None}, "has a reduced vocabulary of 24 and no d2t"),
        ({"d2t": torch.zeros(K, dtype=torch.int64)}, "t2d and d2t are not the same map"),
        ({"d2t": torch.where(torch.arange(K) == 3, 3, 5 + torch.arange(K))}, r"d2t\[3\] leads to verifier id 6"),
        ({"d2t": 310 + torch.arange(K)}, r"d2t\[5\] leads to verifier id 320"),
    ],
    ids=["missing", "zero", "not rising", "outside"],
)
def test_a_damaged_map_is_refused(tmp_path, verifier, head, changes, words):
    path = write(tmp_path, LLAMA | {"architectures": ["LlamaForCausalLM"]}, weights(**changes))
    with pytest.raises(PipelineError, match=words):
        load_foreign_draft(open_foreign_draft(path, verifier), head)


def test_embeddings_of_another_verifier_are_refused(tmp_path, verifier, head):
    tensors = weights(**{"embed_tokens.weight": torch.randn(VOCAB, HIDDEN)})
    path = write(tmp_path, LLAMA | {"architectures": ["LlamaForCausalLM"]}, tensors)
    with pytest.raises(PipelineError, match="embeddings of another verifier"):
        take(path, verifier, head)


def test_a_pickle_that_would_run_code_is_refused(tmp_path, verifier, head):
    class Bomb:
        def __reduce__(self):
            return (print, ("boom",))

    write(tmp_path, LLAMA | {"architectures": ["LlamaForCausalLM"]}, {"fc.weight": Bomb()}, pickled=True)
    with pytest.raises(PipelineError, match="can't be read"):
        load_foreign_draft(open_foreign_draft(tmp_path, verifier), head)
