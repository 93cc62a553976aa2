"""The verifier's directory: its configuration, its tokenizer, and the few tensors that a draft needs.

Opening a verifier loads no weights. `load_head` reads embeddings, output head and final norm, and opens nothing but
the shards that hold them: of Kimi-K2.5's 595 GB, one file. `load_layer` reads one decoder layer of a Llama. Knows nothing of vLLM or of samples.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from common.config import VerifierSection
from common.embedded import embedded_verifier, is_embedded
from common.errors import PipelineError, Problem, Problems, some
from common.files import format_bytes, read_json, sha256_file, sha256_json

CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE = "config.json", "model.safetensors.index.json", "model.safetensors"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
# Besides these, every .py file counts as part of a tokenizer that brings its own code.
TOKENIZER_FILES = ("tokenizer.json", "tiktoken.model", "tokenizer.model", "vocab.json", "merges.txt")
TEXT_CONFIG_KEYS = ("text_config", "language_config", "llm_config")
NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
EMBED_SUFFIX, HEAD_SUFFIX, NORM_SUFFIX = "embed_tokens.weight", "lm_head.weight", "model.norm.weight"
# One decoder layer in Llama's layout, by the names that the draft's own layer has too.
LAYER_TENSORS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
)
# Of the vision part of a multimodal verifier: these names end alike and mean something else.
VISION_PREFIXES = ("vision", "visual", "mm_", "model.vision", "model.visual")


@dataclass(frozen=True)
class Verifier:
    """An opened verifier directory. `text_config` is the language model's part of config.json, as a dict."""

    path: Path
    trust_remote_code: bool
    config: dict[str, Any]
    text_config: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        """V of the language model, never the tokenizer's length (field fault B4)."""
        return self.text_config["vocab_size"]

    @property
    def hidden_size(self) -> int:
        return self.text_config["hidden_size"]

    @property
    def num_layers(self) -> int:
        return self.text_config["num_hidden_layers"]

    @property
    def rms_norm_eps(self) -> float:
        return self.text_config.get("rms_norm_eps", 1e-6)

    @property
    def rope_theta(self) -> float | None:
        """Where transformers 5 writes it, or where everyone wrote it before."""
        nested = self.text_config.get("rope_parameters") or {}
        return nested.get("rope_theta", self.text_config.get("rope_theta"))

    @property
    def tie_word_embeddings(self) -> bool:
        """Of the language model; where that part is nested, a flag above it is a decoy."""
        return bool(self.text_config.get("tie_word_embeddings", False))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the language model's configuration and of the index of its weights, without reading them."""
        return sha256_json([self.text_config, _weights_listing(self.path)])

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        names = [*TOKENIZER_FILES, *(p.name for p in sorted(self.path.glob("*.py")))]
        hashes = {name: sha256_file(self.path / name) for name in names if (self.path / name).is_file()}
        settings = {key: v for key, v in self.tokenizer_config.items() if key != "chat_template"}
        return sha256_json([hashes, settings])

    @cached_property
    def chat_template_fingerprint(self) -> str:
        """One edited character of the template is another template (field fault H6)."""
        return hashlib.sha256(json.dumps(self.chat_template).encode()).hexdigest()

    @property
    def fingerprints(self) -> dict[str, str]:
        """The three that every stage's manifest carries."""
        return {
            "verifier": self.fingerprint,
            "tokenizer": self.tokenizer_fingerprint,
            "chat_template": self.chat_template_fingerprint,
        }

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        path = self.path / TOKENIZER_CONFIG_FILE
        return read_json(path) if path.is_file() else {}

    @property
    def chat_template(self) -> Any:
        """The template's text (or the list of named ones), from its own file or from tokenizer_config.json."""
        path = self.path / CHAT_TEMPLATE_FILE
        return path.read_text(encoding="utf-8") if path.is_file() else self.tokenizer_config.get("chat_template")

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids at which this verifier ends an answer: those of generation_config.json, else of config.json."""
        path = self.path / GENERATION_CONFIG_FILE
        generation = read_json(path) if path.is_file() else {}
        found = generation.get("eos_token_id", self.text_config.get("eos_token_id", self.config.get("eos_token_id")))
        if found is None:
            return ()
        return tuple(found) if isinstance(found, list) else (found,)


def _weights_listing(path: Path) -> Any:
    """What the weights are, as far as that can be told without reading them: index and sizes."""
    index = path / INDEX_FILE
    if index.is_file():
        return read_json(index)
    return {p.name: p.stat().st_size for p in sorted(path.glob("*.safetensors"))}


def open_verifier(section: VerifierSection) -> Verifier:
    """Opens a local Hugging Face directory, or the embedded verifier, which is converted on first use.

    Raises: PipelineError when the directory, its config.json or a size in it is absent.
    """
    path = embedded_verifier(section.path) if is_embedded(section.path) else Path(section.path).expanduser()
    if not path.is_dir():
        what = f"{path} is not a directory"
        raise PipelineError(Problem("verifier.path", what, "name a local directory; nothing is downloaded"))
    config = read_json(path / CONFIG_FILE)
    text_config = next((config[key] for key in TEXT_CONFIG_KEYS if isinstance(config.get(key), dict)), config)
    missing = [key for key in ("vocab_size", "hidden_size", "num_hidden_layers") if key not in text_config]
    if missing:
        what = f"the language model's part has no {', '.join(missing)}"
        raise PipelineError(Problem(str(path / CONFIG_FILE), what, "use the directory as it was published"))
    return Verifier(path.resolve(), section.trust_remote_code, config, text_config)


# ---- tokenizer -------------------------------------------------------------------------------------------------------


def load_tokenizer(verifier: Verifier) -> Any:
    """The verifier's own tokenizer, fast or slow; code in its directory runs only when it is trusted.

    Raises: PipelineError when it needs code that is not trusted, or can't be loaded.
    """
    from transformers import AutoTokenizer

    if "AutoTokenizer" in verifier.tokenizer_config.get("auto_map", {}) and not verifier.trust_remote_code:
        what = f"the tokenizer in {verifier.path} is Python code that lies beside it"
        fix = "read that code, then set verifier.trust_remote_code: true"
        raise PipelineError(Problem("verifier.trust_remote_code", what, fix))
    try:
        return AutoTokenizer.from_pretrained(
            verifier.path, trust_remote_code=verifier.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, ImportError) as error:
        what = f"can't be loaded: {error}"
        raise PipelineError(Problem(f"tokenizer of {verifier.path}", what, "check the directory's files")) from None


def declared_special_tokens(verifier: Verifier) -> dict[str, int]:
    """Special tokens and their ids as tokenizer_config.json states them, ascending by id."""
    listed = verifier.tokenizer_config.get("added_tokens_decoder", {})
    found = {entry["content"]: int(token_id) for token_id, entry in listed.items()}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def check_special_tokens(verifier: Verifier, tokenizer: Any, expected: Mapping[str, int]) -> None:
    """Compares the loaded tokenizer with what is declared and with `verifier.expected_token_ids`.

    Some loaders close the holes between special ids: every later one moves by 1 to 3, the text still looks nearly
    right, and training learns the wrong tokens.

    Raises: PipelineError naming the first token that differs, from each of the two sources.
    """
    problems = Problems()
    sources = ((TOKENIZER_CONFIG_FILE, declared_special_tokens(verifier)), ("verifier.expected_token_ids", expected))
    for where, tokens in sources:
        for token, token_id in sorted(tokens.items(), key=lambda item: item[1]):
            given = tokenizer.convert_tokens_to_ids(token)
            if given != token_id or tokenizer.convert_ids_to_tokens(token_id) != token:
                back = tokenizer.convert_ids_to_tokens(token_id) if given == token_id else None
                what = f"{token} should be {token_id}, the loaded tokenizer gives {given}"
                what += f" and turns {token_id} back into {back!r}" if back is not None else ""
                problems.add(where, what, "load the tokenizer that this verifier was published with")
                break
    for token_id in control_token_ids(verifier, tokenizer).values():
        if token_id >= verifier.vocab_size:
            what = f"special id {token_id} lies outside the vocabulary of {verifier.vocab_size}"
            problems.add("tokenizer", what, "the tokenizer is not this verifier's")
            break
    problems.raise_if_any()


def control_token_ids(verifier: Verifier, tokenizer: Any) -> dict[str, int]:
    """Every special token by name: the declared ones, those the tokenizer knows as special, and the stop ids."""
    found = dict(declared_special_tokens(verifier))
    for token_id in getattr(tokenizer, "all_special_ids", []):
        found.setdefault(str(tokenizer.convert_ids_to_tokens(token_id)), token_id)
    for token, token_id in (getattr(tokenizer, "get_added_vocab", dict)() or {}).items():
        found.setdefault(str(token), token_id)
    known = set(found.values())
    found.update({f"stop id {token_id}": token_id for token_id in verifier.stop_token_ids if token_id not in known})
    return dict(sorted(found.items(), key=lambda item: item[1]))


# ---- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VerifierHead:
    """embed [V, D], head [V, D] and norm [D] in the dtype on disk; the same tensor twice where they are tied."""

    embed: Tensor
    head: Tensor
    norm: Tensor
    eps: float

    def normed(self, last_hidden: Tensor) -> Tensor:
        """RMSNorm (Zhang & Sennrich 2019, eq. 4) in float32. last_hidden: [T, D]. Returns float32 [T, D]."""
        states = last_hidden.float()
        scale = torch.rsqrt(states.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return states * scale * self.norm.float()

    def logits(self, last_hidden: Tensor) -> Tensor:
        """What the verifier itself would say. last_hidden: [T, D], before the final norm. Returns [T, V]."""
        return self.normed(last_hidden).to(self.head.dtype) @ self.head.T


def load_head(verifier: Verifier) -> VerifierHead:
    """Reads embeddings, head and final norm from the shards that hold them.

    Raises: PipelineError when one is absent or ambiguous, has another shape than config.json says, or is not finite.
    """
    files = _tensor_files(verifier.path)
    problems = Problems()
    suffixes = [EMBED_SUFFIX, NORM_SUFFIX] + ([] if verifier.tie_word_embeddings else [HEAD_SUFFIX])
    names: dict[str, str] = {}
    for suffix in suffixes:
        with problems.collect():
            names[suffix] = _find_by_suffix(files, suffix, verifier.path)
    problems.raise_if_any()
    tensors = {suffix: _read_tensor(verifier.path / files[name], name) for suffix, name in names.items()}
    vocab, hidden = verifier.vocab_size, verifier.hidden_size
    shapes = {EMBED_SUFFIX: [vocab, hidden], HEAD_SUFFIX: [vocab, hidden], NORM_SUFFIX: [hidden]}
    for suffix, tensor in tensors.items():
        if list(tensor.shape) != shapes[suffix]:
            what = f"is {list(tensor.shape)}, config.json says {shapes[suffix]}"
            problems.add(names[suffix], what, "config and weights are not of the same verifier")
        elif not torch.isfinite(tensor).all():
            problems.add(names[suffix], "holds values that are not finite", f"fetch {files[names[suffix]]} again")
    problems.raise_if_any()
    embed = tensors[EMBED_SUFFIX]
    return VerifierHead(embed, tensors.get(HEAD_SUFFIX, embed), tensors[NORM_SUFFIX], verifier.rms_norm_eps)


def load_layer(verifier: Verifier, layer: int) -> dict[str, Tensor]:
    """One decoder layer's tensors, named as in LAYER_TENSORS, in the dtype on disk.

    Raises: PipelineError when the verifier has no such layer, or one that is not Llama's: a tensor is absent, or there
    are more (biases, norms of queries and keys, experts), which a Llama draft could not hold.
    """
    where, fix = "train.init_verifier_layer", "unset it; the draft then starts from random weights"
    if layer >= verifier.num_layers:
        what = f"{layer}; the verifier has layers 0 to {verifier.num_layers - 1}"
        raise PipelineError(Problem(where, what, fix))
    files = _tensor_files(verifier.path)
    marker = f"layers.{layer}."
    of_layer = {
        name.rpartition(marker)[2]: name
        for name in files
        if (name.startswith(marker) or f".{marker}" in name) and not name.startswith(VISION_PREFIXES)
    }
    of_layer.pop("self_attn.rotary_emb.inv_freq", None)  # a buffer that early exports carry
    if different := sorted(of_layer.keys() ^ set(LAYER_TENSORS)):
        what = f"layer {layer} of {verifier.path} is not Llama's: {some(different)}"
        raise PipelineError(Problem(where, what, fix))
    return {name: _read_tensor(verifier.path / files[full], full) for name, full in of_layer.items()}


def check_weight_files(verifier: Verifier, *, whole: bool) -> None:
    """Looks whether the weight files are there and as long as their headers say; reads nothing but headers.

    whole: every shard, which an engine will load; else those of embeddings, head and norm alone.

    Raises: PipelineError naming the files that are absent, cut short or no safetensors.
    """
    files = _tensor_files(verifier.path)
    suffixes = (EMBED_SUFFIX, HEAD_SUFFIX, NORM_SUFFIX)
    needed = {name for name in files if name.endswith(suffixes) and not name.startswith(VISION_PREFIXES)}
    names = {file for name, file in files.items() if whole or name in needed}
    problems = Problems()
    for name in sorted(names):
        if fault := _file_fault(verifier.path / name):
            problems.add(str(verifier.path / name), fault, "fetch that file again")
    problems.raise_if_any()


def weight_bytes(verifier: Verifier) -> int:
    """Bytes of all weight files, as they lie on the disk."""
    names = set(_tensor_files(verifier.path).values())
    return sum((verifier.path / name).stat().st_size for name in names)


def _file_fault(path: Path) -> str | None:
    """A safetensors file is 8 bytes of header length, the header, and tensors up to the largest offset in it."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length < size else None
    except OSError as error:
        return f"can't be read: {error.strerror}"
    except ValueError:
        header = None
    if not isinstance(header, dict):
        return f"is not a safetensors file ({format_bytes(size)})"
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    expected = 8 + length + max(ends, default=0)
    return None if size == expected else f"has {size:,} bytes, its header says {expected:,}"


def _tensor_files(path: Path) -> dict[str, str]:
    """Tensor name to file name, by the index or by the header of the only file."""
    index = path / INDEX_FILE
    if index.is_file():
        return read_json(index)["weight_map"]
    single = path / WEIGHTS_FILE
    if not single.is_file():
        what = f"has neither {INDEX_FILE} nor {WEIGHTS_FILE}"
        raise PipelineError(Problem(str(path), what, "fetch the verifier's weights in safetensors form"))
    if fault := _file_fault(single):
        raise PipelineError(Problem(str(single), fault, "fetch that file again"))
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), WEIGHTS_FILE)


def _find_by_suffix(files: Iterable[str], suffix: str, path: Path) -> str:
    """`language_model.model.norm.weight` for `model.norm.weight`; the vision part's namesakes don't count."""
    matching = [n for n in files if (n == suffix or n.endswith("." + suffix)) and not n.startswith(VISION_PREFIXES)]
    if not matching and suffix == NORM_SUFFIX:  # a bare decoder, saved without its head: `norm.weight`
        matching = [name for name in files if name == "norm.weight"]
    if len(matching) != 1:
        found = f"{len(matching)} tensors named ...{suffix}"
        what = f"has {found}: {', '.join(sorted(matching))}" if matching else f"has no tensor named ...{suffix}"
        raise PipelineError(Problem(str(path), what, "its final norm, embeddings and head must be told apart by name"))
    return matching[0]


def _read_tensor(path: Path, name: str) -> Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)
    except (OSError, RuntimeError, ValueError) as error:
        what = f"{name} can't be read: {error}"
        raise PipelineError(Problem(str(path), what, "fetch that file again")) from None
