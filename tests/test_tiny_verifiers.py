"""Stages 2 to 5 on tiny random verifiers of other shapes, through real vLLM; the text is sampled from each of them.

A Llama with and without tied embeddings, and a Qwen3 (norms of queries and keys). All in float32, so that the states
may differ from those of transformers by no more than their storage in bfloat16.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from common import hidden_states as hs
from common import samples
from common.config import VerifierSection
from common.manifest import read_manifest
from common.verifier import open_verifier
from tests import train_rig

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
VOCAB, LAYERS, AUX, NUM_SAMPLES = train_rig.VOCAB, 6, [1, 3, 4], 12
SHAPE = {
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}
LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 32}
VERIFIERS = {
    "llama_tied": LlamaConfig(**SHAPE, **LLAMA, tie_word_embeddings=True),
    "llama_untied": LlamaConfig(**SHAPE, **LLAMA, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SHAPE, **LLAMA, tie_word_embeddings=False),
}


def write_verifier(path: Path, config) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(path)
    train_rig.write_tokenizer(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return model


def write_samples(run_dir: Path, verifier_path: Path, model) -> None:
    """Text that this verifier writes at temperature 1: answers of 5 to 38 tokens after prompts of 3."""
    rows = []
    for i in range(NUM_SAMPLES):
        torch.manual_seed(i)
        prompt = torch.randint(3, 300, (1, 3))
        ids = model.generate(prompt, do_sample=True, top_k=0, min_new_tokens=5, max_new_tokens=5 + 3 * i)[0]
        mask = torch.arange(len(ids)) >= 3
        split = "val" if i % 4 == 3 else "train"
        rows.append(samples.Sample(ids.int().numpy(), mask.numpy(), f"c{i}", split, "made"))
    out_dir = run_dir / samples.DIR_NAME
    counts = samples.write_samples(out_dir, rows)
    verifier = open_verifier(VerifierSection(path=str(verifier_path)))
    settings = {"generate.enabled": True, "generate.temperature": 1.0}
    files = [out_dir / samples.FILE_NAME]
    train_rig._write_manifest(
        out_dir, "01_prepare_data", files, counts=counts, fingerprints=verifier.fingerprints, settings=settings
    )


@pytest.fixture(scope="module", params=VERIFIERS)
def finished(request, tmp_path_factory):
    """The verifier as transformers has it, and the run directory after stages 2 to 5."""
    root = tmp_path_factory.mktemp(request.param)
    config, run_dir, verifier_path = VERIFIERS[request.param], root / "run", root / "verifier"
    model = write_verifier(verifier_path, config)
    write_samples(run_dir, verifier_path, model)
    settings = {
        "run": {"dir": str(run_dir)},
        "verifier": {"path": str(verifier_path), "dtype": "float32"},
        "extract": {"aux_layer_ids": AUX, "min_free_bytes": 0},
        "vocab": {"size": 128},
        "draft": train_rig.DRAFT | {"hidden_size": config.hidden_size},
        "train": train_rig.TRAIN,
        "export": {"serve_check": False},
    }
    path = root / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    for name in ("02_extract_hidden_states", "03_build_vocab_mapping", "04_train", "05_convert_checkpoint"):
        command = [sys.executable, f"{name}.py", "--config", str(path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{name}: {done.stderr[-3000:]}"
    return model, run_dir


def errors(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Relative error of each token, [T]."""
    return (mine.float() - theirs).norm(dim=-1) / theirs.norm(dim=-1)


def test_every_state_is_that_of_transformers_and_of_no_other_layer(finished):
    model, run_dir = finished
    last = []
    hook = model.model.norm.register_forward_hook(lambda _m, inputs, _o: last.append(inputs[0][0]))
    for index in range(NUM_SAMPLES):
        found = hs.load_hidden_states(hs.data_path(run_dir / "hidden_states", index))
        with torch.no_grad():
            states = [s[0] for s in model(found.input_ids[None], output_hidden_states=True).hidden_states[:-1]]
        states.append(last.pop())
        for mine, layer in zip([*found.aux, found.last], [*AUX, LAYERS], strict=True):
            assert errors(mine, states[layer]).max() < 0.01, f"sample {index}, layer {layer}"
            others = [errors(mine, state).median() for i, state in enumerate(states) if i != layer]
            assert min(others) > 0.1, f"sample {index}, layer {layer}"
    hook.remove()


def test_the_canary_agreed_for_every_sample_that_it_tried(finished):
    counts = read_manifest(finished[1] / "hidden_states", "02_extract_hidden_states").counts
    assert counts["canaries"] > 0 and counts["canary_agreement"] == 1


def test_the_draft_has_the_verifiers_embeddings_and_its_heads_rows(finished):
    model, run_dir = finished
    draft = load_file(run_dir / "draft" / "model.safetensors")
    t2d = torch.load(run_dir / "vocab_mapping" / "t2d.pt")
    assert torch.equal(draft["embed_tokens.weight"].float(), model.get_input_embeddings().weight.bfloat16().float())
    assert torch.equal(draft["lm_head.weight"].float(), model.lm_head.weight[t2d].bfloat16().float())
