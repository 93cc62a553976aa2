"""The exported draft: both layouts, the round trip, and every broken export that a server would load in silence.

Field faults F3, I2, I5, I8, J7.
"""

import json
import re

import pytest
import torch
from packaging.version import Version
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

from common import export
from common.engine import read_draft_config
from common.errors import PipelineError
from common.export import Draft, Row
from common.vocab_mapping import VocabMapping

V, K, D, A = 64, 16, 32, 3
LAYOUTS = ["speculators", "llama_eagle3"]
AUX = [1, 2, 3]


@pytest.fixture(scope="module")
def mapping():
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[torch.arange(K) * 3 + 2] = True
    return VocabMapping(t2d, t2d.nonzero().flatten() - torch.arange(K), torch.ones(V, dtype=torch.int64))


@pytest.fixture(scope="module")
def verifier_tensors():
    torch.manual_seed(1)
    return torch.randn(V, D), torch.randn(V, D)  # embeddings, head


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, mapping, verifier_tensors, smollm2):
    """A checkpoint directory as the library saves it, with random weights."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=shape,
        draft_vocab_size=K,
        eagle_aux_hidden_state_layer_ids=AUX,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(smollm2)),
        ),
    )
    model = Eagle3DraftModel(config=config)
    embed, head = verifier_tensors
    model.load_state_dict({"t2d": mapping.t2d, "d2t": mapping.d2t, "embed_tokens.weight": embed}, strict=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(head[mapping.target_ids])
        model.verifier_lm_head.weight.zero_()
    path = tmp_path_factory.mktemp("checkpoint")
    model.to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def draft(checkpoint):
    return export.read_draft(checkpoint)


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, V, (12,), generator=generator)
    states = torch.randn(12, A * D, generator=generator).to(torch.bfloat16)
    return [Row(ids, states, torch.ones(12, dtype=torch.bool))]


def check(draft, mapping, **changes):
    export.check_draft(draft, mapping, **({"aux_layer_ids": AUX, "where": "draft"} | changes))


def changed(draft, *, config=None, tensors=None, without=()):
    kept = {name: tensor for name, tensor in draft.tensors.items() if name not in without}
    flags = {key: value for key, value in (draft.config | (config or {})).items() if key not in without}
    return Draft(flags, kept | (tensors or {}))


def test_a_checkpoint_of_the_library_passes(draft, mapping, verifier_tensors):
    embed, head = verifier_tensors
    check(draft, mapping)
    export.check_head(draft, head, mapping, frozen=True, where="draft")
    export.check_embeddings(draft, embed, where="draft")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_gives_the_checkpoints_logits(tmp_path, draft, mapping, rows, verifier_tensors, layout):
    export.write_draft(tmp_path, export.with_served_keys(draft), layout=layout, share_embeddings=False)
    written = export.read_draft(tmp_path)
    check(written, mapping)
    compared = export.check_round_trip(draft, written, rows, verifier_tensors[0], ttt_steps=3)
    assert compared == 3 * 11 * K


def test_shared_embeddings_are_left_out_and_supplied_by_the_verifier(tmp_path, draft, mapping, rows, verifier_tensors):
    export.write_draft(tmp_path, draft, layout="speculators", share_embeddings=True)
    written = export.read_draft(tmp_path)
    assert export.EMBED not in written.tensors
    check(written, mapping, shares_embeddings=True)
    export.check_round_trip(draft, written, rows, draft.tensors[export.EMBED], ttt_steps=2)


def test_the_written_config_has_the_layer_ids_at_the_top_and_every_norm_flag(tmp_path, draft):
    for layout in LAYOUTS:
        export.write_draft(tmp_path, export.with_served_keys(draft), layout=layout, share_embeddings=False)
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["eagle_aux_hidden_state_layer_ids"] == AUX
        assert all(config[flag] is False for flag in export.NORM_FLAGS)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]  # SGLang counts one lower
    assert config["rope_theta"] == 50000.0


def write(path, draft, layout):
    export.write_draft(path, export.with_served_keys(draft), layout=layout, share_embeddings=False)
    return export.read_draft(path)


YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("flag", [None, *export.NORM_FLAGS])
def test_vllm_reads_the_written_config_as_meant(tmp_path, draft, layout, flag):
    meant = changed(draft, config={flag: True} if flag else {})
    write(tmp_path, meant, layout)
    assert export.config_faults(meant, read_draft_config(tmp_path, export.SHAPE_KEYS)) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vllm_reads_every_key_of_a_scaled_rotary_embedding(tmp_path, draft, layout):
    shape = draft.config["transformer_layer_config"] | {"rope_parameters": YARN}
    meant = changed(draft, config={"transformer_layer_config": shape})
    write(tmp_path, meant, layout)
    read = read_draft_config(tmp_path, export.SHAPE_KEYS)
    assert export.config_faults(meant, read) == []
    assert (read["rope factor"], read["rope rope_theta"]) == (64.0, 50000.0)


@pytest.mark.parametrize(
    ("lost", "fault"),
    [
        ("norm_before_residual", "norm_before_residual is False, vLLM reads True"),  # what vLLM takes for absent
        ("eagle_aux_hidden_state_layer_ids", r"eagle_aux_hidden_state_layer_ids is \[1, 2, 3\], vLLM reads None"),
        ("draft_vocab_size", "draft_vocab_size is 16, vLLM reads 64"),
        ("head_dim", "head_dim is 8, vLLM reads"),
        ("rope_parameters", "rope rope_theta is 50000.0, vLLM reads"),
    ],
)
def test_a_key_that_vllm_misses_is_named(tmp_path, draft, lost, fault):
    write(tmp_path, draft, "speculators")
    config = json.loads((tmp_path / "config.json").read_text())
    for part in (config, config["transformer_layer_config"]):
        part.pop(lost, None)
        if lost == "rope_parameters":
            part.pop("rope_theta", None)
    if lost == "head_dim":
        config["transformer_layer_config"]["head_dim"] = 16
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = export.config_faults(draft, read_draft_config(tmp_path, export.SHAPE_KEYS))[0]
    assert re.match(fault, found)


def test_nothing_of_the_verifiers_shape_leaks_into_the_draft(tmp_path, draft):  # J7
    for layout in LAYOUTS:
        config = json.dumps(write(tmp_path, draft, layout).config)
        assert not [key for key in ("sliding_window", "n_routed_experts", "kv_lora_rank") if key in config]


def test_the_number_of_aux_layers_is_said_where_it_is_not_three(draft):
    four = changed(draft, config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]})
    assert export.with_served_keys(four).config["transformer_layer_config"]["num_aux_hidden_states"] == 4
    assert "num_aux_hidden_states" not in export.with_served_keys(draft).config["transformer_layer_config"]


@pytest.mark.parametrize("ids", [[0, 1, 2], [2, 1, 3], [1, 2, 3, 61]], ids=["off by one", "reordered", "with the last"])
def test_other_layer_ids_are_refused(draft, mapping, ids):
    with pytest.raises(PipelineError, match=r"reads aux layers .* the hidden states were extracted at \[1, 2, 3\]"):
        check(changed(draft, config={"eagle_aux_hidden_state_layer_ids": ids}), mapping)


def test_absent_layer_ids_are_refused(draft, mapping):  # F3
    with pytest.raises(PipelineError, match="has no eagle_aux_hidden_state_layer_ids"):
        check(changed(draft, without=("eagle_aux_hidden_state_layer_ids",)), mapping)


@pytest.mark.parametrize("flag", export.NORM_FLAGS)
def test_an_absent_norm_flag_is_refused(draft, mapping, flag):
    with pytest.raises(PipelineError, match=f"has no {flag}"):
        check(changed(draft, without=(flag,)), mapping)


def test_a_lost_rope_theta_is_refused(draft, mapping):
    shape = {k: v for k, v in draft.config["transformer_layer_config"].items() if not k.startswith("rope")}
    with pytest.raises(PipelineError, match="has no rope_theta"):
        check(changed(draft, config={"transformer_layer_config": shape}), mapping)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: m.d2t + torch.arange(K), r"d2t\[1\] leads to verifier id"),  # absolute ids
        (lambda m: torch.zeros(K, dtype=torch.int64), r"d2t\[0\] leads to verifier id 0"),  # I2
        (lambda m: torch.where(torch.arange(K) == 5, m.d2t - 3, m.d2t), r"d2t\[5\] leads"),  # a duplicate
        (lambda m: m.d2t.to(torch.int32), "d2t is int32"),  # I8
    ],
    ids=["absolute", "zero", "duplicate", "int32"],
)
def test_a_wrong_d2t_is_refused(draft, mapping, make, words):
    with pytest.raises(PipelineError, match=words):
        check(changed(draft, tensors={"d2t": make(mapping)}), mapping)


def test_a_missing_map_is_refused(draft, mapping):  # I5
    with pytest.raises(PipelineError, match="has no t2d or d2t although its vocabulary is reduced"):
        check(changed(draft, without=("d2t", "t2d")), mapping)


def test_a_map_that_is_not_the_one_of_the_run_is_refused(draft, mapping):
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[:K] = True
    other = {"t2d": t2d, "d2t": torch.zeros(K, dtype=torch.int64)}
    with pytest.raises(PipelineError, match="its map is not the one of vocab_mapping/, first at draft token 0"):
        check(changed(draft, tensors=other), mapping)


def test_missing_and_unexpected_tensors_are_named(draft, mapping):
    broken = changed(draft, without=("fc.weight",), tensors={"extra.weight": torch.zeros(1)})
    with pytest.raises(PipelineError) as error:
        check(broken, mapping)
    assert "lacks tensors that its config asks for: fc.weight" in str(error.value)
    assert "no place for: extra.weight" in str(error.value)


def test_permuted_head_rows_are_refused(draft, mapping, verifier_tensors):
    head = draft.tensors["lm_head.weight"].roll(1, 0)
    broken = changed(draft, tensors={"lm_head.weight": head})
    with pytest.raises(PipelineError, match="lm_head row 0 is not the verifier's row 2"):
        export.check_head(broken, verifier_tensors[1], mapping, frozen=True, where="draft")


def test_embeddings_of_another_verifier_are_refused(draft, verifier_tensors):
    with pytest.raises(PipelineError, match="embeddings of another verifier"):
        export.check_embeddings(draft, verifier_tensors[1], where="draft")


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_a_flipped_norm_flag_fails_the_round_trip(draft, rows, verifier_tensors, flag):
    with pytest.raises(PipelineError, match="logits of sample 0 differ from the checkpoint's at TTT step"):
        export.check_round_trip(draft, changed(draft, config={flag: True}), rows, verifier_tensors[0], ttt_steps=3)


def test_another_rope_theta_fails_the_round_trip(draft, rows, verifier_tensors):
    shape = dict(draft.config["transformer_layer_config"])
    shape |= {"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    other = changed(draft, config={"transformer_layer_config": shape})
    with pytest.raises(PipelineError, match="logits of sample 0 differ"):
        export.check_round_trip(draft, other, rows, verifier_tensors[0], ttt_steps=3)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.module.", "module._fsdp_wrapped_module._orig_mod."])
def test_wrapper_prefixes_are_stripped(tmp_path, draft, mapping, prefix):
    wrapped = {prefix + name: tensor for name, tensor in draft.tensors.items()}
    export.write_draft(tmp_path, Draft(draft.config, wrapped), layout="speculators", share_embeddings=False)
    check(export.read_draft(tmp_path), mapping)


def test_a_second_layer_is_refused_by_the_original_layout(draft):
    shape = draft.config["transformer_layer_config"] | {"num_hidden_layers": 2}
    with pytest.raises(PipelineError, match="llama_eagle3 has one layer"):
        export.to_llama_eagle3(changed(draft, config={"transformer_layer_config": shape}))


def test_the_map_of_a_warm_start_is_taken_from_the_draft_when_it_is_the_recorded_one(draft, mapping):
    assert export.map_of(draft, mapping.fingerprint, where="draft").fingerprint == mapping.fingerprint
    with pytest.raises(PipelineError, match="is not the one that stage 4 recorded"):
        export.map_of(draft, "another", where="draft")
    with pytest.raises(PipelineError, match="has no sound t2d and d2t"):
        export.map_of(changed(draft, without=("d2t",)), mapping.fingerprint, where="draft")


# ---- servers that are too old ----


def test_a_server_that_ignores_an_option_is_named_with_its_version(draft):
    modern = changed(draft, config={"norm_output": True})
    (warning,) = export.server_warnings(modern, 30, Version("0.22.1"), "speculators")
    assert warning.startswith("vLLM 0.22.1 is too old for norm_output")
    assert not export.server_warnings(modern, 30, Version("0.32.0"), "speculators")
    assert not export.server_warnings(draft, 30, Version("0.22.1"), "speculators")


def test_the_last_layer_as_an_aux_layer_needs_a_recent_server(draft):
    assert not export.server_warnings(draft, 4, Version("0.25.0"), "speculators")
    (warning,) = export.server_warnings(draft, 3, Version("0.25.0"), "speculators")
    assert "too old for aux layer 3, the last" in warning


def test_what_sglang_does_not_read_is_said_in_its_own_layout(draft):
    plain = changed(draft, config={"norm_before_fc": True})
    assert export.server_warnings(plain, 30, None, "llama_eagle3") == [
        "SGLang has no norm_before_fc: serve this draft with vLLM"
    ]
    assert not export.can_serve_in_sglang(plain) and export.can_serve_in_sglang(draft)
