"""The draft model: its configuration, its weights, and a training forward that works only where there is a loss.

The model is speculators' `Eagle3DraftModel`; what is saved is a plain checkpoint of it. Only the forward differs,
because the library's computes what nobody reads (speculators 0.9.0, `models/eagle3/core.py`, measured on two cores
with AVX512_BF16, one Llama layer of SmolLM2's size, packs of 1,024 tokens, 70% of them supervised):

- verifier targets and draft logits for every position, though only supervised ones carry loss; three argmax over
  the same targets (14% of the time);
- a KL divergence in half a dozen passes over a [T, K] float32 tensor that fits no cache (25%); here the rows go
  through head and loss in chunks that do;
- attention over a dense mask of all documents in the pack, once more as wide at every TTT step (25%), though the
  columns of later steps are diagonal.

Letters: S rows of a pack, D hidden size, A aux layers, K draft vocabulary, V verifier vocabulary. Knows nothing of
batches or the optimiser.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import LossConfig, resolve_loss_config
from speculators.model import SpeculatorModel
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.eagle3.attention import extend_mask_for_draft_tokens
from speculators.models.utils import conditional_torch_compile
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import DynamicCache, LlamaConfig

from common import checkpoints
from common.acceptance import accuracy_metrics, find_hits, simulate_acceptance
from common.config import DraftSection, TrainSection
from common.errors import PipelineError, Problem, some
from common.files import read_json
from common.head_loss import HeadLoss, head_loss
from common.ttt_rows import DOCUMENT_ATTENTION, RowPlan, document_mask, plan_rows
from common.verifier import Verifier, VerifierHead
from common.vocab_mapping import VocabMapping, check_vocab_mapping

# The class that the saved config.json names; stage 5 and vLLM look for this one.
ARCHITECTURE = "Eagle3DraftModel"
FLEX_ATTENTION = "simple_flex_attention"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@SpeculatorModel.register("eagle3_supervised_rows")
class SupervisedRowsEagle3(Eagle3DraftModel):
    """`Eagle3DraftModel` with a training forward that computes logits, targets and loss only where there is a loss.

    Same parameters, same checkpoint. The loss is the library's up to rounding (a test holds it within 1e-3).
    Positions whose verifier token lies outside the draft vocabulary keep their loss: the targets are the verifier's
    distribution over the draft vocabulary, renormalised, as in the library; in the simulated acceptance they count
    as misses.
    """

    def forward(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        document_ids: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor,
        verifier_last_hidden_states: Tensor,
        ttt_steps: int = 3,
        ttt_step_loss_decay: float = 1.0,
        loss_config: LossConfig | None = None,
        **_unused: Any,
    ) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
        """Unroll T draft steps over one pack and compute its loss.

        Args:
            hidden_states: [1, S, A * D] aux states. input_ids, document_ids (-1: padding), position_ids: int64 [1, S].
            loss_mask: bool [1, S]. verifier_last_hidden_states: [1, S, D], before the final norm.

        Returns:
            Nothing (the library returns draft tokens, which its trainer drops), the loss [], and the metrics.
        """
        by_document = self._attn_impl == DOCUMENT_ATTENTION
        # Documents come first, padding last. One row stays even in an empty pack, so that every weight has a gradient.
        kept = max(1, int((document_ids != -1).sum())) if by_document else document_ids.shape[1]
        documents, mask = document_ids[0, :kept], loss_mask[0, :kept] & (document_ids[0, :kept] != -1)
        plan = plan_rows(documents, mask, ttt_steps, keep_all=not by_document)
        hidden = self._unroll(
            hidden_states[:, :kept],
            input_ids[:, :kept],
            position_ids[:, :kept],
            plan.later,
            self._masks(documents, plan, ttt_steps),
        )
        job = self._head_loss(plan, verifier_last_hidden_states[0, :kept], ttt_step_loss_decay, loss_config)
        with torch.autocast(hidden_states.device.type, enabled=False):
            loss = head_loss(job, self.lm_head.weight, hidden)
        metrics = self._metrics(plan, job, mask) | {"tokens": (documents != -1).sum().float()}
        if not self.training:
            metrics |= self._acceptance_metrics(plan, job, input_ids[0, :kept], mask, documents)
        return [], loss, metrics

    def _masks(self, documents: Tensor, plan: RowPlan, ttt_steps: int) -> list[Any]:
        """The attention mask of each TTT step."""
        if self._attn_impl == DOCUMENT_ATTENTION:
            later = document_mask(documents, plan.later)
            return [document_mask(documents), *[later] * (ttt_steps - 1)]
        masks = [self._build_attn_mask(documents, len(documents), documents.device)]
        while len(masks) < ttt_steps:
            masks.append(extend_mask_for_draft_tokens(masks[-1]))
        return masks

    @conditional_torch_compile
    def _unroll(
        self, hidden: Tensor, input_ids: Tensor, position_ids: Tensor, later: Tensor | None, masks: list[Any]
    ) -> list[Tensor]:
        """The draft's normed output [S_t, D] of each TTT step, the true tokens being fed in (`forward` of the library)."""
        cache = DynamicCache()
        hidden = self._fuse(hidden)
        rows = torch.arange(input_ids.shape[1], device=input_ids.device)
        outputs = []
        for step, mask in enumerate(masks):
            if step == 1 and later is not None:
                rows, hidden = later, hidden[:, later]
            with torch.no_grad():
                # Past the end of the pack any token does: these rows carry no loss.
                tokens = input_ids[:, (rows + step).clamp(max=input_ids.shape[1] - 1)]
                embeds = self.embed_tokens(tokens).to(self.norm.weight.dtype)
            hidden = torch.cat([embeds, hidden], dim=-1)
            positions = position_ids[:, rows] + step
            rotary = self.rotary_emb(hidden, positions)
            for layer in self.layers:
                hidden = layer(
                    hidden,
                    attention_mask=mask,
                    position_ids=positions,
                    past_key_values=cache,
                    position_embeddings=rotary,
                )
            normed = self.norm(hidden)
            if self.config.norm_output:
                hidden = normed
            outputs.append(normed[0])
        return outputs

    def _fuse(self, aux: Tensor) -> Tensor:
        """Aux states [1, S, A * D] to the draft's first hidden state [1, S, D]."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            chunks = aux.chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(aux)

    def _head_loss(self, plan: RowPlan, last: Tensor, decay: float, loss_config: LossConfig | None) -> HeadLoss:
        """The loss of one pack, with targets from the verifier's last hidden state [S, D]."""
        head = self.verifier_lm_head.weight

        def target_logits(rows: Tensor) -> Tensor:
            return self.verifier_norm(last[rows]).to(head.dtype) @ head.T

        return HeadLoss(
            plan,
            target_logits,
            loss_config or resolve_loss_config("kl_div", "eager"),
            decay=decay,
            dtype=head.dtype,
            want_gradient=torch.is_grad_enabled(),
        )

    def _metrics(self, plan: RowPlan, job: HeadLoss, mask: Tensor) -> dict[str, Tensor]:
        """The library's metrics, under its names."""
        one = torch.ones((), device=mask.device)
        metrics = {"loss_sum": job.losses.sum(), "loss_total": one} | accuracy_metrics(plan, job, mask)
        for name, losses in {"loss": job.losses, **{f"{term}_loss": v for term, v in job.terms.items()}}.items():
            for step, loss in enumerate(losses):
                metrics[f"{name}_{step}_sum"], metrics[f"{name}_{step}_total"] = loss, one
        return metrics

    def _acceptance_metrics(
        self, plan: RowPlan, job: HeadLoss, input_ids: Tensor, mask: Tensor, documents: Tensor
    ) -> dict[str, Tensor]:
        """Simulated acceptance of a held-out pack, in sums that add up over packs and ranks."""
        ids = job.predicted if self.d2t is None else job.predicted + self.d2t[job.predicted.clamp(min=0)]
        ids = torch.where(job.predicted >= 0, ids, -1)
        hits = find_hits(plan, ids, input_ids, mask, documents)
        found = simulate_acceptance(hits.cpu(), mask.cpu(), documents.cpu())
        drafts = torch.tensor(float(found.drafts), device=mask.device)
        metrics = {"acceptance_length_sum": drafts + sum(found.accepted), "acceptance_length_total": drafts}
        for position, accepted in enumerate(found.accepted):
            metrics[f"acceptance_{position}_sum"] = torch.tensor(float(accepted), device=mask.device)
            metrics[f"acceptance_{position}_total"] = drafts
        return metrics


# ---- making one ----------------------------------------------------------------------------------------------------


def load_verifier_weights(
    model: Eagle3DraftModel, weights: VerifierHead, *, dtype: torch.dtype, train_head: bool
) -> None:
    """Put the verifier's embeddings, head rows and final norm into the draft; the vocabulary map must be in already.

    speculators' own loader asks `AutoConfig` without `trust_remote_code` (0.9.0), guesses the head's key, and only
    warns where the norm is missing, so the tensors come from `common/verifier.py`. Frozen matrices are kept in
    `dtype`: autocast would cast them again on every call, and in float32 they are half of a small draft's memory.
    """
    rows = weights.head if model.t2d is None else weights.head[model.t2d]
    train_dtype = torch.float32
    with torch.no_grad():
        model.embed_tokens.weight = torch.nn.Parameter(weights.embed.to(dtype), requires_grad=False)
        model.verifier_lm_head.weight = torch.nn.Parameter(rows.to(dtype), requires_grad=False)
        model.lm_head.weight = torch.nn.Parameter(
            rows.to(train_dtype if train_head else dtype), requires_grad=train_head
        )
        model.verifier_norm.weight.copy_(weights.norm)
    # The draft's epsilon may differ from the verifier's, and the targets need the verifier's.
    model.verifier_norm.variance_epsilon = weights.eps


def draft_shape(draft: DraftSection, vocab_size: int) -> LlamaConfig:
    """The draft's decoder as the YAML writes it out; the only foreign number is V."""
    rope: dict[str, Any] = {"rope_type": "default", **(draft.rope_scaling or {}), "rope_theta": draft.rope_theta}
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=draft.hidden_size,
        intermediate_size=draft.intermediate_size,
        num_hidden_layers=draft.num_hidden_layers,
        num_attention_heads=draft.num_attention_heads,
        num_key_value_heads=draft.num_key_value_heads,
        head_dim=draft.head_dim,
        hidden_act=draft.hidden_act,
        max_position_embeddings=draft.max_position_embeddings,
        rms_norm_eps=draft.rms_norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=False,
    )


def build_draft(
    draft: DraftSection,
    train: TrainSection,
    *,
    mapping: VocabMapping,
    weights: VerifierHead,
    verifier_path: str,
    aux_layer_ids: Sequence[int],
    seed: int,
) -> SupervisedRowsEagle3:
    """A fresh draft (or that of `train.init_from`) with the verifier's weights in it.

    Raises:
        PipelineError: a weight isn't a number after loading, or the earlier draft has another shape.
    """
    shape = draft_shape(draft, weights.embed.shape[0])
    shape._attn_implementation = FLEX_ATTENTION if torch.accelerator.is_available() else DOCUMENT_ATTENTION
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=shape,
        draft_vocab_size=mapping.size,
        eagle_aux_hidden_state_layer_ids=list(aux_layer_ids),
        norm_before_residual=draft.norm_before_residual,
        norm_before_fc=draft.norm_before_fc,
        fc_norm=draft.fc_norm,
        norm_output=draft.norm_output,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=train.ttt_steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(verifier_path),
        ),
    )
    torch.manual_seed(seed)
    model = SupervisedRowsEagle3(config=config)
    model.load_vocab_mappings(mapping.t2d, mapping.d2t)
    load_verifier_weights(model, weights, dtype=DTYPES[train.dtype], train_head=train.train_head)
    if train.init_from:
        load_earlier_draft(model, train.init_from)
    broken = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    if broken:
        what = f"not a number after loading: {some(broken)}"
        raise PipelineError(Problem("draft", what, "the verifier's embeddings, head or norm are damaged or incomplete"))
    return model


def check_verifier_layer(draft: DraftSection, verifier: Verifier) -> None:
    """Whether the draft's first layer can hold a layer of this verifier with the same meaning.

    Raises:
        PipelineError: a size, the activation or the rotary base differs, or the residual would be another one.
    """
    text = verifier.text_config
    theirs = {
        "intermediate_size": text.get("intermediate_size"),
        "num_attention_heads": text.get("num_attention_heads"),
        "num_key_value_heads": text.get("num_key_value_heads", text.get("num_attention_heads")),
        "head_dim": text.get("head_dim") or verifier.hidden_size // text.get("num_attention_heads", 1),
        "hidden_act": text.get("hidden_act"),
        "rope_theta": verifier.rope_theta,
        "norm_before_residual": False,
    }
    fix = "make the draft section alike, or unset train.init_verifier_layer"
    problems = [
        Problem(f"draft.{name}", f"{getattr(draft, name)}; the verifier's layer has {value}", fix)
        for name, value in theirs.items()
        if getattr(draft, name) != value
    ]
    if problems:
        raise PipelineError(*problems)


def start_from_verifier_layer(
    model: SupervisedRowsEagle3, layer: Mapping[str, Tensor], final_norm: Tensor, aux: Iterable[Tensor]
) -> None:
    """Let the untrained draft compute what this verifier layer makes of the last aux state.

    The fusion passes the last aux state through (in the mean size it has in `aux`, since the norms before it take
    the size away), the layer's weights go to the half of the first draft layer that reads the state, and the final
    norm is the verifier's. The half that reads the token's embedding stays random: there is nothing to copy, and a
    draft trained from zeros there accepted less (SmolLM2-135M, 120 steps: 1.42 against 1.43; all random: 1.41).

    Args:
        layer: tensors by LAYER_TENSORS' names. final_norm: [D]. aux: some samples' aux states, [T, A * D] each.

    Raises:
        PipelineError: a tensor has another shape than the draft's.
    """
    hidden = model.norm.get_parameter("weight").shape[0]
    first = model.layers[0]
    own = {name: first.get_parameter(_OWN_NAME.get(name, name)) for name in layer}
    # q, k and v read embedding and state side by side; the state's half is the right one.
    parts = {name: p[:, hidden:] if p.ndim == 2 and p.shape[1] == 2 * hidden else p for name, p in own.items()}
    wrong = [
        f"{name} is {list(tensor.shape)}, expected {list(parts[name].shape)}"
        for name, tensor in layer.items()
        if tensor.shape != parts[name].shape
    ]
    if wrong:
        fix = "make the draft section describe the verifier's layer"
        raise PipelineError(Problem("train.init_verifier_layer", some(wrong), fix))
    with torch.no_grad():
        for name, tensor in layer.items():
            parts[name].copy_(tensor)
        model.norm.get_parameter("weight").copy_(final_norm)
        fusion = model.fc.get_parameter("weight")
        fusion.zero_()
        fusion[:, -hidden:].fill_diagonal_(_size_before_norm(model, aux))


# What is normed in the verifier is the hidden state; in the draft `input_layernorm` is the embedding's.
_OWN_NAME = {"input_layernorm.weight": "hidden_norm.weight"}


def _size_before_norm(model: SupervisedRowsEagle3, aux: Iterable[Tensor]) -> float:
    """Mean root-mean-square of what the norms before the fusion divide out of the last aux state; 1 without norms."""
    if model.input_norm is None and model.fc_norm is None:
        return 1.0
    width = model.norm.get_parameter("weight").shape[0] if model.input_norm is None else None
    sizes = [states[:, -width:] if width else states for states in aux]
    return float(torch.cat([rows.float().pow(2).mean(dim=1).sqrt() for rows in sizes]).mean())


def check_earlier_draft(path: Path, draft: DraftSection, aux_layer_ids: Sequence[int]) -> None:
    """Compare an earlier draft's configuration with the draft section and the extracted layers, without its weights.

    Raises:
        PipelineError: it is absent, or differs in a way that would make its weights mean something else.
    """
    checkpoints.check_checkpoint(path)
    config = read_json(path / checkpoints.CONFIG_FILE)
    saved = config | config.get("transformer_layer_config", {})
    fields = set(DraftSection.model_fields) - {"rope_theta", "rope_scaling", "max_position_embeddings"}
    different = [
        f"draft.{name} is {getattr(draft, name)}, there {saved[name]}"
        for name in sorted(fields & saved.keys())
        if saved[name] != getattr(draft, name)
    ]
    problems = [
        Problem("train.init_from", f"{path}: {one}", "make the draft section describe that draft") for one in different
    ]
    read = config.get("eagle_aux_hidden_state_layer_ids")
    if read is not None and list(read) != list(aux_layer_ids):
        what = f"the states are of layers {list(aux_layer_ids)}, the draft in {path} reads {list(read)}"
        problems.append(Problem("train.init_from", what, "set extract.aux_layer_ids to its layers and extract again"))
    if problems:
        raise PipelineError(*problems)


def load_earlier_draft(model: SupervisedRowsEagle3, path: Path) -> None:
    """Start from the trainable weights of an earlier draft; what belongs to the verifier stays the verifier's."""
    checkpoints.check_checkpoint(path)
    saved = load_file(path / checkpoints.WEIGHTS_FILE)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    wrong = [
        f"{name} is {list(saved[name].shape) if name in saved else 'missing'}, expected {list(p.shape)}"
        for name, p in trainable.items()
        if name not in saved or saved[name].shape != p.shape
    ]
    if wrong:
        what = f"{path} has another shape: {some(wrong)}"
        raise PipelineError(Problem("train.init_from", what, "make the draft section describe that draft"))
    with torch.no_grad():
        for name, parameter in trainable.items():
            parameter.copy_(saved[name])


def read_earlier_mapping(path: Path, vocab_size: int) -> VocabMapping:
    """The vocabulary map inside an earlier draft; a draft without one has the whole vocabulary.

    Raises:
        PipelineError: there is no draft, its map was dropped or is wrong, or it is of another vocabulary.
    """
    checkpoints.check_checkpoint(path)
    saved = load_file(path / checkpoints.WEIGHTS_FILE)
    no_counts = torch.zeros(vocab_size, dtype=torch.int64)
    if "t2d" in saved and "d2t" in saved:
        faults = check_vocab_mapping(saved["t2d"], saved["d2t"])
        if len(saved["t2d"]) != vocab_size:
            faults.append(f"t2d has {len(saved['t2d'])} entries, the verifier {vocab_size} tokens")
        if faults:
            what = f"the vocabulary map of {path} is wrong: {some(faults)}"
            raise PipelineError(Problem("train.init_from", what, "take a draft of this verifier, as it was saved"))
        return VocabMapping(saved["t2d"], saved["d2t"], no_counts)
    if read_json(path / checkpoints.CONFIG_FILE).get("draft_vocab_size") not in (None, vocab_size):
        what = f"{path} has a reduced vocabulary and no t2d and d2t"
        raise PipelineError(Problem("train.init_from", what, "the map was dropped when it was saved; use another"))
    return VocabMapping(torch.ones(vocab_size, dtype=torch.bool), no_counts.clone(), no_counts)
