"""The draft's training forward: the library's loss and gradients, rows, attention, and what is saved."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.attention import create_combined_mask_mod, extend_dense_mask_for_draft_tokens
from torch.nn.attention.flex_attention import create_mask
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from common import ttt_rows
from common.config import DraftSection, TrainSection, VerifierSection
from common.draft import build_draft, check_verifier_layer, start_from_verifier_layer
from common.errors import PipelineError
from common.head_loss import HeadLoss, first_argmax, head_loss
from common.trainer import save_draft
from common.ttt_rows import attend_within_documents, document_mask, plan_rows
from common.verifier import LAYER_TENSORS, VerifierHead, open_verifier
from common.vocab_mapping import VocabMapping, build_vocab_mapping
from tests import train_rig

V, D, K, T = train_rig.VOCAB, train_rig.HIDDEN, 128, 3
LOSSES = ["kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid", '{"ce": 0.1, "tv": 0.9}', '{"kl_div": 2.0}']
OPTIONS = {
    "eagle3": {"norm_before_residual": False},
    "residual": {"norm_before_residual": True},
    "eagle31": {"norm_before_fc": True, "norm_output": True},
    "fc_norm": {"fc_norm": True},
    "layers": {"num_hidden_layers": 2},
}


@pytest.fixture
def verifier_path(tmp_path):
    return train_rig.write_verifier(tmp_path / "verifier", train_rig.make_text(1))


def mapping(size=K) -> VocabMapping:
    freq = torch.arange(V, 0, -1).numpy()
    return build_vocab_mapping(freq, size, forced=[V - 1])


def make_draft(verifier_path, size=K, train_head=False, dtype="float32", **options):
    text = train_rig.make_text(1)
    head = VerifierHead(text.embed, text.head, text.norm, 1e-6)
    return build_draft(
        DraftSection(**(train_rig.DRAFT | options)),
        TrainSection(dtype=dtype, train_head=train_head),
        mapping=mapping(size),
        weights=head,
        verifier_path=str(verifier_path),
        aux_layer_ids=train_rig.AUX,
        seed=3,
    )


def stock_twin(model):
    """The same weights in speculators' own class, with SDPA."""
    config = copy.deepcopy(model.config)
    config.transformer_layer_config._attn_implementation = "sdpa"
    twin = Eagle3DraftModel(config=config)
    twin.load_state_dict(model.state_dict())
    twin.verifier_norm.variance_epsilon = model.verifier_norm.variance_epsilon
    for name, parameter in twin.named_parameters():
        parameter.requires_grad_(dict(model.named_parameters())[name].requires_grad)
    return twin


def make_batch(lengths=(30, 17, 25), padding=6, seed=0, prompt=5):
    """A pack of random documents, shifted as speculators shifts them; prompts of `prompt` rows carry no loss."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(lengths) + padding
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((padding,), -1)])
    positions = torch.cat([torch.arange(1, n + 1) for n in lengths] + [torch.zeros(padding, dtype=torch.long)])
    mask = (positions > prompt) & (documents >= 0)
    valid = (documents >= 0)[:, None]
    return {
        "hidden_states": (torch.randn(rows, 3 * D, generator=generator) * valid)[None],
        "input_ids": torch.randint(0, V, (rows,), generator=generator)[None],
        "document_ids": documents[None],
        "loss_mask": mask[None],
        "position_ids": positions[None],
        "verifier_last_hidden_states": (torch.randn(rows, D, generator=generator) * valid)[None],
    }


def step(model, batch, loss="kl_div", ttt_steps=T, decay=0.8):
    model.zero_grad()
    _, value, metrics = model(
        **batch, ttt_steps=ttt_steps, ttt_step_loss_decay=decay, loss_config=resolve_loss_config(loss, "eager")
    )
    value.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return value.item(), {k: v.item() for k, v in metrics.items()}, gradients


def assert_same_step(ours, library, tolerance=1e-5):
    assert ours[0] == pytest.approx(library[0], rel=tolerance)
    assert ours[2].keys() == library[2].keys()
    for name, gradient in library[2].items():
        assert (ours[2][name] - gradient).norm() <= 10 * tolerance * gradient.norm() + 1e-7, name


# ---- the library's loss


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients_are_the_librarys_for_every_loss(verifier_path, loss):
    model = make_draft(verifier_path)
    assert_same_step(step(model, make_batch(), loss), step(stock_twin(model), make_batch(), loss))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_loss_and_gradients_are_the_librarys_for_every_option(verifier_path, options):
    model = make_draft(verifier_path, **options)
    assert_same_step(step(model, make_batch()), step(stock_twin(model), make_batch()))


@pytest.mark.parametrize(("ttt_steps", "decay"), [(1, 0.8), (2, 1.0), (5, 0.5)])
def test_loss_is_the_librarys_for_any_number_of_steps(verifier_path, ttt_steps, decay):
    model = make_draft(verifier_path)
    ours, library = (step(m, make_batch(prompt=8), "kl_div", ttt_steps, decay) for m in (model, stock_twin(model)))
    assert_same_step(ours, library)


@pytest.mark.parametrize("loss", ["kl_div", "ce"])
def test_a_trained_head_gets_the_librarys_gradient(verifier_path, loss):
    model = make_draft(verifier_path, train_head=True)
    ours, library = step(model, make_batch(), loss), step(stock_twin(model), make_batch(), loss)
    assert "lm_head.weight" in ours[2]
    assert_same_step(ours, library)


def test_the_whole_vocabulary_needs_no_map(verifier_path):
    model = make_draft(verifier_path, size=V)
    assert model.t2d is None
    assert_same_step(step(model, make_batch()), step(stock_twin(model), make_batch()))


def test_under_bfloat16_the_loss_is_within_a_thousandth_of_the_librarys(verifier_path):
    model = make_draft(verifier_path, dtype="bfloat16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in make_batch().items()}
        ours, library = step(model, batch), step(stock_twin(model).float(), batch)
    assert ours[0] == pytest.approx(library[0], rel=1e-3)


def test_chunks_of_any_size_give_the_same_loss(verifier_path, monkeypatch):
    model = make_draft(verifier_path, train_head=True)
    whole = step(model, make_batch())
    monkeypatch.setitem(__import__("common.head_loss").head_loss.LOSS_ROWS, "cpu", 7)
    assert_same_step(step(model, make_batch()), whole)


def test_query_blocks_of_any_size_give_the_same_loss(verifier_path, monkeypatch):
    model = make_draft(verifier_path)
    whole = step(model, make_batch())
    monkeypatch.setattr(ttt_rows, "QUERY_BLOCK", 4)
    assert_same_step(step(model, make_batch()), whole)


def test_a_conversation_of_several_turns_has_the_librarys_loss(verifier_path):
    batch = make_batch(lengths=(60, 20))
    batch["loss_mask"][0, 20:33] = False  # a second prompt inside the first document
    model = make_draft(verifier_path)
    assert_same_step(step(model, batch), step(stock_twin(model), batch))


def test_a_pack_without_a_supervised_token_has_no_loss_and_no_gradient(verifier_path):
    batch = make_batch()
    batch["loss_mask"][:] = False
    value, _, gradients = step(make_draft(verifier_path), batch)
    assert value == 0.0
    trainable = {name for name, p in make_draft(verifier_path).named_parameters() if p.requires_grad}
    assert gradients.keys() == trainable and not any(g.any() for g in gradients.values())


def test_a_pack_of_padding_alone_runs(verifier_path):
    batch = make_batch(lengths=(), padding=12)
    assert step(make_draft(verifier_path), batch)[0] == 0.0


# ---- metrics


def test_accuracies_are_the_librarys(verifier_path):
    model = make_draft(verifier_path)
    batch = make_batch()
    # Aux states that say what is coming, so that some drafts are right.
    batch["hidden_states"] = batch["verifier_last_hidden_states"].repeat(1, 1, 3)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(60):
        step(model, batch)
        optimizer.step()
    ours, library = step(model, batch)[1], step(stock_twin(model), batch)[1]
    assert ours["full_acc_0_sum"] > 10 and ours["full_acc_1_sum"] > 0
    for key, value in library.items():
        if key.startswith(("full_acc", "loss")):
            assert ours[key] == pytest.approx(value, rel=1e-4), key


def test_conditional_accuracy_counts_drafts_that_were_right_so_far():
    """Rows 0..5 supervised from 1 on; hits by step, by hand: step 0 right at 1, 2, 4; step 1 (targets 2..5) at 2, 3."""
    from common.acceptance import accuracy_metrics

    mask = torch.tensor([False, True, True, True, True, True])
    plan = plan_rows(torch.zeros(6, dtype=torch.long), mask, 2, keep_all=False)
    job = HeadLoss.__new__(HeadLoss)
    job.expected = torch.tensor([10, 11, 12, 13, 14])  # targets 1..5
    job.predicted = torch.tensor([[10, 11, 0, 13, 0], [10, 11, 12, 0, 0]])
    metrics = {k: v.item() for k, v in accuracy_metrics(plan, job, mask).items()}
    assert (metrics["full_acc_0_sum"], metrics["full_acc_0_total"], metrics["cond_acc_0_total"]) == (3, 5, 5)
    # Step 1: target j from row j - 1. Row 0 isn't supervised; rows 1, 2, 4 were right; right again: 1 -> 2 and 2 -> 3.
    assert (metrics["full_acc_1_sum"], metrics["full_acc_1_total"], metrics["cond_acc_1_total"]) == (2, 5, 3)


# ---- rows and attention


def test_the_worked_pack_of_the_docstring():
    documents = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1])
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 0, 0, 1], dtype=torch.bool)
    plan = plan_rows(documents, mask, 3, keep_all=False)
    assert plan.targets.tolist() == [2, 3, 4, 8]
    assert plan.later.tolist() == [0, 1, 2, 3, 6, 7]
    later = plan.later
    assert plan.index[0].tolist() == [2, 3, 4, 8]
    assert [later[i].item() for i in plan.index[1]] == [1, 2, 3, 7]
    assert [later[i].item() for i in plan.index[2]] == [0, 1, 2, 6]


def test_no_row_drafts_for_another_document():
    """A document whose first row is supervised: the library would draft it from the document before."""
    documents = torch.tensor([0, 0, 1, 1])
    plan = plan_rows(documents, torch.tensor([False, True, True, True]), 2, keep_all=True)
    assert plan.index.tolist() == [[1, 2, 3], [0, -1, 2]]


@pytest.mark.parametrize("later", [None, [3, 4, 5, 6, 12, 13, 14, 20, 21]])
def test_document_attention_is_attention_under_the_librarys_mask(later):
    lengths, heads, groups, width, steps = (10, 7, 9), 4, 2, 8, 3
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    total = len(documents)
    rows = torch.arange(total) if later is None else torch.tensor(later)
    generator = torch.Generator().manual_seed(0)
    full_key, full_value = (torch.randn(1, groups, steps * total, width, generator=generator) for _ in range(2))
    full_query = torch.randn(1, heads, total, width, generator=generator)
    mask = create_mask(create_combined_mask_mod(documents, total), None, None, total, total, device="cpu")
    for _ in range(steps - 1):
        mask = extend_dense_mask_for_draft_tokens(mask, total)
    expected = torch.nn.functional.scaled_dot_product_attention(
        full_query, full_key.repeat_interleave(2, 1), full_value.repeat_interleave(2, 1), attn_mask=mask
    )
    picked = torch.cat([torch.arange(total), *(total * s + rows for s in range(1, steps))])
    found, _ = attend_within_documents(
        torch.nn.Identity(),
        full_query[:, :, rows],
        full_key[:, :, picked],
        full_value[:, :, picked],
        document_mask(documents, rows),
    )
    assert torch.allclose(found.transpose(1, 2), expected[:, :, rows], atol=1e-6)


def test_argmax_takes_the_lowest_index_of_equal_entries():
    scores = torch.zeros(3, 512)
    scores[0, [130, 140, 300]] = 2.0
    scores[1, 511] = 1.0
    assert first_argmax(scores).tolist() == [130, 511, 0] == scores.argmax(-1).tolist()
    assert first_argmax(scores[:, :100]).tolist() == [0, 0, 0]


def test_the_gradient_scales_with_what_comes_from_above(verifier_path):
    model, batch = make_draft(verifier_path, train_head=True), make_batch()
    single = step(model, batch)[2]
    model.zero_grad()
    _, value, _ = model(**batch, ttt_steps=T, ttt_step_loss_decay=0.8)
    (3 * value).backward()
    for name, gradient in single.items():
        found = dict(model.named_parameters())[name].grad
        assert (found - 3 * gradient).norm() < 1e-4 * gradient.norm(), name


def test_nothing_of_the_size_of_the_pack_times_the_vocabulary_is_made(monkeypatch):
    """Targets and logits exist for a chunk of supervised rows only."""
    seen = []
    plan = plan_rows(torch.zeros(600, dtype=torch.long), torch.arange(600) >= 300, 2, keep_all=False)

    def target_logits(rows):
        seen.append(len(rows))
        return torch.randn(len(rows), 16)

    job = HeadLoss(
        plan, target_logits, resolve_loss_config("kl_div", "eager"), decay=1.0, dtype=torch.float32, want_gradient=True
    )
    hidden = [torch.randn(600, 4, requires_grad=True), torch.randn(len(plan.later), 4, requires_grad=True)]
    head_loss(job, torch.randn(16, 4), hidden).backward()
    assert sum(seen) == 300 and max(seen) <= 128  # each target once, though two steps use it


# ---- what the draft is, and what is saved


def test_nothing_of_the_verifiers_configuration_leaks_into_the_draft(tmp_path):
    """Field fault J7: sliding window, latent attention and experts stay the verifier's."""
    odd = {"sliding_window": 64, "kv_lora_rank": 512, "n_routed_experts": 8, "qk_rope_head_dim": 64, "head_dim": 99}
    path = train_rig.write_verifier(tmp_path / "odd", train_rig.make_text(1), **odd)
    save_draft(make_draft(path), tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    shape = saved["transformer_layer_config"]
    assert shape["head_dim"] == 8 and shape["model_type"] == "llama" and shape["hidden_size"] == D
    text = json.dumps(saved)
    assert not any(word in text for word in ("sliding", "lora", "routed", "qk_"))


def test_a_saved_draft_is_a_plain_speculators_checkpoint(verifier_path, tmp_path):
    model = make_draft(verifier_path, norm_output=True)
    save_draft(model, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == ["Eagle3DraftModel"] and config["dtype"] == "bfloat16"
    assert config["norm_before_residual"] is True and config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {k: v.dtype for k, v in saved.items() if k in ("t2d", "d2t")} == {"t2d": torch.bool, "d2t": torch.int64}
    stock = stock_twin(model)
    stock.save_pretrained(tmp_path / "stock")
    assert load_file(tmp_path / "stock" / "model.safetensors").keys() == saved.keys()
    again = Eagle3DraftModel.from_pretrained(tmp_path / "saved")
    assert type(again) is Eagle3DraftModel
    for name, parameter in model.named_parameters():
        if not name.startswith("verifier_"):
            assert torch.equal(dict(again.named_parameters())[name].bfloat16(), parameter.bfloat16()), name


def test_embeddings_head_and_norm_are_the_verifiers(verifier_path):
    model, text = make_draft(verifier_path), train_rig.make_text(1)
    ids = mapping().target_ids
    assert torch.equal(model.embed_tokens.weight, text.embed.float())
    assert torch.equal(model.lm_head.weight, text.head[ids].float())
    assert torch.equal(model.verifier_lm_head.weight, text.head[ids].float())
    assert torch.equal(model.verifier_norm.weight, text.norm.float())
    assert model.verifier_norm.variance_epsilon == 1e-6 != model.norm.variance_epsilon
    assert not any(
        p.requires_grad for n, p in model.named_parameters() if "embed" in n or "lm_head" in n or "verifier" in n
    )


def test_yarn_reaches_the_drafts_rotary_embedding(verifier_path):
    scaling = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    model = make_draft(verifier_path, rope_scaling=scaling, rope_theta=50000.0)
    rope = model.config.transformer_layer_config.rope_parameters
    assert rope["rope_type"] == "yarn" and rope["factor"] == 64.0 and rope["rope_theta"] == 50000.0
    assert model.rotary_emb.rope_type == "yarn"


# ---- targets outside the draft vocabulary


def test_a_target_outside_the_draft_vocabulary_counts_by_the_rest_of_the_verifiers_distribution(verifier_path):
    """The rule, worked out from the verifier's whole distribution: what the draft can't say is left out of it."""
    model = make_draft(verifier_path)
    batch = make_batch(lengths=(40,), padding=0)
    value, _, _ = step(model, batch, ttt_steps=1, decay=1.0)
    supervised = batch["loss_mask"][0]
    text, last = train_rig.make_text(1), batch["verifier_last_hidden_states"][0]
    normed = last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + 1e-6) * text.norm.float()
    whole = (normed @ text.head.float().T).softmax(dim=-1)
    t2d = model.t2d
    outside = ~t2d[whole.argmax(dim=-1)] & supervised
    assert 5 < outside.sum() < supervised.sum() - 5
    target = whole[:, t2d] / whole[:, t2d].sum(dim=-1, keepdim=True)
    with torch.no_grad():
        plan = plan_rows(batch["document_ids"][0], supervised, 1, keep_all=False)
        masks = model._masks(batch["document_ids"][0], plan, 1)
        hidden = model._unroll(batch["hidden_states"], batch["input_ids"], batch["position_ids"], plan.later, masks)[0]
        draft = (hidden @ model.lm_head.weight.T).log_softmax(dim=-1)
    by_row = (target * (target.log() - draft)).sum(dim=-1)
    assert value == pytest.approx(float(by_row[supervised].mean()), rel=1e-4)
    without = float(by_row[supervised & ~outside].mean())
    assert abs(value - without) > 1e-3 * value  # leaving those rows out would be another loss


# ---- a start from a verifier's layer


def verifier_layer(**changes):
    """A decoder layer of transformers with norms that aren't all ones."""
    shape = {k: train_rig.DRAFT[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")}
    config = LlamaConfig(**(shape | {"intermediate_size": train_rig.DRAFT["intermediate_size"]} | changes))
    config._attn_implementation = "eager"
    torch.manual_seed(11)
    layer = LlamaDecoderLayer(config, 0).eval()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.rand_like(p) + 0.5 if p.ndim == 1 else 0.2 * torch.randn_like(p))
    return layer, config


def rows_of_size(size, *shape):
    rows = torch.randn(*shape, generator=torch.Generator().manual_seed(7))
    return size * rows / rows.pow(2).mean(dim=-1, keepdim=True).sqrt()


def start(verifier_path, **options):
    """A draft that starts from `verifier_layer`, the layer, and aux states [2, 3, 19, D], rows of one size a layer."""
    model = make_draft(verifier_path, **({"norm_before_residual": False} | options))
    layer, config = verifier_layer()
    aux = torch.stack([rows_of_size(size, 2, 19, D) for size in (1.0, 2.0, 6.0)], dim=1)
    joined = [torch.cat(list(sample), dim=1) for sample in aux]
    final_norm = torch.linspace(0.5, 1.5, D)
    start_from_verifier_layer(model, layer.state_dict(), final_norm, joined)
    return model, layer, config, aux, final_norm


@pytest.mark.parametrize("options", [{}, {"norm_before_fc": True, "norm_output": True}, {"fc_norm": True}])
def test_a_draft_that_sees_no_embedding_computes_what_the_verifiers_layer_does(verifier_path, options):
    model, layer, config, aux, final_norm = start(verifier_path, **options)
    with torch.no_grad():
        for name in "qkv":  # the embedding's half
            getattr(model.layers[0].self_attn, f"{name}_proj").weight[:, :D] = 0
        positions = torch.arange(19)[None]
        causal = torch.full((19, 19), float("-inf")).triu(1)[None, None]
        rotary = LlamaRotaryEmbedding(config)
        for sample in aux:
            state = layer(
                sample[2][None],
                attention_mask=causal,
                position_ids=positions,
                past_key_values=DynamicCache(),
                position_embeddings=rotary(sample[2][None], positions),
            )
            state = state[0] if isinstance(state, tuple) else state
            expected = state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * final_norm
            documents = torch.zeros(19, dtype=torch.long)
            plan = plan_rows(documents, torch.ones(19, dtype=torch.bool), 1, keep_all=False)
            masks = model._masks(documents, plan, 1)
            ids = torch.arange(19)[None]
            out = model._unroll(torch.cat(list(sample), dim=1)[None], ids, positions, plan.later, masks)[0]
            torch.testing.assert_close(out, expected[0] if expected.ndim == 3 else expected, rtol=1e-3, atol=1e-3)


def test_the_embeddings_half_stays_as_it_was(verifier_path):
    model = start(verifier_path)[0]
    untouched = make_draft(verifier_path, norm_before_residual=False)
    for name in "qkv":
        started, fresh = (getattr(m.layers[0].self_attn, f"{name}_proj").weight[:, :D] for m in (model, untouched))
        assert torch.equal(started, fresh)
    assert torch.equal(model.layers[0].input_layernorm.weight, untouched.layers[0].input_layernorm.weight)


def test_a_layer_of_another_size_is_refused(verifier_path):
    model = make_draft(verifier_path, norm_before_residual=False)
    layer = verifier_layer(intermediate_size=40)[0].state_dict()
    with pytest.raises(PipelineError, match=r"mlp.gate_proj.weight is \[40, 32\], expected \[48, 32\]"):
        start_from_verifier_layer(model, layer, torch.ones(D), [torch.ones(3, 3 * D)])
    assert layer.keys() == set(LAYER_TENSORS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "draft.norm_before_residual: True; the verifier's layer has False"),
        ({"norm_before_residual": False, "rope_theta": 5e5}, "draft.rope_theta: 500000.0; the verifier's layer has"),
        ({"norm_before_residual": False, "head_dim": 16}, "draft.head_dim: 16; the verifier's layer has 8"),
        (
            {"norm_before_residual": False, "hidden_act": "gelu"},
            "draft.hidden_act: gelu; the verifier's layer has silu",
        ),
    ],
)
def test_a_draft_whose_layer_would_mean_something_else_is_refused(verifier_path, changes, words):
    config = json.loads((verifier_path / "config.json").read_text())
    config |= {"intermediate_size": 48, "hidden_act": "silu", "rope_parameters": {"rope_theta": 10000.0}}
    (verifier_path / "config.json").write_text(json.dumps(config))
    verifier = open_verifier(VerifierSection(path=str(verifier_path)))
    check_verifier_layer(DraftSection(**(train_rig.DRAFT | {"norm_before_residual": False})), verifier)
    with pytest.raises(PipelineError, match=words):
        check_verifier_layer(DraftSection(**(train_rig.DRAFT | changes)), verifier)
