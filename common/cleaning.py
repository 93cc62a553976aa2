"""What is left out of the training data, and why: duplicates, held-out prompts, looping answers."""

import re
from collections.abc import Iterable, Sequence

from datasketch import MinHash, MinHashLSH

# Word n-grams of this length in common mark a copy (Brown et al. 2020, appendix C); shorter prompts must be equal.
HELD_OUT_NGRAM = 13
DUPLICATE_NGRAM = 5
NUM_PERMUTATIONS = 64
# An answer loops when its last this many tokens repeat with a period of at most MAX_PERIOD.
LOOP_TOKENS, MAX_PERIOD = 64, 16
_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _ngrams(text: str, length: int) -> set[tuple[str, ...]]:
    """Word n-grams; a shorter text is one n-gram of its own."""
    found = words(text)
    return {tuple(found[i : i + length]) for i in range(max(1, len(found) - length + 1))}


class HeldOut:
    """Recognises prompts that are kept for measuring."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._grams = {gram for text in texts for gram in _ngrams(text, HELD_OUT_NGRAM) if gram}

    def contains(self, text: str) -> bool:
        return not self._grams.isdisjoint(_ngrams(text, HELD_OUT_NGRAM))


class Duplicates:
    """Finds prompts that are equal, or nearly so, to one seen before (MinHash, word 5-grams)."""

    def __init__(self, threshold: float) -> None:
        self._exact: set[str] = set()
        self._near = MinHashLSH(threshold=threshold, num_perm=NUM_PERMUTATIONS) if threshold < 1 else None

    def seen_before(self, text: str) -> bool:
        """Whether this text was seen; it is remembered otherwise."""
        plain = " ".join(words(text))
        if plain in self._exact:
            return True
        if self._near is not None:
            sketch = MinHash(num_perm=NUM_PERMUTATIONS)
            sketch.update_batch([" ".join(gram).encode() for gram in _ngrams(text, DUPLICATE_NGRAM)])
            if self._near.query(sketch):
                return True
            self._near.insert(plain, sketch, check_duplication=False)
        self._exact.add(plain)
        return False


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether the answer ends in one phrase over and over."""
    tail = list(token_ids[-LOOP_TOKENS:])
    if len(tail) < LOOP_TOKENS:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, MAX_PERIOD + 1))
