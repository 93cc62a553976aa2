"""Head, targets and loss of the supervised rows of a pack, in chunks that stay in the cache.

Letters: S_t rows kept at TTT step t, N supervised rows, T steps, D hidden size, K draft vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from speculators.losses import LossConfig
from torch import Tensor

from common.ttt_rows import RowPlan

# Rows at a time through head and loss. On a CPU 128 rows x 8,192 logits stay in the cache (softmax 1.9 us a row
# against 12 us for 1,024 rows at once); on a GPU it only bounds memory.
LOSS_ROWS = {"cpu": 128, "cuda": 2048}
LOSS_EPS = 1e-5  # speculators.losses.utils._LOSS_REDUCTION_EPS, so that the mean is the library's


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
    [S, K] ever exists, in the forward or the backward. After `head_loss` the fields hold:

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
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight = None if ctx.weight_gradient is None else ctx.weight_gradient * gradient
        return (None, weight, *(rows * gradient for rows in ctx.gradients))


def head_loss(job: HeadLoss, weight: Tensor, hidden: Sequence[Tensor]) -> Tensor:
    """The loss of one pack, a scalar that autograd can go back through; its parts are then in `job`."""
    loss: Tensor = _HeadLoss.apply(job, weight, *hidden)
    return loss
