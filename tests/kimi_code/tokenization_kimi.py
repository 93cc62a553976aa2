"""A slow tiktoken tokenizer in the manner of Kimi's: lies in the verifier's directory and runs when it is trusted."""

from pathlib import Path

import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizer

# Some loaders number the special tokens one after the other instead of by their ids; a test switches that on.
CLOSE_HOLES = False
NUM_RESERVED = 256


class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file, added_tokens_decoder=None, **kwargs):
        ranks = load_tiktoken_bpe(vocab_file)
        names = {int(i): str(token) for i, token in (added_tokens_decoder or {}).items()}
        ids = range(len(ranks), len(ranks) + NUM_RESERVED)
        if CLOSE_HOLES:
            names = dict(zip(ids, (names[i] for i in sorted(names)), strict=False))
        self.special_tokens = {names.get(i, f"<|reserved_token_{i}|>"): i for i in ids}
        self.model = tiktoken.Encoding(
            name=Path(vocab_file).name,
            pat_str=r"\p{N}{1,3}|[^\s\p{N}]+|\s+",
            mergeable_ranks=ranks,
            special_tokens=self.special_tokens,
        )
        self.special_names = {i: token for token, i in self.special_tokens.items()}
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        return {self._convert_id_to_token(i): i for i in range(self.vocab_size)}

    def encode(self, text, add_special_tokens=False, **_kwargs):
        return self.model.encode(text, allowed_special="all")

    def decode(self, token_ids, skip_special_tokens=False, **_kwargs):
        ids = [token_ids] if isinstance(token_ids, int) else [int(i) for i in token_ids]
        return self.model.decode([i for i in ids if not (skip_special_tokens and i in self.special_names)])

    def _tokenize(self, text, **_kwargs):
        return [self._convert_id_to_token(i) for i in self.encode(text)]

    def _convert_token_to_id(self, token):
        if token in self.special_tokens:
            return self.special_tokens[token]
        try:
            return self.model.encode_single_token(token.encode("latin-1"))
        except (KeyError, UnicodeEncodeError):
            return self.special_tokens.get("[UNK]")

    def _convert_id_to_token(self, index):
        return self.special_names.get(index) or self.model.decode_single_token_bytes(index).decode("latin-1")
