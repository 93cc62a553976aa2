"""A verifier directory whose tokenizer and template behave as Kimi-K2.5's do, made here: nothing of Kimi's is in it.

Slow, tiktoken, code beside the weights, special tokens at the top with holes between them; a template that opens a
think tag for the verifier and blanks the reasoning of every turn up to the last plain answer.
"""

import base64
import json
from pathlib import Path

from transformers.convert_slow_tokenizer import bytes_to_unicode

NUM_BASE, VOCAB = 163584, 163840
SPECIAL = {
    "[BOS]": 163584,
    "[EOS]": 163585,
    "<|im_end|>": 163586,
    "<|im_user|>": 163587,
    "<|im_assistant|>": 163588,
    "<|im_system|>": 163594,
    "<|tool_calls_section_begin|>": 163595,
    "<|tool_calls_section_end|>": 163596,
    "<|tool_call_begin|>": 163597,
    "<|tool_call_argument_begin|>": 163598,
    "<|tool_call_end|>": 163599,
    "<|im_middle|>": 163601,
    "<think>": 163606,
    "</think>": 163607,
    "[UNK]": 163838,
    "[PAD]": 163839,
}
TEMPLATE = """\
{%- macro turn(m) -%}
  {%- if m.role == 'tool' -%}<|im_system|>tool<|im_middle|>
  {%- else -%}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{%- endif -%}
{%- endmacro -%}
{%- macro calls(m) -%}
  {%- if m.tool_calls -%}<|tool_calls_section_begin|>
  {%- for call in m.tool_calls -%}
    <|tool_call_begin|>functions.{{ call.function.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>
    {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
    <|tool_call_end|>
  {%- endfor -%}<|tool_calls_section_end|>{%- endif -%}
{%- endmacro -%}
{%- set last = namespace(plain=-1) -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' and not m.tool_calls -%}{%- set last.plain = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for m in messages -%}
  {{- turn(m) -}}
  {%- if m.role == 'assistant' -%}
    <think>{{ m.reasoning_content if loop.index0 > last.plain and m.reasoning_content }}</think>
  {%- endif -%}
  {{- m.content or '' -}}{{- calls(m) -}}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
  <|im_assistant|>assistant<|im_middle|><think>{%- if thinking is defined and not thinking -%}</think>{%- endif -%}
{%- endif -%}
"""
CODE = """\
import base64, json, os, re
import tiktoken
from transformers import PreTrainedTokenizer


class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, added_tokens_decoder=None, **kwargs):
        with open(vocab_file, "rb") as file:
            pairs = (line.split() for line in file)
            ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
        with open(os.path.join(os.path.dirname(vocab_file), "tokenizer_config.json")) as file:
            named = {int(i): t["content"] for i, t in json.load(file)["added_tokens_decoder"].items()}
        # Ids between the named ones are reserved, not closed up.
        special = {named.get(i, f"<|reserved_token_{i}|>"): i for i in range(163584, 163840)}
        self.special = special
        pattern = r" ?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+|\\s+"
        self.model = tiktoken.Encoding("made", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        self.by_id = {i: t for t, i in special.items()}
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        return dict(self.special)

    def encode(self, text, add_special_tokens=False, **kwargs):
        return self.model.encode(text, allowed_special="all")

    def decode(self, token_ids, **kwargs):
        return self.model.decode(token_ids if isinstance(token_ids, list) else [token_ids])

    def _convert_token_to_id(self, token):
        return self.special.get(token, 163838)

    def _convert_id_to_token(self, index):
        return self.by_id.get(index) or self.model.decode_single_token_bytes(index).decode("latin-1")
"""


def write_kimi_like(path: Path, smollm2: Path) -> Path:
    """The directory, without weights. The ranks of the ordinary tokens are SmolLM2's merges."""
    path.mkdir(parents=True, exist_ok=True)
    to_byte = {character: byte for byte, character in bytes_to_unicode().items()}
    vocab = json.loads((smollm2 / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = [bytes(to_byte[c] for c in t) for t in vocab if not t.startswith("<") and all(c in to_byte for c in t)]
    ranked = list(dict.fromkeys([bytes([b]) for b in range(256)] + tokens))
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranked))
    (path / "tiktoken.model").write_text("".join(lines))
    (path / "tokenization_made.py").write_text(CODE)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    listed = {str(i): {"content": token, "special": True} for token, i in SPECIAL.items()}
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "added_tokens_decoder": listed,
                "auto_map": {"AutoTokenizer": ["tokenization_made.TikTokenTokenizer", None]},
                "tokenizer_class": "TikTokenTokenizer",
            }
        )
    )
    text = {
        "model_type": "deepseek_v3",
        "vocab_size": VOCAB,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "eos_token_id": SPECIAL["<|im_end|>"],
    }
    config = {"model_type": "kimi_k25", "vision_config": {"vocab_size": 7}, "text_config": text}
    (path / "config.json").write_text(json.dumps(config))
    return path
