"""The vocabulary map: which verifier tokens the draft can produce, and under which number.

    vocab_mapping/
        t2d.pt          bool  [V]   true for the K verifier ids that the draft can produce
        d2t.pt          int64 [K]   offsets: verifier id = k + d2t[k], so arange(K) + d2t == t2d.nonzero()
        token_freq.pt   int64 [V]   how often each token was supervised in the training split
        manifest.json   written last

Letters: V verifier vocabulary, K draft vocabulary. Knows nothing of tokenizers, samples on disk or training.
"""

import hashlib
import io
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from common.errors import PipelineError, Problem
from common.files import replacing
from common.manifest import Manifest, read_manifest

DIR_NAME = "vocab_mapping"
T2D_FILE, D2T_FILE, TOKEN_FREQ_FILE = "t2d.pt", "d2t.pt", "token_freq.pt"
FILES = (T2D_FILE, D2T_FILE, TOKEN_FREQ_FILE)
# The columns of samples.parquet that counting reads; nothing else is decoded.
COUNTED_COLUMNS = ("input_ids", "loss_mask", "split", "source")

TokenCounts = dict[tuple[str, str], np.ndarray]


@dataclass(frozen=True)
class VocabMapping:
    """t2d bool [V], d2t int64 [K] (offsets), token_freq int64 [V]."""

    t2d: torch.Tensor
    d2t: torch.Tensor
    token_freq: torch.Tensor

    @property
    def size(self) -> int:
        """K, the draft vocabulary."""
        return self.d2t.shape[0]

    @property
    def vocab_size(self) -> int:
        """V, the verifier vocabulary."""
        return self.t2d.shape[0]

    @property
    def target_ids(self) -> torch.Tensor:
        """Verifier id of each draft token, int64 [K], strictly increasing."""
        return torch.arange(self.size) + self.d2t

    @property
    def fingerprint(self) -> str:
        """sha256 over the map itself; the counts it came from don't matter to a draft."""
        digest = hashlib.sha256(self.t2d.numpy().tobytes())
        digest.update(self.d2t.numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Coverage:
    """Share of supervised tokens that a draft vocabulary of `size` can produce, by split and by (split, source)."""

    size: int
    by_split: dict[str, float]
    by_source: dict[tuple[str, str], float]


def count_tokens(batches: Iterable[pa.RecordBatch], vocab_size: int) -> TokenCounts:
    """Count supervised tokens by (split, source), streaming.

    Args:
        batches: record batches with the columns `COUNTED_COLUMNS`.
        vocab_size: V.

    Returns:
        int64 [V] counts for each (split, source) met.

    Raises:
        PipelineError: a token id lies outside the verifier's vocabulary.
    """
    counts: TokenCounts = {}
    for batch in batches:
        for key, rows in _by_group(batch):
            found = np.bincount(_supervised_ids(rows, vocab_size), minlength=vocab_size)
            counts[key] = counts[key] + found if key in counts else found
    return counts


def _by_group(batch: pa.RecordBatch) -> Iterator[tuple[tuple[str, str], pa.RecordBatch]]:
    """The rows of each (split, source) pair of a batch; nothing is copied where there is one pair."""
    pairs = list(zip(batch.column("split").to_pylist(), batch.column("source").to_pylist(), strict=True))
    for key in sorted(set(pairs)):
        one = pairs.count(key) == len(pairs)
        yield key, batch if one else batch.filter(pa.array([pair == key for pair in pairs]))


def _supervised_ids(batch: pa.RecordBatch, vocab_size: int) -> np.ndarray:
    """Token ids under the mask, int32 [n].

    Arrow's filter reads the mask as the bits that it is stored in: 4 times as fast as numpy's indexing by bools.
    """
    ids = batch.column("input_ids").flatten().filter(batch.column("loss_mask").flatten()).to_numpy()
    _refuse_foreign_ids(ids, vocab_size)
    return ids


def _refuse_foreign_ids(ids: np.ndarray, vocab_size: int) -> None:
    if len(ids) and (ids.max() >= vocab_size or ids.min() < 0):
        worst = int(ids.max()) if ids.max() >= vocab_size else int(ids.min())
        raise PipelineError(
            Problem(
                "samples",
                f"token id {worst} lies outside the verifier's vocabulary of {vocab_size}",
                "the samples were made with another tokenizer: run 01_prepare_data.py --overwrite",
            )
        )


def frequencies(counts: TokenCounts, split: str, source: str | None = None) -> np.ndarray:
    """Counts of one split (and one source), int64 [V]; all zero where nothing was counted."""
    chosen = [
        freq for (in_split, in_source), freq in counts.items() if in_split == split and source in (None, in_source)
    ]
    length = len(next(iter(counts.values()))) if counts else 0
    total = np.zeros(length, np.int64)
    for freq in chosen:
        total += freq
    return total


def build_vocab_mapping(token_freq: np.ndarray, size: int, forced: Collection[int] = ()) -> VocabMapping:
    """Choose K verifier tokens: the forced ones, then the most frequent, then the lowest unused ids.

    Equal counts go by id, lowest first. Without forced tokens this is the rule of speculators 0.9.0
    (`build_vocab_mappings_from_distribution`), so both give the same map.

    Args:
        token_freq: int64 [V].
        size: K, at most V.
        forced: verifier ids that are always in.

    Raises:
        PipelineError: K is larger than V, or doesn't hold the forced ids, or one of them isn't in the vocabulary.
    """
    forced_ids = np.array(sorted(set(forced)), np.int64)
    _check_request(len(token_freq), size, forced_ids)
    taken = np.zeros(len(token_freq), bool)
    taken[forced_ids] = True
    by_frequency = np.argsort(-token_freq, kind="stable")
    seen = by_frequency[: np.count_nonzero(token_freq)]
    taken[seen[~taken[seen]][: size - len(forced_ids)]] = True
    taken[np.flatnonzero(~taken)[: size - np.count_nonzero(taken)]] = True
    return _from_t2d(torch.from_numpy(taken), torch.from_numpy(token_freq.astype(np.int64)))


def _check_request(vocab_size: int, size: int, forced: np.ndarray) -> None:
    outside = forced[(forced < 0) | (forced >= vocab_size)]
    if len(outside):
        what = f"id {outside[0]} lies outside the verifier's vocabulary of {vocab_size}"
        raise PipelineError(Problem("vocab.forced_tokens", what, "remove it"))
    if size > vocab_size:
        what = f"{size} is more than the verifier's vocabulary of {vocab_size}"
        raise PipelineError(Problem("vocab.size", what, f"set vocab.size to {vocab_size} or less"))
    if size < max(1, len(forced)):
        what = f"{size} doesn't hold the {len(forced)} forced tokens"
        raise PipelineError(Problem("vocab.size", what, "raise vocab.size or shorten vocab.forced_tokens"))


def _from_t2d(t2d: torch.Tensor, token_freq: torch.Tensor) -> VocabMapping:
    target_ids = t2d.nonzero().flatten()
    return VocabMapping(t2d, target_ids - torch.arange(len(target_ids)), token_freq)


def count_filled(mapping: VocabMapping, forced: Collection[int] = ()) -> int:
    """How many draft tokens were never supervised and not forced: they only fill the map up to K."""
    filled = mapping.t2d & (mapping.token_freq == 0)
    filled[list(set(forced))] = False
    return int(filled.sum())


def coverages(
    counts: TokenCounts, sizes: Sequence[int], forced: Collection[int] = (), *, chosen: VocabMapping | None = None
) -> list[Coverage]:
    """Coverage for each draft vocabulary size that the verifier's vocabulary and the forced tokens allow.

    `chosen` stands for its own size (an imported map isn't what these counts would give).
    """
    train = frequencies(counts, "train")
    smallest = max(1, len(set(forced)))
    maps = {size: build_vocab_mapping(train, size, forced) for size in sizes if smallest <= size <= len(train)}
    if chosen is not None:
        maps[chosen.size] = chosen
    return [_coverage(counts, maps[size].t2d.numpy()) for size in sorted(maps)]


def _coverage(counts: TokenCounts, t2d: np.ndarray) -> Coverage:
    def share(freq: np.ndarray) -> float:
        return float(freq[t2d].sum() / freq.sum()) if freq.sum() else float("nan")

    by_split = {split: share(frequencies(counts, split)) for split in sorted({split for split, _ in counts})}
    return Coverage(int(t2d.sum()), by_split, {key: share(freq) for key, freq in sorted(counts.items())})


def most_frequent_left_out(mapping: VocabMapping, limit: int) -> list[tuple[int, int]]:
    """(verifier id, count) of the most frequent supervised tokens that the draft can't produce."""
    left_out = torch.where(mapping.t2d, 0, mapping.token_freq)
    counts, ids = left_out.sort(descending=True, stable=True)
    return [(int(i), int(c)) for i, c in zip(ids[:limit], counts[:limit], strict=True) if c > 0]


def check_vocab_mapping(t2d: torch.Tensor, d2t: torch.Tensor, token_freq: torch.Tensor | None = None) -> list[str]:
    """Say what is wrong with a map, each fault with the first index that shows it; empty when it is right."""
    faults = [*_type_faults("t2d", t2d, torch.bool), *_type_faults("d2t", d2t, torch.int64)]
    if token_freq is not None:
        faults += _type_faults("token_freq", token_freq, torch.int64)
        if not faults and token_freq.shape != t2d.shape:
            faults.append(f"token_freq has {len(token_freq)} entries, t2d has {len(t2d)}")
        if not faults and bool((token_freq < 0).any()):
            faults.append(f"token_freq[{int((token_freq < 0).nonzero()[0])}] is negative")
    if faults:
        return faults
    return _offset_faults(t2d, d2t)


def _type_faults(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> list[str]:
    if tensor.ndim == 1 and tensor.dtype == dtype:
        return []
    found, expected = (str(d).removeprefix("torch.") for d in (tensor.dtype, dtype))
    first = f", first entry {name}[0] = {tensor.flatten()[0].item()}" if tensor.numel() else ""
    return [f"{name} is {found} {list(tensor.shape)}, expected one dimension of {expected}{first}"]


def _offset_faults(t2d: torch.Tensor, d2t: torch.Tensor) -> list[str]:
    expected = t2d.nonzero().flatten()
    targets = torch.arange(len(d2t)) + d2t
    shorter = min(len(expected), len(targets))
    wrong = (targets[:shorter] != expected[:shorter]).nonzero().flatten()
    faults = []
    if len(expected) != len(d2t):
        faults.append(f"t2d marks {len(expected)} ids, d2t has {len(d2t)} entries (index {shorter} has no counterpart)")
    if len(wrong):
        k = int(wrong[0])
        faults.append(f"d2t[{k}] leads to verifier id {int(targets[k])}, t2d says {int(expected[k])}")
    return faults


def write_vocab_mapping(out_dir: Path, mapping: VocabMapping) -> list[Path]:
    """Write the three tensors, each by rename; the same map gives the same bytes."""
    faults = check_vocab_mapping(mapping.t2d, mapping.d2t, mapping.token_freq)
    assert not faults, faults
    paths = []
    for name, tensor in zip(FILES, (mapping.t2d, mapping.d2t, mapping.token_freq), strict=True):
        # torch.save names the archive inside the file after the path; through a buffer the name is always the same.
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        with replacing(out_dir / name) as temporary:
            temporary.write_bytes(buffer.getvalue())
        paths.append(out_dir / name)
    return paths


def open_vocab_mapping(run_dir: Path) -> tuple[Manifest, VocabMapping]:
    """Open a complete `vocab_mapping/` of a run.

    Raises:
        PipelineError: no manifest, a file is missing or unreadable, or the map is wrong.
    """
    manifest = read_manifest(run_dir / DIR_NAME, "03_build_vocab_mapping")
    return manifest, import_vocab_mapping(run_dir / DIR_NAME)[0]


def import_vocab_mapping(source_dir: Path) -> tuple[VocabMapping, bool]:
    """Read t2d, d2t and token_freq made anywhere; validated bit by bit.

    `d2t` may be in the older form, which holds the verifier ids themselves: t2d tells the two apart without
    doubt, since offsets satisfy arange(K) + d2t == t2d.nonzero() and ids satisfy d2t == t2d.nonzero().

    Returns:
        The map, and whether d2t was in the older form (and was converted).

    Raises:
        PipelineError: a file is missing, unreadable, of the wrong type, or fits neither form.
    """
    t2d, d2t, token_freq = (_read_tensor(source_dir / name) for name in FILES)
    if not _type_faults("t2d", t2d, torch.bool) and not _type_faults("d2t", d2t, torch.int64):
        expected = t2d.nonzero().flatten()
        if torch.equal(d2t, expected) and len(d2t) > 1:
            d2t_offsets = d2t - torch.arange(len(d2t))
            _raise_faults(source_dir, check_vocab_mapping(t2d, d2t_offsets, token_freq))
            return VocabMapping(t2d, d2t_offsets, token_freq), True
    _raise_faults(source_dir, check_vocab_mapping(t2d, d2t, token_freq))
    return VocabMapping(t2d, d2t, token_freq), False


def _raise_faults(source_dir: Path, faults: list[str]) -> None:
    fix = "build it again with 03_build_vocab_mapping.py; nothing can be repaired by guessing"
    if faults:
        raise PipelineError(*(Problem("vocabulary map", f"{source_dir}: {fault}", fix) for fault in faults))


def _read_tensor(path: Path) -> torch.Tensor:
    """Load one bare tensor without running anything that the file brings along."""
    if not path.is_file():
        raise PipelineError(
            Problem("vocabulary map", f"{path} is missing", f"the map is the three files {', '.join(FILES)}")
        )
    try:
        tensor = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises a dozen kinds, by what is broken
        what = f"{path} can't be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        raise PipelineError(Problem("vocabulary map", what, "copy or build it again")) from error
    if not isinstance(tensor, torch.Tensor):
        raise PipelineError(Problem("vocabulary map", f"{path} holds a {type(tensor).__name__}, expected a tensor"))
    return tensor.cpu()
