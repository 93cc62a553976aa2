"""Which rows of a pack are drafted from, which carry loss, and what each may attend to.

A row i of a pack holds the token x[i+1] and the aux states g[i] of one document (`shift_batch` of speculators), so
row i drafts x[i+2] at TTT step 0, x[i+3] at step 1, and so on. Letters: S rows of a pack, N supervised rows, T TTT
steps, H heads, G key heads, d head width. Knows nothing of the model's weights or of the loss.
"""

from dataclasses import dataclass
from typing import Any

import torch
from speculators.models.attention import ALL_ATTENTION_FUNCTIONS
from torch import Tensor

DOCUMENT_ATTENTION = "eagle3_documents"
# Queries at a time within a document: keeps scores [heads, 128, keys] in the cache and skips most of the upper triangle.
QUERY_BLOCK = 128


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
    needed[0] |= ~needed.any()  # at least one row, so that a pack without a loss runs through every weight
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
