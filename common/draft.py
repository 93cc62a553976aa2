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

Letters: S rows of a pack, D hidden size, K draft vocabulary, V verifier vocabulary, N supervised rows.
A row i of a pack holds the token x[i+1] and the aux states g[i] of one document (`shift_batch` of speculators), so
row i drafts x[i+2] at TTT step 0, x[i+3] at step 1, and so on. Knows nothing of files, batches or the optimiser.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import LossConfig, resolve_loss_config
from speculators.model import SpeculatorModel
from speculators.models.attention import ALL_ATTENTION_FUNCTIONS
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.eagle3.attention import extend_mask_for_draft_tokens
from speculators.models.utils import conditional_torch_compile
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import DynamicCache, LlamaConfig

# The class that the saved config.json names; stage 5 and vLLM look for this one.
ARCHITECTURE = "Eagle3DraftModel"
DOCUMENT_ATTENTION, FLEX_ATTENTION = "eagle3_documents", "simple_flex_attention"
# Queries at a time within a document: keeps scores [heads, 128, keys] in the cache and skips most of the upper triangle.
QUERY_BLOCK = 128
# Rows at a time through head and loss. On a CPU 128 rows x 8,192 logits stay in the cache (softmax 1.9 us a row
# against 12 us for 1,024 rows at once); on a GPU it only bounds memory.
LOSS_ROWS = {"cpu": 128, "cuda": 2048}
LOSS_EPS = 1e-5  # speculators.losses.utils._LOSS_REDUCTION_EPS, so that the mean is the library's


# ---- configuration and weights ------------------------------------------------------------------------------------


def draft_config(
    shape: LlamaConfig,
    *,
    draft_vocab_size: int,
    aux_layer_ids: Sequence[int],
    verifier_path: str,
    num_draft_tokens: int,
    **options: bool,
) -> Eagle3SpeculatorConfig:
    """Describe the draft: its own decoder shape, the aux layers it reads, and the EAGLE-3 options.

    Args:
        shape: the decoder, written out by the operator; nothing is taken from the verifier's configuration, so its
            sliding window, experts or latent attention can't leak in.
        options: norm_before_residual, norm_before_fc, fc_norm, norm_output.
    """
    return Eagle3SpeculatorConfig(
        transformer_layer_config=shape,
        draft_vocab_size=draft_vocab_size,
        eagle_aux_hidden_state_layer_ids=list(aux_layer_ids),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=num_draft_tokens)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(verifier_path),
        ),
        **options,
    )


@dataclass(frozen=True)
class FrozenWeights:
    """What the draft takes from the verifier: embed [V, D], head [V, D], norm [D], and the norm's epsilon."""

    embed: Tensor
    head: Tensor
    norm: Tensor
    eps: float


def load_verifier_weights(
    model: Eagle3DraftModel, weights: FrozenWeights, *, dtype: torch.dtype, train_head: bool
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


# ---- rows: which of them are drafted from, and which carry loss ----------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Some queries of one document and the keys they may see; `blocked` bool [queries, keys] is the causal mask."""

    queries: slice
    keys: slice
    blocked: Tensor


@dataclass(frozen=True)
class DocumentMask:
    """Attention within documents. `num_rows` keys belong to TTT step 0; the keys of later steps follow, diagonal."""

    num_rows: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class RowPlan:
    """The rows of one pack that matter.

    targets: int64 [N], supervised rows j, each the target of T drafts.
    index: int64 [T, N], where the row that drafts target j at step t (row j - t) stands among the rows kept at
        that step; -1 where it lies in another document.
    later: int64 [S'], rows kept after step 0: those with a target at step 1 or later. None keeps all.
    """

    targets: Tensor
    index: Tensor
    later: Tensor | None


def plan_rows(document_ids: Tensor, loss_mask: Tensor, ttt_steps: int, *, keep_all: bool) -> RowPlan:
    """Find the supervised rows and the rows that must be drafted from at each step.

    A worked pack of two documents, supervised rows marked, T = 3:

        row        0  1  2  3  4 | 5  6  7  8
        loss       .  .  x  x  x | .  .  .  x
        step 0     row 2 drafts target 2, 3 -> 3, 4 -> 4, 8 -> 8
        step 1     1 -> 2, 2 -> 3, 3 -> 4, 7 -> 8
        step 2     0 -> 2, 1 -> 3, 2 -> 4, 6 -> 8
        later      0, 1, 2, 3, 6, 7      (rows 4, 5 and 8 draft nothing after step 0)

    speculators (0.9.0, `align_for_step`) also counts row 4 as drafting target 5 and 6 of the next document where
    those are supervised; these rows predict one document from another and are left out here.
    """
    targets = loss_mask.nonzero().flatten()
    steps = torch.arange(ttt_steps, device=targets.device)[:, None]
    sources = targets - steps
    present = (sources >= 0) & (document_ids[sources.clamp(min=0)] == document_ids[targets])
    if keep_all:
        return RowPlan(targets, torch.where(present, sources, -1), None)
    needed = torch.zeros_like(loss_mask)
    needed[sources[1:][present[1:]]] = True
    later = needed.nonzero().flatten()
    position = needed.cumsum(0) - 1
    index = torch.cat([sources[:1], position[sources[1:].clamp(min=0)]]) if ttt_steps > 1 else sources
    return RowPlan(targets, torch.where(present, index, -1), later)


def document_mask(document_ids: Tensor, rows: Tensor | None = None) -> DocumentMask:
    """Cut the rows (all, or `rows` of them) into blocks of queries within a document, each with the keys it sees."""
    num_rows = len(document_ids)
    rows = torch.arange(num_rows) if rows is None else rows
    _, lengths = document_ids.unique_consecutive(return_counts=True)
    ends = lengths.cumsum(0)
    cuts = torch.searchsorted(rows, ends).tolist()
    blocks, begin = [], 0
    for first_key, cut in zip((ends - lengths).tolist(), cuts, strict=True):
        for start in range(begin, cut, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, cut)
            keys = slice(first_key, int(rows[stop - 1]) + 1)
            blocked = torch.arange(keys.start, keys.stop) > rows[start:stop, None]
            blocks.append(Block(slice(start, stop), keys, blocked))
        begin = cut
    return DocumentMask(num_rows, tuple(blocks))


def attend_within_documents(
    module: torch.nn.Module,  # noqa: ARG001 - the interface's
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: DocumentMask,
    scaling: float | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Attention of EAGLE-3's unrolled training on a CPU, document by document.

    Row i sees the step-0 keys of its document up to i, and of every later step only its own key (the diagonal of
    `create_combined_mask_mod` in speculators' `models/eagle3/attention.py`), so those take one product a row.

    Args:
        query: [1, H, S, d].
        key, value: [1, G, num_rows + t * S, d], the keys of step 0, then those of steps 1 to t.
        attention_mask: which keys of step 0 each query sees.

    Returns:
        [1, S, H, d], and no attention weights.
    """
    _, heads, num_queries, width = query.shape
    groups, base = key.shape[1], attention_mask.num_rows
    # Under autocast rotary embeddings leave queries and keys in float32; SDPA would cast them like this.
    query = (query * (scaling or width**-0.5)).to(value.dtype).view(groups, heads // groups, num_queries, width)
    keys, values = key[0].to(value.dtype).unsqueeze(1), value[0].unsqueeze(1)
    later = [slice(s, s + num_queries) for s in range(base, keys.shape[2], max(1, num_queries))]
    own = torch.stack([(query * keys[:, :, s]).sum(-1) for s in later], -1) if later else None
    parts, weights = [], []
    for block in attention_mask.blocks:
        scores = query[:, :, block.queries] @ keys[:, :, block.keys].transpose(-1, -2)
        scores = scores.float().masked_fill(block.blocked, float("-inf"))
        if own is not None:
            scores = torch.cat([scores, own[:, :, block.queries].float()], -1)
        probability = scores.softmax(-1).to(value.dtype)
        num_keys = block.keys.stop - block.keys.start
        parts.append(probability[..., :num_keys] @ values[:, :, block.keys])
        weights.append(probability[..., num_keys:])
    out = torch.cat(parts, 2) if parts else torch.zeros_like(query)
    if later and weights:
        own_weights = torch.cat(weights, 2)
        for step, rows in enumerate(later):
            out = out + own_weights[..., step, None] * values[:, :, rows]
    return out.reshape(1, heads, num_queries, width).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(DOCUMENT_ATTENTION, attend_within_documents)


# ---- head and loss, in chunks of supervised rows -------------------------------------------------------------------


def first_argmax(scores: Tensor, width: int = 128) -> Tensor:
    """Index of the largest entry of each row [n, K], the lowest where several are equal.

    Two passes over blocks of `width`: on this CPU torch's argmax takes 2.4 us for 8,192 float32 and 13 us for
    bfloat16, this 0.7 us and 2 us.
    """
    n, size = scores.shape
    if size % width or size <= width:
        return scores.argmax(-1)
    blocks = scores.view(n, size // width, width)
    block = blocks.amax(-1).argmax(-1)
    return block * width + blocks[torch.arange(n, device=scores.device), block].argmax(-1)


class HeadLoss:
    """Head, targets and loss of one pack, and their gradients, row chunk by row chunk.

    For a chunk of targets the verifier's logits are computed once and used by all T steps, so nothing of size
    [S, K] ever exists, in the forward or the backward. After `_HeadLoss.apply` the fields hold:

    losses: float32 [T], mean loss of each step with its decay, as speculators' `compound_loss` gives it.
    terms: the unweighted losses by name [T], where there are several.
    predicted: int64 [T, N] draft ids, -1 where there is no draft row. expected: int64 [N], argmax of the targets.
    """

    def __init__(
        self,
        plan: RowPlan,
        target_logits: Callable[[Tensor], Tensor],
        loss_config: LossConfig,
        *,
        decay: float,
        dtype: torch.dtype,
        want_gradient: bool,
    ) -> None:
        self._plan, self._target_logits, self._loss_config = plan, target_logits, loss_config
        self._dtype, self._want_gradient = dtype, want_gradient
        steps, device = len(plan.index), plan.targets.device
        present = (plan.index >= 0).float()
        # One row's share of its step's mean, decay included: [T, N].
        means = present / (present.sum(1, keepdim=True) + LOSS_EPS)
        self._shares = means * (decay ** torch.arange(steps, device=device))[:, None]
        self.losses = torch.zeros(steps, device=device)
        self.terms = {name: torch.zeros(steps, device=device) for name in loss_config if len(loss_config) > 1}
        self.predicted = torch.full_like(plan.index, -1)
        self.expected = torch.zeros_like(plan.targets)

    def run(self, weight: Tensor, hidden: Sequence[Tensor]) -> tuple[Tensor | None, list[Tensor]]:
        """Compute the losses; return the gradients of their sum.

        Args:
            weight: lm_head [K, D].
            hidden: T tensors [S_t, D], normed, the rows kept at each step.

        Returns:
            Gradient of the weight (None where it is frozen), and of each step's hidden rows.
        """
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
        gradients = [torch.zeros_like(rows, dtype=torch.float32) for rows in hidden]
        cast = [rows.detach().to(self._dtype) for rows in hidden]
        head = weight.detach().to(self._dtype)
        chunk = LOSS_ROWS.get(head.device.type, LOSS_ROWS["cuda"])
        for begin in range(0, len(self._plan.targets), chunk):
            part = slice(begin, begin + chunk)
            targets = _Targets(self._target_logits(self._plan.targets[part]))
            self.expected[part] = targets.argmax
            for step, index in enumerate(self._plan.index[:, part]):
                rows = cast[step][index.clamp(min=0)]
                d_logits = self._step(step, part, rows @ head.T, targets)
                self.predicted[step, part] = torch.where(index >= 0, self.predicted[step, part], -1)
                if self._want_gradient:
                    gradients[step].index_add_(0, index.clamp(min=0), (d_logits @ head).float())
                    if weight_gradient is not None:
                        weight_gradient += (d_logits.T @ rows).float()
        return weight_gradient, gradients

    def _step(self, step: int, part: slice, logits: Tensor, targets: "_Targets") -> Tensor:
        """Add one chunk to the loss of one step; return the gradient of its logits [n, K]."""
        shares = self._shares[step, part]
        if list(self._loss_config) == ["kl_div"]:
            return self._kl_step(step, part, logits, targets)
        self.predicted[step, part] = first_argmax(logits.float())
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            total = torch.zeros((), device=logits.device)
            for name, (loss_fn, loss_weight) in self._loss_config.items():
                term = (loss_fn(leaf[None], targets.logits[None])[0] * shares).sum()
                total = total + loss_weight * term
                if name in self.terms:
                    self.terms[name][step] += term.detach()
        self.losses[step] += total.detach()
        return torch.autograd.grad(total, leaf)[0] if self._want_gradient else logits

    def _kl_step(self, step: int, part: slice, logits: Tensor, targets: "_Targets") -> Tensor:
        """KL(p || q) = sum p log p - sum p log q, with d/dlogits = q - p; sum p log p is shared by the steps.

        The library's loss takes torch's `kl_div`, whose scalar `xlogy` alone costs 30 us a row of 8,192 here.
        """
        shares = self._shares[step, part]
        log_q = torch.log_softmax(logits, -1, dtype=torch.float32)
        self.predicted[step, part] = first_argmax(log_q)
        loss = (targets.negative_entropy - torch.linalg.vecdot(targets.probability, log_q)) * shares
        _, weight = self._loss_config["kl_div"]
        self.losses[step] += weight * loss.sum()
        if not self._want_gradient:
            return logits
        return log_q.exp_().sub_(targets.probability).mul_(weight * shares[:, None]).to(self._dtype)


class _Targets:
    """The verifier's logits [n, K] of a chunk and what every step reads of them."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        log_p = torch.log_softmax(logits, -1, dtype=torch.float32)
        self.argmax = first_argmax(log_p)
        self.probability = log_p.exp()
        self.negative_entropy = torch.linalg.vecdot(self.probability, log_p)


class _HeadLoss(torch.autograd.Function):
    """Autograd's view of `HeadLoss`: the gradients are known once the loss is."""

    @staticmethod
    def forward(ctx: Any, job: HeadLoss, weight: Tensor, *hidden: Tensor) -> Tensor:
        ctx.weight_gradient, ctx.gradients = job.run(weight, hidden)
        return job.losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight = None if ctx.weight_gradient is None else ctx.weight_gradient * gradient
        return (None, weight, *(rows * gradient for rows in ctx.gradients))


# ---- what is measured ----------------------------------------------------------------------------------------------


def accuracy_metrics(plan: RowPlan, job: HeadLoss, loss_mask: Tensor) -> dict[str, Tensor]:
    """speculators' accuracies (`compute_accuracy_single_step`), as sums and totals for `normalize_counted_metrics`.

    full_acc_t: supervised targets at step t that were drafted right, with all steps before right too, from a row
    that is itself supervised. cond_acc_t: the same count over the drafts that were still right before step t.
    """
    metrics: dict[str, Tensor] = {}
    still_right = loss_mask.clone()
    for step, index in enumerate(plan.index):
        sources = plan.targets - step
        drafted = index >= 0
        alive = torch.where(drafted, still_right[sources.clamp(min=0)], False)
        right = alive & (job.predicted[step] == job.expected)
        still_right = torch.zeros_like(still_right).index_put(
            (sources[right],), torch.tensor(True, device=right.device)
        )
        metrics[f"full_acc_{step}_sum"] = metrics[f"cond_acc_{step}_sum"] = right.sum().float()
        metrics[f"full_acc_{step}_total"] = drafted.sum().float()
        metrics[f"cond_acc_{step}_total"] = alive.sum().float()
    return metrics


@dataclass(frozen=True)
class Acceptance:
    """Drafts made, and how many of them were accepted up to each position: accepted[k] counts drafts whose first
    k + 1 tokens were all right. Acceptance length is 1 + sum(accepted) / drafts, as vLLM counts it."""

    drafts: int
    accepted: list[int]

    @property
    def length(self) -> float:
        return 1 + sum(self.accepted) / self.drafts if self.drafts else float("nan")


def simulate_acceptance(hits: Tensor, supervised: Tensor, document_ids: Tensor) -> Acceptance:
    """Walk through held-out text as vLLM would, and count accepted draft tokens.

    hits[t, i] says that the draft made at row i has its token t right, the true token being the one in the text.
    Its first n(i) tokens are accepted, n(i) = sum over k of the product of hits[0..k, i] (joint prefix hits, not a
    product of rates), the verifier adds one of its own, and the next draft is made at i + n(i) + 1. With M drafts
    at rows i_1, i_2, ...:

        acceptance length = 1 + (n(i_1) + ... + n(i_M)) / M

    TTT feeds the true tokens to steps 1, 2, ...; as long as all before were right these are the draft's own, so a
    prefix of hits is exactly what serving would accept. Walking matters: the mean over all rows counts the easy
    ones again that an accepted draft has jumped over.

    Args:
        hits: bool [T, S]; false where the text ends.
        supervised: bool [S], rows whose token the verifier wrote.
        document_ids: int64 [S].
    """
    lengths = hits.int().cumprod(0).sum(0).tolist()
    follows = torch.zeros_like(supervised)
    follows[:-1] = supervised[:-1] & supervised[1:] & (document_ids[:-1] == document_ids[1:])
    drafts, accepted, row = 0, [0] * len(hits), 0
    can_draft = follows.tolist()
    while row < len(can_draft):
        if not can_draft[row]:
            row += 1
            continue
        drafts += 1
        for position in range(lengths[row]):
            accepted[position] += 1
        row += lengths[row] + 1
    return Acceptance(drafts, accepted)


def find_hits(
    plan: RowPlan, predicted_ids: Tensor, input_ids: Tensor, supervised: Tensor, document_ids: Tensor
) -> Tensor:
    """hits[t, i]: the token that row i drafts at step t is the text's, and the verifier wrote that one.

    Target row j holds token x[j+1] and is the place where x[j+2], the token of row j + 1, is predicted.

    Args:
        predicted_ids: int64 [T, N], verifier ids, -1 where nothing was drafted.

    Returns:
        bool [T, S].
    """
    following = torch.full_like(input_ids, -2)
    same = supervised[1:] & (document_ids[:-1] == document_ids[1:])
    following[:-1] = torch.where(same, input_ids[1:], -2)
    right = predicted_ids == following[plan.targets]
    hits = torch.zeros(len(predicted_ids), len(input_ids), dtype=torch.bool, device=input_ids.device)
    for step, row in enumerate(right):
        hits[step, (plan.targets - step)[row]] = True
    return hits


# ---- the model -----------------------------------------------------------------------------------------------------


@SpeculatorModel.register("eagle3_supervised_rows")
class SupervisedRowsEagle3(Eagle3DraftModel):
    """`Eagle3DraftModel` with a training forward that computes logits, targets and loss only where there is a loss.

    Same parameters, same checkpoint. The loss is the library's up to rounding (a test holds it within 1e-3).
    Positions whose verifier token lies outside the draft vocabulary keep their loss: the targets are the verifier's
    distribution over the draft vocabulary, renormalised, as in the library; in the simulated acceptance they count
    as misses.
    """

    def forward(  # type: ignore[override]
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
            loss = _HeadLoss.apply(job, self.lm_head.weight, *hidden)
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
