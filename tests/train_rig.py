"""A tiny verifier, text that it might have written, and states that predict this text: a run directory for stages 3 and 4.

The states are made, not computed: the last hidden state at t points at the head's row of token t + 1, so the target
check holds, and the aux states are noisy copies of it, so a draft has something to learn.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from common import hidden_states, manifest, samples
from common.config import Config, VerifierSection, load_config
from common.hidden_states import HiddenStates
from common.verifier import open_verifier

# Two threads on tensors this small only wait for each other: a run of 18 steps takes 0.4 s with one, seconds with two.
torch.set_num_threads(1)

VOCAB, HIDDEN, AUX = 320, 32, (1, 2, 3)
PROMPT = 5
VERIFIER = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
DRAFT = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "norm_before_residual": True,
}
TRAIN = {"lr": 3e-3, "num_epochs": 2, "max_tokens_per_batch": 96, "dtype": "float32", "loggers": []}


@dataclass(frozen=True)
class Text:
    """Some samples' ids and masks, and the verifier weights that explain them."""

    ids: list[np.ndarray]
    masks: list[np.ndarray]
    embed: torch.Tensor
    head: torch.Tensor
    norm: torch.Tensor

    def states(self, index: int) -> HiddenStates:
        """The made-up states of one sample, in bf16."""
        ids = torch.from_numpy(self.ids[index]).long()
        generator = torch.Generator().manual_seed(index)
        following = torch.cat([ids[1:], ids[:1]])
        last = 3 * self.head[following].float() + 0.1 * torch.randn(len(ids), HIDDEN, generator=generator)
        aux = [last + 0.5 * torch.randn(len(ids), HIDDEN, generator=generator) for _ in AUX]
        mask = torch.from_numpy(self.masks[index])
        return HiddenStates(ids, mask, [a.bfloat16() for a in aux], last.bfloat16())


def make_text(num_samples: int, seed: int = 0) -> Text:
    """Answers of 8 to 40 tokens that follow a fixed successor table nine times in ten, after a prompt of 5."""
    rng = np.random.default_rng(seed)
    successor = rng.permutation(np.arange(3, 100))
    ids, masks = [], []
    for _ in range(num_samples):
        length = int(rng.integers(8, 40))
        tokens = [int(rng.integers(3, 100))]
        while len(tokens) < PROMPT + length:
            usual = int(successor[(tokens[-1] - 3) % len(successor)])
            tokens.append(usual if rng.random() < 0.9 else int(rng.integers(3, 100)))
        ids.append(np.array(tokens, np.int32))
        masks.append(np.arange(len(tokens)) >= PROMPT)
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16()
    embed = torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16()
    return Text(ids, masks, embed, head, (1 + 0.1 * torch.randn(HIDDEN, generator=generator)).bfloat16())


def write_verifier(path: Path, text: Text, **changes: Any) -> Path:
    """A verifier directory with what stages 3 and 4 read: configuration, embeddings, head and final norm."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(VERIFIER | changes))
    weights = {"model.embed_tokens.weight": text.embed, "lm_head.weight": text.head, "model.norm.weight": text.norm}
    save_file(weights, path / "model.safetensors")
    write_tokenizer(path)
    return path


def write_tokenizer(path: Path) -> None:
    """A word-level tokenizer of fewer tokens than the verifier's vocabulary, with an end of turn and think tags."""
    words = {"<unk>": 0, "<s>": 1, "<|im_end|>": 2} | {f"w{i}": i for i in range(3, 300)}
    special = {"<think>": 300, "</think>": 301, "<|rarely|>": 302}
    tokenizer = Tokenizer(WordLevel(words | special, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "<s>", "<|im_end|>", *special])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="<|im_end|>"
    )
    made.save_pretrained(path)


def _write_manifest(out_dir: Path, stage: str, files: list[Path], **fields: Any) -> manifest.Manifest:
    empty: dict[str, Any] = {"settings": {}, "inputs": {}, "fingerprints": {}, "counts": {}}
    made = manifest.Manifest(
        stage=stage,
        schema_version=manifest.SCHEMA_VERSION,
        outputs=manifest.describe_outputs(out_dir, files),
        config={},
        command="",
        commit="",
        packages={},
        seconds=0.0,
        created="",
        **(empty | fields),
    )
    manifest.write_manifest(out_dir, made)
    return made


def make_run(
    root: Path,
    *,
    num_train: int = 24,
    num_val: int = 6,
    draft: dict[str, Any] | None = None,
    seed: int = 0,
    vocab_size: int = 128,
    generated: bool = True,
    **train: Any,
) -> Path:
    """samples/ and hidden_states/ of a run, its verifier and its YAML. Returns the YAML."""
    text = make_text(num_train + num_val, seed)
    run_dir, verifier_dir = root / "run", write_verifier(root / "verifier", text)
    verifier = open_verifier(VerifierSection(path=str(verifier_dir)))
    rows = (
        samples.Sample(ids, mask, f"c{i}", "train" if i < num_train else "val", "made" if i % 2 else "up")
        for i, (ids, mask) in enumerate(zip(text.ids, text.masks, strict=True))
    )
    counts = samples.write_samples(run_dir / samples.DIR_NAME, rows)
    parent = _write_manifest(
        run_dir / samples.DIR_NAME,
        "01_prepare_data",
        [run_dir / samples.DIR_NAME / samples.FILE_NAME],
        counts=counts,
        fingerprints=verifier.fingerprints,
        settings={"generate.enabled": generated, "generate.temperature": 0.0},
    )
    write_states(run_dir, text, parent, verifier.fingerprints)
    config = {
        "run": {"dir": str(run_dir), "seed": seed},
        "verifier": {"path": str(verifier_dir)},
        "extract": {"aux_layer_ids": list(AUX)},
        "vocab": {"size": vocab_size},
        "draft": DRAFT | (draft or {}),
        "train": TRAIN | train,
    }
    path = root / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def write_states(run_dir: Path, text: Text, parent: manifest.Manifest, fingerprints: dict[str, str]) -> None:
    out_dir = run_dir / hidden_states.DIR_NAME
    out_dir.mkdir(exist_ok=True)
    for index in range(len(text.ids)):
        states = text.states(index)
        slots = [*states.aux, states.last]
        content = hidden_states.encode(states.input_ids, states.loss_mask, slots, "bfloat16")
        hidden_states.data_path(out_dir, index).write_bytes(content)
    _write_manifest(
        out_dir,
        "02_extract_hidden_states",
        [],
        inputs={"samples": parent.digest},
        settings={"extract.aux_layer_ids": list(AUX)},
        fingerprints=fingerprints | {"aux_layer_ids": "1,2,3,4"},
        counts={"hidden_size": HIDDEN, "samples": len(text.ids)},
    )


def config_of(path: Path) -> Config:
    return load_config(path)
