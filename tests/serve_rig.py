"""A tiny Llama that vLLM serves, the answers it gives, its states while it gives them, and a draft trained on these.

Everything but the engine is done by transformers in float32, in seconds: what stages 1 and 2 would have written is
written here, and stages 3 and 4 run in this process.
"""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from common import hidden_states, samples
from common.config import VerifierSection
from common.verifier import open_verifier
from tests.train_rig import _write_manifest, write_tokenizer

VOCAB, HIDDEN, LAYERS, AUX = 320, 128, 8, (1, 4, 7)
PROMPT, ANSWER, END, CYCLE = 6, 40, 2, 97
WORDS = [3 + 3 * k for k in range(CYCLE)]  # spread out, so that the vocabulary map is no identity
DRAFT = {
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_theta": 50000.0,
    "max_position_embeddings": 512,
    "norm_before_fc": True,
    "norm_output": True,
}
TRAIN = {"lr": 3e-3, "num_epochs": 6, "max_tokens_per_batch": 512, "dtype": "float32", "loggers": []}
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


def write_verifier(path: Path) -> LlamaForCausalLM:
    """Random weights, but for a head that has each token followed by the next of a fixed cycle.

    Small layers leave the token's own embedding on top of the residual stream, so the answers are sure of themselves
    and a draft can learn them in a minute; the layers' noise keeps it from learning all of them.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.05,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=1,
        eos_token_id=END,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=6.0)  # far from 1, so that a norm left out is seen
        model.lm_head.weight.normal_(std=0.1)
        cycle = torch.tensor(WORDS)
        model.lm_head.weight[cycle[torch.arange(CYCLE) * 7 % CYCLE]] = model.model.embed_tokens.weight[cycle] / 6.0
    model.to(torch.bfloat16).save_pretrained(path)
    write_tokenizer(path)
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)


def answer(model: LlamaForCausalLM, prompt: list[int]) -> list[int]:
    """The greedy answer, at most ANSWER tokens."""
    ids = torch.tensor([prompt])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, do_sample=False, pad_token_id=0
    )
    return made[0, len(prompt) :].tolist()


def states_of(model: LlamaForCausalLM, ids: list[int]) -> list[torch.Tensor]:
    """States bf16 [T, D] after the aux layers and after the last one, before the final norm."""
    last: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_hook(lambda _m, inputs, _o: last.append(inputs[0][0]))
    with torch.no_grad():
        found = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    hook.remove()
    return [t.to(torch.bfloat16) for t in (*(found[i][0] for i in AUX), last[0])]


def make_served_run(root: Path, *, num_train: int = 40, num_val: int = 8, **export: Any) -> Path:
    """A run directory up to checkpoints/, and its YAML."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small are slower on more
    try:
        path = _write_inputs(root, num_train, num_val, export)
        for name in ("03_build_vocab_mapping", "04_train"):
            assert importlib.import_module(name).main(["--config", str(path)]) == 0
    finally:
        torch.set_num_threads(threads)
    return path


def _write_inputs(root: Path, num_train: int, num_val: int, export: dict[str, Any]) -> Path:
    """samples/ and hidden_states/ as stages 1 and 2 would leave them."""
    run_dir, verifier_dir = root / "run", root / "verifier"
    model = write_verifier(verifier_dir)
    rng = np.random.default_rng(0)
    prompts = [rng.choice(WORDS, PROMPT).tolist() for _ in range(num_train + num_val)]
    texts = [(prompt, answer(model, prompt)) for prompt in prompts]
    rows = [
        samples.Sample(
            np.array([*prompt, *given], np.int32),
            np.arange(len(prompt) + len(given)) >= len(prompt),
            f"c{i}",
            "train" if i < num_train else "val",
            "made",
        )
        for i, (prompt, given) in enumerate(texts)
    ]
    fingerprints = open_verifier(VerifierSection(path=str(verifier_dir))).fingerprints
    counts = samples.write_samples(run_dir / samples.DIR_NAME, rows)
    file = run_dir / samples.DIR_NAME / samples.FILE_NAME
    settings = {"generate.enabled": True, "generate.temperature": 0.0}
    parent = _write_manifest(
        file.parent, "01_prepare_data", [file], counts=counts, fingerprints=fingerprints, settings=settings
    )
    out_dir = run_dir / hidden_states.DIR_NAME
    out_dir.mkdir()
    for index, row in enumerate(rows):
        ids, mask = torch.from_numpy(row.input_ids).long(), torch.from_numpy(row.loss_mask)
        content = hidden_states.encode(ids, mask, states_of(model, ids.tolist()), "bfloat16")
        hidden_states.data_path(out_dir, index).write_bytes(content)
    _write_manifest(
        out_dir,
        "02_extract_hidden_states",
        [],
        inputs={"samples": parent.digest},
        settings={"extract.aux_layer_ids": list(AUX)},
        fingerprints=fingerprints | {"aux_layer_ids": ",".join(map(str, (*AUX, LAYERS)))},
        counts={"hidden_size": HIDDEN, "samples": len(rows)},
    )
    path = root / "run.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "run": {"dir": str(run_dir)},
                "verifier": {"path": str(verifier_dir)},
                "extract": {"aux_layer_ids": list(AUX)},
                "vocab": {"size": 128},
                "draft": DRAFT,
                "train": TRAIN,
                "export": {"max_tokens": ANSWER, "max_model_len": 256, "batch": 8, **export},
            }
        )
    )
    return path
