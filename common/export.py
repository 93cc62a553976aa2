"""The `draft/` artifact: a draft that a server loads, proven against the checkpoint it came from.

    draft/
        config.json             every flag written out, aux layer ids at the top level
        model.safetensors       bf16, with t2d (bool) and d2t (int64 offsets)
        README.md               the model card
        serving_report.json     what vLLM measured; only with export.serve_check
        manifest.json           written last

Two formats. `speculators` is what the library writes and vLLM reads. `llama_eagle3` is the original EAGLE-3 layout
(`LlamaForCausalLMEagle3`, first layer called `midlayer`) that SGLang reads, and vLLM too. Knows nothing of serving.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from safetensors import safe_open
from safetensors.torch import save_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from torch import Tensor

from common.checkpoints import CONFIG_FILE, WEIGHTS_FILE
from common.errors import PipelineError, Problem, Problems, some
from common.files import read_json, replacing, write_json
from common.vocab_mapping import VocabMapping, check_vocab_mapping

DIR_NAME = "draft"
CARD_NAME = "README.md"
REPORT_NAME = "serving_report.json"
OWNED = (CONFIG_FILE, WEIGHTS_FILE, CARD_NAME, REPORT_NAME)
# What DDP, torch.compile, FSDP and activation checkpointing put into a parameter's name, in whatever order.
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
LLAMA_EAGLE3 = "LlamaForCausalLMEagle3"
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# vLLM 0.32 builds the fc layer for so many aux layers unless `num_aux_hidden_states` says otherwise.
VLLM_DEFAULT_AUX_LAYERS = 3
MIDLAYER, FIRST_LAYER = "midlayer.", "layers.0."


@dataclass(frozen=True)
class Draft:
    """A draft as it lies on disk in the `speculators` format: config.json as a dict, and its tensors by name."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def aux_layer_ids(self) -> list[int]:
        return self.config["eagle_aux_hidden_state_layer_ids"]


def read_draft(directory: Path) -> Draft:
    """Reads a checkpoint or an exported draft, wrapper prefixes stripped, the format told by its architecture.

    Raises: PipelineError when a file is absent or unreadable.
    """
    config = read_json(directory / CONFIG_FILE)
    path = directory / WEIGHTS_FILE
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {bare_name(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, RuntimeError, ValueError) as error:
        raise PipelineError(Problem(str(path), f"can't be read: {error}", "use another checkpoint")) from None
    if LLAMA_EAGLE3 in (config.get("architectures") or []):
        return from_llama_eagle3(config, tensors)
    return Draft(config, tensors)


def bare_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def library_config(draft: Draft) -> Eagle3SpeculatorConfig:
    """The draft's configuration as the library's class; a copy, since the library changes what it is given."""
    config = Eagle3SpeculatorConfig.from_dict(json.loads(json.dumps(draft.config)))
    assert isinstance(config, Eagle3SpeculatorConfig)
    return config


def expected_shapes(config: Eagle3SpeculatorConfig) -> dict[str, list[int]]:
    """Name and shape of every tensor that a draft of this configuration holds, from the library's own class."""
    with torch.device("meta"):
        model = Eagle3DraftModel(config=config)
    ignored = set(Eagle3DraftModel._keys_to_ignore_on_save)
    return {name: list(t.shape) for name, t in model.state_dict().items() if name not in ignored}


def check_draft(
    draft: Draft, mapping: VocabMapping, *, aux_layer_ids: list[int], where: str, shares_embeddings: bool = False
) -> None:
    """Refuses a draft that a server would load and then silently accept nothing of.

    Raises: PipelineError with every fault: tensors missing, unexpected, of another shape or not finite; a map that is
        not the one of vocab_mapping/; aux layer ids absent or not those of the hidden states; a norm flag absent.
    """
    problems = Problems()
    _check_config(problems, draft.config, aux_layer_ids, where)
    problems.raise_if_any()
    _check_tensors(problems, draft, where, absent={EMBED} if shares_embeddings else set())
    _check_map(problems, draft, mapping, where)
    problems.raise_if_any()


def _check_config(problems: Problems, config: dict[str, Any], aux_layer_ids: list[int], where: str) -> None:
    fix = "train again, or export a checkpoint of this run"
    found = config.get("eagle_aux_hidden_state_layer_ids")
    if found is None:
        problems.add(where, "config.json has no eagle_aux_hidden_state_layer_ids; servers would guess them", fix)
    elif found != aux_layer_ids:
        problems.add(where, f"reads aux layers {found}, the hidden states were extracted at {aux_layer_ids}", fix)
    for flag in NORM_FLAGS:
        if not isinstance(config.get(flag), bool):
            problems.add(where, f"config.json has no {flag}; vLLM and the format disagree on what that means", fix)
    shape = config.get("transformer_layer_config")
    if not isinstance(shape, dict):
        problems.add(where, "config.json has no transformer_layer_config", fix)
    elif not _rope_theta(shape):
        problems.add(where, "transformer_layer_config has no rope_theta; servers would take 10000", fix)


def _rope_theta(shape: dict[str, Any]) -> float | None:
    return (shape.get("rope_parameters") or {}).get("rope_theta") or shape.get("rope_theta")


def _check_tensors(problems: Problems, draft: Draft, where: str, absent: set[str]) -> None:
    shapes = expected_shapes(library_config(draft))
    expected = {name: shape for name, shape in shapes.items() if name not in absent}
    fix = "export another checkpoint, or train again"
    missing, unexpected = sorted(expected.keys() - draft.tensors), sorted(draft.tensors.keys() - expected)
    if missing:
        problems.add(where, f"lacks tensors that its config asks for: {some(missing)}", fix)
    if unexpected:
        problems.add(where, f"holds tensors that its config has no place for: {some(unexpected)}", fix)
    for name in sorted(expected.keys() & draft.tensors):
        tensor = draft.tensors[name]
        if list(tensor.shape) != expected[name]:
            problems.add(where, f"{name} is {list(tensor.shape)}, its config says {expected[name]}", fix)
        elif tensor.is_floating_point() and not torch.isfinite(tensor).all():
            problems.add(where, f"{name} holds values that are not finite", fix)


def _check_map(problems: Problems, draft: Draft, mapping: VocabMapping, where: str) -> None:
    fix = "build the vocabulary map and train from the same run"
    t2d, d2t = draft.tensors.get("t2d"), draft.tensors.get("d2t")
    if t2d is None or d2t is None:
        if mapping.size != mapping.vocab_size:
            problems.add(where, "has no t2d or d2t although its vocabulary is reduced", fix)
        return
    faults = check_vocab_mapping(t2d, d2t)
    for fault in faults:
        problems.add(where, fault, fix)
    if not faults and not torch.equal(d2t, mapping.d2t):
        first = int((d2t != mapping.d2t).nonzero()[0]) if len(d2t) == len(mapping.d2t) else min(len(d2t), mapping.size)
        problems.add(where, f"its map is not the one of vocab_mapping/, first at draft token {first}", fix)


def map_of(draft: Draft, fingerprint: str, *, where: str) -> VocabMapping:
    """The map inside a draft that was warm-started with a map of its own.

    fingerprint: what stage 4 recorded. Raises: PipelineError when it isn't that map, or isn't one.
    """
    t2d, d2t = draft.tensors.get("t2d"), draft.tensors.get("d2t")
    if t2d is None or d2t is None or check_vocab_mapping(t2d, d2t):
        what = "has no sound t2d and d2t, though it was warm-started with a map of its own"
        raise PipelineError(Problem(where, what, "export another checkpoint, or train again"))
    mapping = VocabMapping(t2d, d2t, torch.zeros(len(t2d), dtype=torch.int64))
    if mapping.fingerprint != fingerprint:
        what = "its map is not the one that stage 4 recorded for the warm start"
        raise PipelineError(Problem(where, what, "export another checkpoint, or train again"))
    return mapping


def check_head(draft: Draft, verifier_head: Tensor, mapping: VocabMapping, *, frozen: bool, where: str) -> None:
    """Where the head was frozen, row k must be the verifier's row k + d2t[k], in the draft's dtype.

    Args:
        verifier_head: [V, D].
    Raises: PipelineError naming the first row that differs.
    """
    if not frozen:
        return
    head = draft.tensors[HEAD]
    same = (head == verifier_head[mapping.target_ids].to(head.dtype)).all(dim=1)
    if not bool(same.all()):
        k = int((~same).nonzero()[0])
        what = f"lm_head row {k} is not the verifier's row {int(mapping.target_ids[k])}, although the head was frozen"
        raise PipelineError(Problem(where, what, "the map or the verifier is not the one that this draft learnt with"))


def check_embeddings(draft: Draft, verifier_embed: Tensor, *, where: str) -> None:
    """The draft's embeddings are the verifier's, bit for bit in the draft's dtype. Raises: PipelineError."""
    embed = draft.tensors[EMBED]
    if embed.shape != verifier_embed.shape or not torch.equal(embed, verifier_embed.to(embed.dtype)):
        what = "embed_tokens is not the verifier's: these are the embeddings of another verifier"
        raise PipelineError(Problem(where, what, "set verifier.path to the verifier that the states came from"))


# ---- writing ---------------------------------------------------------------------------------------------------------


def with_served_keys(draft: Draft) -> Draft:
    """Adds what servers read and the library leaves out: the number of aux layers where it isn't three."""
    shape = dict(draft.config["transformer_layer_config"])
    shape["rope_theta"] = _rope_theta(shape)
    if len(draft.aux_layer_ids) != VLLM_DEFAULT_AUX_LAYERS:
        shape["num_aux_hidden_states"] = len(draft.aux_layer_ids)
    return Draft({**draft.config, "transformer_layer_config": shape}, draft.tensors)


def write_draft(out_dir: Path, draft: Draft, *, layout: str, share_embeddings: bool) -> list[Path]:
    """Writes config.json and model.safetensors in the layout asked for.

    Args:
        share_embeddings: leave `embed_tokens` out; the server then takes the verifier's.
    """
    config, tensors = (draft.config, draft.tensors) if layout == "speculators" else to_llama_eagle3(draft)
    kept = {name: t.contiguous() for name, t in tensors.items() if not (share_embeddings and name == EMBED)}
    with replacing(out_dir / WEIGHTS_FILE) as temporary:
        save_file(kept, temporary, metadata={"format": "pt"})
    write_json(out_dir / CONFIG_FILE, config)
    return [out_dir / CONFIG_FILE, out_dir / WEIGHTS_FILE]


def to_llama_eagle3(draft: Draft) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The original EAGLE-3 layout: a flat Llama configuration, the first layer called `midlayer`.

    Aux layer ids are written in vLLM's counting (states after i layers) at the top level, where vLLM reads them, and
    one lower in `eagle_config`, where SGLang counts them as outputs of layer i. Readers before transformers 5 know
    `rope_scaling` only, so the rotary keys are written in both forms.

    Raises: PipelineError when the draft has a second layer, for which servers disagree on the names.
    """
    shape = draft.config["transformer_layer_config"]
    if shape.get("num_hidden_layers", 1) != 1:
        raise PipelineError(Problem("export.format", "llama_eagle3 has one layer", "use export.format speculators"))
    rope = shape.get("rope_parameters") or {}
    config = {
        **shape,
        "architectures": [LLAMA_EAGLE3],
        "model_type": "llama",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "rope_theta": _rope_theta(shape),
        "draft_vocab_size": draft.config["draft_vocab_size"],
        "target_hidden_size": shape["hidden_size"],
        "eagle_aux_hidden_state_layer_ids": draft.aux_layer_ids,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [i - 1 for i in draft.aux_layer_ids],
        },
        **{flag: draft.config[flag] for flag in NORM_FLAGS},
    }
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = rope
    return config, {name.replace(FIRST_LAYER, MIDLAYER, 1): tensor for name, tensor in draft.tensors.items()}


_TOP_KEYS = {
    *("architectures", "draft_vocab_size", "target_hidden_size", "eagle_config", "rope_scaling"),
    *("eagle_aux_hidden_state_layer_ids", "torch_dtype", "dtype", *NORM_FLAGS),
}


def from_llama_eagle3(config: dict[str, Any], tensors: dict[str, Tensor]) -> Draft:
    """The library's form of the original layout; its ids are read at the top level, in vLLM's counting."""
    dropped = _TOP_KEYS if "rope_parameters" in config else _TOP_KEYS - {"rope_scaling"}
    shape = {key: value for key, value in config.items() if key not in dropped}
    written = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": shape,
        "draft_vocab_size": config.get("draft_vocab_size", shape.get("vocab_size")),
        "eagle_aux_hidden_state_layer_ids": config.get("eagle_aux_hidden_state_layer_ids"),
        **{flag: config.get(flag, False) for flag in NORM_FLAGS},
    }
    return Draft(written, {name.replace(MIDLAYER, FIRST_LAYER, 1): tensor for name, tensor in tensors.items()})


# ---- what servers make of it -----------------------------------------------------------------------------------------

# The newest vLLM release known to ignore an option of its speculators reader, from that release's own source or the
# date of the change (vllm pull requests 38111 and 46488). A draft is silently misread there.
IGNORED_UP_TO = {
    "eagle_aux_hidden_state_layer_ids": Version("0.10.2"),
    "norm_before_fc": Version("0.18.1"),
    "fc_norm": Version("0.22.1"),
    "norm_output": Version("0.22.1"),
}
LAST_LAYER_IGNORED_UP_TO = Version("0.25.0")
UNKNOWN_TO_SGLANG = ("norm_before_residual", "norm_before_fc")
NEW_IN_SGLANG = ("fc_norm", "norm_output")  # its models/llama_eagle3.py got them in 2026


def server_limits(draft: Draft, num_layers: int) -> dict[str, Version]:
    """Options that this draft uses, with the newest vLLM release known to ignore each.

    num_layers: L of the verifier, whose last state only recent releases return.
    """
    used = {flag for flag in NORM_FLAGS if draft.config[flag]} | {"eagle_aux_hidden_state_layer_ids"}
    found = {option: release for option, release in IGNORED_UP_TO.items() if option in used}
    if num_layers in draft.aux_layer_ids:
        found[f"aux layer {num_layers}, the last"] = LAST_LAYER_IGNORED_UP_TO
    return found


def sglang_limits(draft: Draft) -> list[str]:
    """What SGLang doesn't read of this draft, in any release or in older ones."""
    unknown = [f"SGLang has no {flag}: serve this draft with vLLM" for flag in UNKNOWN_TO_SGLANG if draft.config[flag]]
    recent = [f"SGLang reads {flag} only in releases of 2026" for flag in NEW_IN_SGLANG if draft.config[flag]]
    return unknown + recent


def can_serve_in_sglang(draft: Draft) -> bool:
    return not any(draft.config[flag] for flag in UNKNOWN_TO_SGLANG)


def server_warnings(draft: Draft, num_layers: int, vllm: Version | None, layout: str) -> list[str]:
    """What to say where the installed vLLM, or any SGLang in the layout made for it, would misread this draft."""
    too_old = [
        f"vLLM {vllm} is too old for {option}, which {release} and earlier ignore: install a later one"
        for option, release in server_limits(draft, num_layers).items()
        if vllm is not None and vllm <= release
    ]
    return too_old + (sglang_limits(draft) if layout == "llama_eagle3" else [])


def config_faults(draft: Draft, read: Mapping[str, Any]) -> list[str]:
    """Compares what a server makes of config.json with what the draft is; one line for each key that differs.

    Args:
        read: the keys of vLLM's own reading (`engine.read_draft_config`), its defaults filled in.
    """
    config = library_config(draft)
    shape = config.transformer_layer_config
    meant = {
        "eagle_aux_hidden_state_layer_ids": draft.aux_layer_ids,
        "num_aux_hidden_states": len(draft.aux_layer_ids),
        "draft_vocab_size": config.draft_vocab_size,
        **{flag: draft.config[flag] for flag in NORM_FLAGS},
        **{key: getattr(shape, key) for key in SHAPE_KEYS},
        **{f"rope {key}": value for key, value in (shape.rope_parameters or {}).items()},
    }
    return [
        f"{key} is {value!r}, vLLM reads {read.get(key)!r}" for key, value in meant.items() if read.get(key) != value
    ]


SHAPE_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings"),
    *("tie_word_embeddings", "attention_bias", "mlp_bias"),
)


# ---- the round trip --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One sample: input_ids int64 [T]; aux [T, A * D], bf16; supervised bool [T], tokens that the verifier wrote."""

    input_ids: Tensor
    aux: Tensor
    supervised: Tensor


def load_draft_model(draft: Draft, embed: Tensor) -> Eagle3DraftModel:
    """The library's own model in float32, for inference.

    Args:
        embed: [V, D], the verifier's embeddings, which the server supplies where the draft leaves them out.
    """
    config = library_config(draft)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(config=config)
    tensors = {EMBED: embed, **draft.tensors}
    model.load_state_dict({name: _float32(tensor) for name, tensor in tensors.items()}, strict=False)
    return model.float().eval()


def _float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def draft_logits(model: Eagle3DraftModel, row: Row, num_draft_tokens: int) -> list[Tensor]:
    """Logits float32 [T - 1, K] of every draft step over one sample, the true tokens being fed in.

    Row i gets the aux state of token i and the embedding of token i + 1, and at step t predicts token i + 2 + t:

        tokens      x0  x1  x2  x3  x4        row 1, step 0: aux of x1, embedding of x2, predicts x3
        row          0   1   2   3            row 1, step 1: its own output, embedding of x3, predicts x4
    """
    found: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _module, _inputs, output: found.append(output[0].clone()))
    try:
        with torch.no_grad():
            model(
                hidden_states=row.aux[None, :-1].float(),
                input_ids=row.input_ids[None, 1:],
                document_ids=torch.zeros(1, len(row.input_ids) - 1, dtype=torch.long),
                ttt_steps=num_draft_tokens,
            )
    finally:
        hook.remove()
    return found


def check_round_trip(checkpoint: Draft, written: Draft, rows: list[Row], embed: Tensor, *, ttt_steps: int) -> int:
    """The written directory, loaded again, must give the checkpoint's logits bit for bit.

    Returns: how many logits were compared.
    Raises: PipelineError naming the step and the sample at which they part.
    """
    before, after = load_draft_model(checkpoint, embed), load_draft_model(written, embed)
    compared = 0
    for sample, row in enumerate(rows):
        pairs = zip(draft_logits(before, row, ttt_steps), draft_logits(after, row, ttt_steps), strict=True)
        for step, (one, other) in enumerate(pairs):
            if not torch.equal(one, other):
                worst = float((one - other).abs().max())
                what = (
                    f"logits of sample {sample} differ from the checkpoint's at TTT step {step}, by up to {worst:.3g}"
                )
                raise PipelineError(Problem(DIR_NAME, what, "the export changed a weight, a flag or a rope key"))
            compared += one.numel()
    return compared
