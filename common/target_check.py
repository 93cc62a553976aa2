"""Do the stored states predict the text? Asked before step 1, since training on wrong targets looks healthy.

The draft's targets are head(norm(last hidden state)). At a supervised token x[t+1] the verifier's distribution p is
computed from the state at t, and two things are measured:

- agreement: how often argmax p is the token that follows. Greedy text by this verifier: nearly always.
- excess: mean of -log p(x[t+1]) minus mean entropy of p, in nats. For text sampled from p at temperature 1 both have
  the same expectation, so it is 0; greedy text is likelier than that, so negative; human text is a little unlikelier.

Measured on SmolLM2-135M, 1,800 to 4,900 tokens each (agreement, excess):

                                   greedy          sampled         written by people
    as it should be                0.99  -1.0      0.44   0.05     0.56   0.4
    no norm                        0.15   263      0.06   454      0.24   227
    norm applied already           0.26   4.8      0.10    12      0.35   6.3
    layer 27 of 30                 0.50   2.9      0.28   6.5      0.34   5.4
    one token late / early         0.02    12      0.02   9.0      0.02    12
    other verifier                 0.00    19      0.00    18      0.00    21

An excess of at most 1 tells right from wrong for all three kinds of text; the agreement does it for greedy text only.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import Problem
from common.hidden_states import HiddenStates
from common.verifier import VerifierHead

ENOUGH_TOKENS = 2000
# A reading of the states other than the right one must explain the text about this well (nats) to be named.
GOOD_EXCESS = 1.0
ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class TargetCheck:
    """agreement and excess (see the module) over `num_tokens`; `suspect` is a reading that fits where ours doesn't."""

    agreement: float
    excess: float
    num_tokens: int
    suspect: str = ""


def check_targets(samples: Iterable[HiddenStates], head: VerifierHead) -> TargetCheck:
    """Measure over the first samples, until about 2,000 supervised tokens are seen.

    The other readings are tried only where the right one doesn't explain the text.
    """
    taken = list(_until_enough(samples))
    agreement, excess, count = _measure(taken, head, shift=0, normed=True)
    suspect = "" if excess <= GOOD_EXCESS else _find_suspect(taken, head)
    return TargetCheck(agreement, excess, count, suspect)


def _until_enough(samples: Iterable[HiddenStates]) -> Iterator[HiddenStates]:
    seen = 0
    for states in samples:
        yield states
        seen += int(states.loss_mask[1:].sum())
        if seen >= ENOUGH_TOKENS:
            return


def _find_suspect(samples: list[HiddenStates], head: VerifierHead) -> str:
    readings = {
        "the final norm is applied already": (0, False),
        "the states stand one token late": (1, True),
        "the states stand one token early": (-1, True),
    }
    found = {name: _measure(samples, head, shift=s, normed=n)[1] for name, (s, n) in readings.items()}
    best = min(found, key=lambda name: found[name])
    return best if found[best] <= GOOD_EXCESS else "another verifier, or not its last layer"


def _measure(samples: list[HiddenStates], head: VerifierHead, *, shift: int, normed: bool) -> tuple[float, float, int]:
    """(agreement, excess, tokens) when the state that predicts x[t+1] is looked for at t + shift."""
    sums, count = torch.zeros(2, dtype=torch.float64), 0
    for states, rows in _supervised_rows(samples, shift):
        last = states.last[rows + shift]
        logits = head.logits(last) if normed else last.to(head.head.dtype) @ head.head.T
        sums += _score(logits, states.input_ids[rows + 1])
        count += len(rows)
    if not count:
        return float("nan"), float("nan"), 0
    agreement, excess = (sums / count).tolist()
    return agreement, excess, count


def _supervised_rows(samples: list[HiddenStates], shift: int) -> Iterator[tuple[HiddenStates, Tensor]]:
    """Rows t (int64 [n]) whose next token is supervised and whose state, shifted, exists; some at a time."""
    for states in samples:
        rows = states.loss_mask[1:].nonzero().flatten()
        inside = (rows + shift >= 0) & (rows + shift < len(states.input_ids))
        for part in rows[inside].split(ROWS_AT_ONCE):
            yield states, part


def _score(logits: Tensor, tokens: Tensor) -> Tensor:
    """Sums over rows of (argmax is the token, -log p(token) - entropy), float64 [2]. logits: [n, V]."""
    log_p = logits.float().log_softmax(-1)
    entropy = torch.special.entr(log_p.exp()).sum(-1)
    surprise = -log_p.gather(1, tokens[:, None])[:, 0]
    right = log_p.argmax(-1) == tokens
    return torch.stack([right.double().sum(), (surprise - entropy).double().sum()])


def target_problem(
    check: TargetCheck, *, min_agreement: float | None, max_excess: float, where: str = "hidden states"
) -> Problem | None:
    """What to tell the operator; None when the targets are right.

    Args:
        min_agreement: for text that the verifier wrote greedily; None for any other.
    """
    fix = "mend the extraction (02_extract_hidden_states.py --overwrite) or name the verifier that it ran"
    if check.num_tokens == 0:
        return Problem(where, "no supervised token, so the targets can't be checked", "look at samples/")
    if not check.excess <= max_excess:
        what = f"the verifier's head doesn't explain the text: {check.excess:.2f} nats a token above its entropy"
        what += f" (at most {max_excess:g}), {check.agreement:.1%} of next tokens predicted. Likely: {check.suspect}"
        return Problem(where, what, fix)
    if min_agreement is not None and check.agreement < min_agreement:
        what = f"the verifier's head predicts {check.agreement:.1%} of the next tokens of its own greedy text"
        what += f" (at least {min_agreement:.0%}). Likely: {check.suspect or 'another verifier or dtype wrote it'}"
        return Problem(where, what, fix)
    return None
