"""Stage 3's counting against speculators' own, over the same samples.

    python -m benchmarks.vocab

20,000 synthetic samples of about 500 tokens with Zipf-like ids over SmolLM2's vocabulary. speculators
(`save_token_frequency_distribution`, 0.9.0) goes row by row, so it gets the first 2,000 of them; both are rates.
"""

import tempfile
import time
from pathlib import Path

import datasets
import numpy as np
import torch
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution, save_token_frequency_distribution

from benchmarks.record import alternating, claim_of, record
from common.samples import FILE_NAME, Sample, Samples, write_samples
from common.vocab_mapping import COUNTED_COLUMNS, build_vocab_mapping, count_tokens

VOCAB, SAMPLES, THEIR_SAMPLES, DRAFT_VOCAB, ROUNDS = 49152, 20_000, 2_000, 8192, 3


def make_samples(out_dir: Path) -> Samples:
    rng = np.random.default_rng(0)
    lengths = rng.integers(200, 800, SAMPLES)
    ids = [np.minimum(rng.zipf(1.2, n), VOCAB - 1).astype(np.int32) for n in lengths]
    made = (Sample(x, np.arange(len(x)) > len(x) // 3, str(i), "train", "zipf") for i, x in enumerate(ids))
    write_samples(out_dir, made)
    return Samples(out_dir / FILE_NAME, None)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        samples = make_samples(path)
        rows = datasets.Dataset.from_parquet(str(path / FILE_NAME), cache_dir=str(path / "cache"))
        rows = rows.select(range(THEIR_SAMPLES)).with_format("torch", columns=["input_ids", "loss_mask"])

        def ours() -> float:
            began = time.perf_counter()
            count_tokens(samples.iter_batches(COUNTED_COLUMNS), VOCAB)
            return float(samples.num_tokens.sum() / (time.perf_counter() - began))

        def theirs() -> float:
            (path / "freq.pt").unlink(missing_ok=True)
            began = time.perf_counter()
            save_token_frequency_distribution(rows, path / "freq.pt")
            return float(samples.num_tokens[:THEIR_SAMPLES].sum() / (time.perf_counter() - began))

        mine, library = alternating(ROUNDS, ours, theirs)
        text = "tokens/s of counting, beside speculators 0.9.0 on the same samples"
        claim = claim_of(text, mine, library, at_least=50, tokens=int(samples.num_tokens.sum()), same_map=same(path))
        record("vocab", [claim])


def same(path: Path) -> bool:
    """Whether both make the same map of the same counts, where nothing is forced."""
    counted = torch.load(path / "freq.pt", weights_only=True)
    freq = np.zeros(VOCAB, np.int64)
    freq[list(counted)] = list(counted.values())
    d2t, t2d = build_vocab_mappings_from_distribution(counted, DRAFT_VOCAB, VOCAB)
    mapping = build_vocab_mapping(freq, DRAFT_VOCAB)
    return torch.equal(mapping.d2t, d2t) and torch.equal(mapping.t2d, t2d)


if __name__ == "__main__":
    main()
