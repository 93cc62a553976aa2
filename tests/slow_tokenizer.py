"""A tokenizer without a fast implementation, as Kimi's is: bytes, plus special tokens at the top with holes."""

from transformers import PreTrainedTokenizer

SPECIAL = {"<|im_end|>": 300, "<|im_start|>": 303, "<think>": 306, "</think>": 307}


class ByteTokenizer(PreTrainedTokenizer):
    model_input_names = ["input_ids"]  # noqa: RUF012

    def __init__(self, **kwargs):
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return 256

    def get_vocab(self):
        return {self._convert_id_to_token(i): i for i in range(256)} | SPECIAL

    def _split(self, text):
        """Special tokens whole, the rest as bytes."""
        import re

        parts = re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text)
        return [p if p in SPECIAL else b for p in parts for b in ([p] if p in SPECIAL else p.encode())]

    def encode(self, text, add_special_tokens=False, **_kwargs):
        return [SPECIAL[p] if isinstance(p, str) else p for p in self._split(text)]

    def decode(self, ids, **_kwargs):
        back = {i: t.encode() for t, i in SPECIAL.items()}
        return b"".join(back.get(i) or bytes([i]) for i in ids).decode(errors="replace")

    def _convert_id_to_token(self, index):
        return next((t for t, i in SPECIAL.items() if i == index), f"<0x{index:02X}>")

    def _convert_token_to_id(self, token):
        return SPECIAL.get(token, 0)
