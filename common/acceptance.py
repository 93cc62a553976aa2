"""What training measures: speculators' accuracies, and the acceptance that serving would have on held-out text.

Letters: S rows of a pack, N supervised rows, T TTT steps; row i drafts the tokens of rows i + 1, i + 2, ...
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.head_loss import HeadLoss
from common.ttt_rows import RowPlan


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

    @property
    def by_position(self) -> list[float]:
        """Share of drafts whose first k + 1 tokens were accepted."""
        return [count / max(self.drafts, 1) for count in self.accepted]


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
