"""From samples' hidden states to packs: speculators' dataset, sampler and collate function over `data_N.pt`.

Knows the states only through a function that loads one sample.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import speculators.train.distributed as topology
import torch
from speculators.models.eagle3 import shift_batch
from speculators.train.data import BaseDataset, BatchType, CollateFn
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from speculators.train.recovery import SampleUnavailable
from torch.utils.data import DataLoader

from common.config import TrainSection
from common.draft import DTYPES
from common.errors import PipelineError, Problem, some
from common.hidden_states import HiddenStates

UNREADABLE = "unreadable_samples"


@dataclass(frozen=True)
class SplitRows:
    """The samples of one split that have hidden states: `load(index)` reads one, `lengths` are their tokens."""

    load: Callable[[int], HiddenStates]
    indices: Sequence[int]
    lengths: Sequence[int]


class PackedStates(BaseDataset):
    """speculators' dataset over `data_N.pt`; its own reads Arrow and safetensors (0.9.0)."""

    def __init__(self, rows: SplitRows, *, max_tokens: int, dtype: torch.dtype) -> None:
        self._rows = rows
        super().__init__(max_tokens, dtype)

    def _compute_approx_lengths(self) -> list[int]:
        return list(self._rows.lengths)

    def __len__(self) -> int:
        return len(self._rows.indices)

    def _get_raw_data(self, index: int) -> BatchType | SampleUnavailable:
        number = self._rows.indices[index]
        try:
            states = self._rows.load(number)
        except (PipelineError, OSError, RuntimeError, ValueError) as error:
            return SampleUnavailable(reason=f"sample {number}: {error}")
        return {
            "hidden_states": torch.cat(states.aux, dim=-1),
            "input_ids": states.input_ids,
            "verifier_last_hidden_states": states.last,
            "loss_mask": states.loss_mask,
        }


class _Collate(CollateFn):
    """speculators' collate function, which drops samples that can't be read; this one keeps their names."""

    def __call__(self, batch: Sequence[BatchType | SampleUnavailable | None]) -> BatchType:
        reasons = [sample.reason for sample in batch if isinstance(sample, SampleUnavailable)]
        return super().__call__(batch) | {UNREADABLE: reasons}


class PackLoader(DataLoader):
    """A loader that stops at the first unreadable sample beyond the tolerance, naming it, instead of skipping it."""

    def __init__(self, dataset: PackedStates, *, tolerance: int, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.unreadable: list[str] = []
        self._tolerance = tolerance

    def __iter__(self) -> Iterator[BatchType]:  # type: ignore[override]
        for batch in super().__iter__():
            self.unreadable += batch.pop(UNREADABLE)
            if len(self.unreadable) > self._tolerance:
                what = f"can't be read: {some(self.unreadable)}"
                fix = "run 02_extract_hidden_states.py --verify, or set train.max_unreadable_samples"
                raise PipelineError(Problem("hidden states", what, fix))
            yield batch


class PackSampler(MultipackDistributedBatchSamplerV2):
    """speculators' packing, dealt out so that accumulation and ranks are interchangeable.

    The packs of an epoch are made for `world_size * accumulation` virtual ranks. A process takes those of its
    `accumulation` virtual ranks in turn, so every optimiser step sees the same packs whether two ranks hold one
    each or one process adds up two, and no step is left half full at the end of an epoch.
    """

    def __init__(self, lengths: Sequence[int], *, max_tokens: int, accumulation: int, seed: int) -> None:
        world_size, rank = topology.get_dp_size(), topology.get_dp_rank()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the stage says how many samples are cut, before anything starts
            super().__init__(max_tokens, lengths, world_size * accumulation, rank * accumulation, seed=seed)
        self._virtual_ranks = range(rank * accumulation, (rank + 1) * accumulation)

    def _generate_batches(self, epoch: int) -> list[np.ndarray]:
        if self._cached_generated_batches[0] == epoch:
            return self._cached_generated_batches[1]
        dealt = []
        for virtual_rank in self._virtual_ranks:
            self.rank, self._cached_generated_batches = virtual_rank, (-1, [])
            dealt.append(super()._generate_batches(epoch))
        packs = [pack for step in zip(*dealt, strict=True) for pack in step]
        self._cached_generated_batches = (epoch, packs)
        return packs


def make_loader(
    rows: SplitRows,
    settings: TrainSection,
    *,
    accumulation: int,
    seed: int,
    hidden_size: int,
    num_aux: int,
    tolerance: int,
) -> PackLoader:
    """Packs of up to `max_tokens_per_batch` tokens, shuffled by epoch, the same for every run with this seed."""
    dtype, max_tokens = DTYPES[settings.dtype], settings.max_tokens_per_batch
    collate = _Collate(max_tokens, hidden_size, num_aux, dtype, shift_batch)
    workers = settings.num_workers
    return PackLoader(
        PackedStates(rows, max_tokens=max_tokens, dtype=dtype),
        tolerance=tolerance,
        batch_sampler=PackSampler(rows.lengths, max_tokens=max_tokens, accumulation=accumulation, seed=seed),
        collate_fn=collate,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="spawn" if workers else None,
        pin_memory=torch.accelerator.is_available(),
        # A generator of its own: starting an iterator must not move the global random state, or a run that is
        # continued in the middle of an epoch has drawn once more than one that was not.
        generator=torch.Generator().manual_seed(seed),
    )
