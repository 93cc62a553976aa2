"""A public EAGLE-3 draft, read into the form that stages 4 and 5 use.

Three layouts are out there: speculators' own, `LlamaForCausalLMEagle3` (vLLM, SGLang, SpecForge), and the original
EAGLE repository's (`LlamaForCausalLM`, pytorch_model.bin). They differ in what an absent key means, so everything that
is taken from a default is said aloud. Knows nothing of vLLM and changes no weight but for its dtype.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.convert.eagle.utils import build_llama_config_rope_kwargs
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig

from common.checkpoints import CONFIG_FILE, WEIGHTS_FILE
from common.errors import PipelineError, Problem, Problems, some
from common.export import EMBED, FIRST_LAYER, HEAD, LLAMA_EAGLE3, MIDLAYER, NORM_FLAGS, Draft, bare_name
from common.files import read_json, sha256_file, sha256_json
from common.verifier import Verifier, VerifierHead
from common.vocab_mapping import VocabMapping

PICKLED_WEIGHTS = "pytorch_model.bin"
ORIGINAL, SPECULATORS = "LlamaForCausalLM", "speculators"
# Keys of the decoder's shape that are taken over; everything else in a flat config.json is the draft's or is noise.
SHAPE_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings"),
    *("attention_bias", "mlp_bias", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"),
)
DRAFT_TOKENS = 3


@dataclass(frozen=True)
class ForeignDraft:
    """An opened directory; no weights yet. `layout` is one of the three; `notes` say what was taken from defaults."""

    path: Path
    layout: str
    config: dict[str, Any]
    notes: list[str]

    @property
    def fingerprint(self) -> str:
        weights = self.path / WEIGHTS_FILE
        return sha256_json([self.config, sha256_file(weights if weights.is_file() else self.path / PICKLED_WEIGHTS)])


def open_foreign_draft(path: Path, verifier: Verifier) -> ForeignDraft:
    """Reads config.json and turns it into speculators' form.

    Raises: PipelineError when it is no EAGLE-3 draft of Llama's shape, not of this verifier, or has no weights.
    """
    if not path.is_dir():
        raise PipelineError(Problem("export.import_dir", f"{path} is not a directory", "name a local directory"))
    given = read_json(path / CONFIG_FILE)
    layout = _layout_of(path, given)
    shape = given["transformer_layer_config"] if layout == SPECULATORS else given
    problems = Problems()
    if not any((path / name).is_file() for name in (WEIGHTS_FILE, PICKLED_WEIGHTS)):
        what = f"{path} has neither {WEIGHTS_FILE} nor {PICKLED_WEIGHTS}"
        problems.add("export.import_dir", what, "fetch the whole directory; sharded drafts must be joined first")
    for key, expected in (("hidden_size", verifier.hidden_size), ("vocab_size", verifier.vocab_size)):
        if shape.get(key) != expected:
            what = f"{path} has {key} {shape.get(key)}, the verifier has {expected}"
            problems.add("export.import_dir", what, "name the verifier that this draft was made for")
    problems.raise_if_any()
    notes: list[str] = []
    nested = given.get("eagle_config") or {}  # where the gpt-oss drafts say norm_before_fc
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": _decoder_shape(shape, notes),
        "draft_vocab_size": given.get("draft_vocab_size") or shape["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": _aux_layer_ids(given, verifier.num_layers, notes),
        "norm_before_residual": _norm_before_residual(given, layout, notes),
        **{flag: bool(nested.get(flag, given.get(flag, False))) for flag in NORM_FLAGS[1:]},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "speculators_config": _proposal(verifier),
    }
    return ForeignDraft(path, layout, config, notes)


def _layout_of(path: Path, config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    if config.get("speculators_model_type") == "eagle3":
        shape = config.get("transformer_layer_config") or {}
        if shape.get("model_type", "llama") == "llama":
            return SPECULATORS
        names = [f"a {shape['model_type']} decoder"]
    elif LLAMA_EAGLE3 in names:
        return LLAMA_EAGLE3
    elif ORIGINAL in names and "draft_vocab_size" in config:
        return ORIGINAL
    what = f"{path} holds {some(names) or 'no architecture'}, not an EAGLE-3 draft of Llama's shape"
    fix = f"known are speculators' eagle3, {LLAMA_EAGLE3} and the original EAGLE layout"
    raise PipelineError(Problem("export.import_dir", what, fix))


def _decoder_shape(shape: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Llama's own keys, the rotary ones in whatever form they came."""
    kept = {key: shape[key] for key in SHAPE_KEYS if shape.get(key) is not None}
    rope = shape.get("rope_parameters")
    if not rope:
        theta = shape.get("rope_theta")
        if theta is None:
            notes.append("config.json has no rope_theta; Llama's default of 10000 is taken")
        rope_keys = build_llama_config_rope_kwargs(theta or 10000.0, shape.get("rope_scaling"))
    else:
        rope_keys = {"rope_parameters": rope}
    return LlamaConfig(**kept, **rope_keys, tie_word_embeddings=False).to_dict()


def _aux_layer_ids(config: Mapping[str, Any], num_layers: int, notes: list[str]) -> list[int]:
    """In vLLM's counting: at the top level as they are, in `eagle_config` one lower (SGLang, SpecForge, ModelOpt)."""
    top = config.get("eagle_aux_hidden_state_layer_ids")
    if top:
        return [i + num_layers if i < 0 else i for i in top]
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if nested:
        notes.append(f"aux layers {nested} stand in eagle_config, where SGLang counts one lower than vLLM")
        return [i + 1 for i in nested]
    default = [2, num_layers // 2, num_layers - 3]
    notes.append(f"config.json names no aux layers; EAGLE's own choice of {default} is taken, as vLLM does")
    return default


def _norm_before_residual(config: Mapping[str, Any], layout: str, notes: list[str]) -> bool:
    if "norm_before_residual" in config:
        return bool(config["norm_before_residual"])
    default = layout == SPECULATORS
    notes.append(f"config.json has no norm_before_residual; vLLM takes {str(default).lower()} for this layout")
    return default


def _proposal(verifier: Verifier) -> dict[str, Any]:
    made = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DRAFT_TOKENS)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(
            name_or_path=str(verifier.path), architectures=list(verifier.config.get("architectures") or [])
        ),
    )
    return made.model_dump(mode="json")


# ---- weights ---------------------------------------------------------------------------------------------------------


def load_foreign_draft(foreign: ForeignDraft, head: VerifierHead) -> tuple[Draft, VocabMapping]:
    """Reads the weights under the library's names, in bf16, with the map it brings as offsets.

    What the draft leaves out because it is the verifier's (embeddings, an unreduced head) is filled in.

    Raises: PipelineError when the file can't be read, or its map is damaged or lost.
    """
    tensors = {_library_name(name): tensor for name, tensor in _read_weights(foreign.path).items()}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    mapping = _take_map(foreign, tensors, head.embed.shape[0])
    tensors = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()}
    if EMBED not in tensors:
        foreign.notes.append("the draft holds no embeddings; the verifier's are taken, as servers do")
        tensors[EMBED] = head.embed.to(torch.bfloat16)
    if HEAD not in tensors and mapping.size == mapping.vocab_size:
        foreign.notes.append("the draft holds no head; the verifier's is taken, as servers do")
        tensors[HEAD] = head.head.to(torch.bfloat16)
    return Draft(foreign.config, tensors), mapping


def _library_name(name: str) -> str:
    return bare_name(name).removeprefix("model.").replace(MIDLAYER, FIRST_LAYER, 1)


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Nothing that a pickled file brings along is run."""
    file = path / WEIGHTS_FILE if (path / WEIGHTS_FILE).is_file() else path / PICKLED_WEIGHTS
    try:
        if file.name == WEIGHTS_FILE:
            return load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load and safetensors raise a dozen kinds, by what is broken
        lines = str(error).splitlines()
        what = f"{file} can't be read: {lines[0] if lines else type(error).__name__}"
        raise PipelineError(Problem("export.import_dir", what, "fetch it again")) from error


def _take_map(foreign: ForeignDraft, tensors: dict[str, Tensor], vocab_size: int) -> VocabMapping:
    """The draft's own map as offsets; t2d is rebuilt from d2t where it is absent, and tells ids from offsets."""
    size = foreign.config["draft_vocab_size"]
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    no_counts = torch.zeros(vocab_size, dtype=torch.int64)
    if d2t is None:
        if size != vocab_size:
            what = f"{foreign.path} has a reduced vocabulary of {size} and no d2t"
            raise PipelineError(
                Problem("export.import_dir", what, "the map was dropped when it was saved; use another")
            )
        return VocabMapping(torch.ones(vocab_size, dtype=torch.bool), no_counts.clone(), no_counts)
    offsets = _as_offsets(foreign, d2t.to(torch.int64), t2d)
    targets = torch.arange(len(offsets)) + offsets
    if bool((targets < 0).any()) or bool((targets >= vocab_size).any()) or bool((targets.diff() <= 0).any()):
        fix = "the map is damaged or another verifier's; nothing can be repaired by guessing"
        bad = int(((targets < 0) | (targets >= vocab_size) | (targets.diff(prepend=targets[:1] - 1) <= 0)).nonzero()[0])
        what = f"{foreign.path}: d2t[{bad}] leads to verifier id {int(targets[bad])}, ids must rise and exist"
        raise PipelineError(Problem("export.import_dir", what, fix))
    rebuilt = torch.zeros(vocab_size, dtype=torch.bool)
    rebuilt[targets] = True
    if t2d is not None and not torch.equal(t2d.to(torch.bool), rebuilt):
        what = f"{foreign.path}: t2d and d2t are not the same map"
        raise PipelineError(Problem("export.import_dir", what, "use another copy of this draft"))
    tensors["d2t"], tensors["t2d"] = offsets, rebuilt
    return VocabMapping(rebuilt, offsets, no_counts)


def _as_offsets(foreign: ForeignDraft, d2t: Tensor, t2d: Tensor | None) -> Tensor:
    """Older files hold the verifier ids themselves; t2d tells the two apart without doubt."""
    if t2d is None:
        foreign.notes.append("the draft holds no t2d; d2t is taken as offsets, as servers do")
        return d2t
    if not torch.equal(d2t, t2d.to(torch.bool).nonzero().flatten()) or len(d2t) < 2:
        return d2t
    foreign.notes.append("d2t holds verifier ids, not offsets; it was converted")
    return d2t - torch.arange(len(d2t))
