"""A Kimi-K2.5 directory that fits a CPU, written without any download: the published layout, tiny numbers.

What is as in the original: `kimi_k25` with the language model nested in `text_config` (DeepSeek-V3: MLA with the real
head sizes, `noaux_tc` routing, one dense layer, a shared expert), decoys above it and in the vision part, 163,840
tokens with the special ones at their real ids and holes between them, a slow tiktoken tokenizer that is Python code in
the directory, a chat template (of our own writing) that opens `<think>`, blanks the reasoning of earlier turns and keeps
that of a running chain of tool calls, shards whose embeddings, head and norm lie in one with the `language_model.`
prefix, and routed experts in compressed-tensors' INT4 (pack-quantized, groups of 32).

The weights are random, but for a head that has each token of ANSWER followed by the next: after an open `<think>` the
verifier reasons, answers, calls a tool and ends its turn, and a draft can learn that in a minute.
"""

import base64
import itertools
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

CODE_DIR = Path(__file__).parent / "kimi_code"
VOCAB, NUM_BASE = 163840, 163584
HIDDEN, LAYERS, HEADS, EXPERTS, FFN, EXPERT_FFN, GROUP = 128, 5, 4, 8, 256, 64, 32
AUX = (1, 2, 3)
# The named ones of the published tokenizer_config.json; the ids between them belong to nobody.
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
    "<|media_start|>": 163602,
    "<|media_end|>": 163604,
    "<|media_pad|>": 163605,
    "<think>": 163606,
    "</think>": 163607,
    "[UNK]": 163838,
    "[PAD]": 163839,
}
# What the verifier says after an open <think>, by construction; no token twice.
ANSWER = (
    "Ask hours!</think>Look,<|tool_calls_section_begin|><|tool_call_begin|>functions.clock:0"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
)
HEAD_SHARD = "model-00062-of-000064.safetensors"
OTHER_SHARDS = ("model-00001-of-000064.safetensors", "model-00064-of-000064.safetensors")


def write_tiny_kimi(path: Path, *, int4: bool, close_holes: bool = False) -> Path:
    """Writes the directory. int4: routed experts quantised; else their bf16 twin, which computes the same.

    close_holes: the tokenizer's code numbers the special tokens without gaps, as some loaders do.
    """
    path.mkdir(parents=True)
    write_tokenizer(path, close_holes=close_holes)
    write_config(path, int4=int4)
    torch.manual_seed(0)
    shards = {HEAD_SHARD: outer_tensors(path), OTHER_SHARDS[0]: {}, OTHER_SHARDS[1]: vision_tensors()}
    for layer in range(LAYERS):
        shards[OTHER_SHARDS[layer * 2 // LAYERS]] |= layer_tensors(layer, int4=int4)
    for name, tensors in shards.items():
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path / name)
    weight_map = {key: name for name, tensors in shards.items() for key in tensors}
    write(path, "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return path


def write(path: Path, name: str, value: object) -> None:
    (path / name).write_text(json.dumps(value, indent=1))


# ---- configuration ---------------------------------------------------------------------------------------------------

QUANTIZATION = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": GROUP,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def text_config(*, int4: bool) -> dict:
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "moe_intermediate_size": EXPERT_FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": 262144,
        "bos_token_id": SPECIAL["[BOS]"],
        "eos_token_id": SPECIAL["[EOS]"],
        "pad_token_id": SPECIAL["[PAD]"],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    return config | ({"quantization_config": QUANTIZATION} if int4 else {})


def write_config(path: Path, *, int4: bool) -> None:
    """Everything above `text_config` that sounds like the language model's is a decoy."""
    vision = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text_config(int4=int4),
        "vision_config": vision | {"vocab_size": 1152, "text_hidden_size": 7168, "rms_norm_eps": 1e-3},
        "projection_hidden_size": 64,
        "media_placeholder_token_id": SPECIAL["<|media_pad|>"],
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    write(path, "config.json", config)
    write(path, "generation_config.json", {"eos_token_id": SPECIAL["<|im_end|>"], "max_length": 262144})
    media = {"in_patch_limit": 16384, "patch_size": 14, "merge_kernel_size": 2, "fixed_output_tokens": None}
    media |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_limit_on_one_side": 512, "sample_fps": 2.0}
    media |= {"in_patch_limit_each_frame": 4096, "in_patch_limit_video": None, "num_frames_each_chunk": 4}
    media |= {"max_num_frames_each_video": None, "timestamp_mode": "hh:mm:ss.fff"}
    processor = {"image_processor_type": "KimiK25VisionProcessor", "media_proc_cfg": media}
    write(path, "preprocessor_config.json", processor)


# ---- tokenizer -------------------------------------------------------------------------------------------------------


def write_tokenizer(path: Path, *, close_holes: bool = False) -> None:
    """tiktoken.model, the Python class that reads it, tokenizer_config.json and the chat template."""
    with (path / "tiktoken.model").open("wb") as file:
        for rank, token in enumerate(base_tokens()):
            file.write(base64.b64encode(token) + f" {rank}\n".encode())
    code = (CODE_DIR / "tokenization_kimi.py").read_text()
    (path / "tokenization_kimi.py").write_text(code.replace("CLOSE_HOLES = False", f"CLOSE_HOLES = {close_holes}"))
    shutil.copy(CODE_DIR / "chat_template.jinja", path)
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    settings = {
        "added_tokens_decoder": {str(token_id): {"content": token, **flags} for token, token_id in SPECIAL.items()},
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "model_max_length": 262144,
    }
    write(path, "tokenizer_config.json", settings)


def base_tokens() -> list[bytes]:
    """All bytes, all pairs, then triples: 163,584 tokens, so that every id decodes. Letters merge first."""
    order = sorted(range(256), key=lambda byte: (not chr(byte).islower() or byte > 127, byte))
    words = (bytes(token) for length in (1, 2, 3) for token in itertools.product(order, repeat=length))
    singles = [bytes([byte]) for byte in range(256)]
    merged = itertools.islice((word for word in words if len(word) > 1), NUM_BASE - 256)
    return [*singles, *merged]


# ---- weights ---------------------------------------------------------------------------------------------------------


def outer_tensors(path: Path) -> dict[str, Tensor]:
    """Embeddings, head and final norm. Embeddings are far from 1, so that a norm left out is seen."""
    from common.config import VerifierSection
    from common.verifier import load_tokenizer, open_verifier

    embed, head = torch.randn(VOCAB, HIDDEN) * 6, torch.randn(VOCAB, HIDDEN) * 0.05
    tokenizer = load_tokenizer(open_verifier(VerifierSection(path=str(path), trust_remote_code=True)))
    chain = tokenizer.encode("<think>" + ANSWER, add_special_tokens=False)
    assert len(set(chain)) == len(chain), "a token that stands twice in ANSWER would have two successors"
    head[chain[1:]] = embed[chain[:-1]] / 6
    prefix = "language_model."
    return {
        f"{prefix}model.embed_tokens.weight": embed.bfloat16(),
        f"{prefix}lm_head.weight": head.bfloat16(),
        f"{prefix}model.norm.weight": (torch.rand(HIDDEN) + 0.5).bfloat16(),
    }


def vision_tensors() -> dict[str, Tensor]:
    """A little of the vision part, with names that end as the language model's do."""
    return {
        "vision_tower.encoder.model.norm.weight": torch.zeros(64, dtype=torch.bfloat16),
        "vision_tower.embed_tokens.weight": torch.zeros(1152, 64, dtype=torch.bfloat16),
        "mm_projector.pre_norm.weight": torch.ones(64, dtype=torch.bfloat16),
    }


def layer_tensors(layer: int, *, int4: bool) -> dict[str, Tensor]:
    attention, half = HEADS * 128, HEADS * (128 + 64)
    shapes = {
        "self_attn.q_a_proj": (64, HIDDEN),
        "self_attn.q_b_proj": (half, 64),
        "self_attn.kv_a_proj_with_mqa": (512 + 64, HIDDEN),
        "self_attn.kv_b_proj": (HEADS * 256, 512),
        "self_attn.o_proj": (HIDDEN, attention),
    }
    shapes |= feed_forward("mlp.", FFN) if layer == 0 else feed_forward("mlp.shared_experts.", EXPERT_FFN)
    found = {f"{name}.weight": small(shape) for name, shape in shapes.items()}
    for name, size in {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}.items():
        found[f"{name}.weight"] = torch.ones(size)
    found |= {"self_attn.q_a_layernorm.weight": torch.ones(64), "self_attn.kv_a_layernorm.weight": torch.ones(512)}
    found = {name: tensor.bfloat16() for name, tensor in found.items()}
    if layer > 0:
        found["mlp.gate.weight"] = small((EXPERTS, HIDDEN)).bfloat16()
        found["mlp.gate.e_score_correction_bias"] = torch.randn(EXPERTS) * 0.01
        for expert in range(EXPERTS):
            for name, shape in feed_forward(f"mlp.experts.{expert}.", EXPERT_FFN).items():
                found |= expert_tensors(name, small(shape), int4=int4)
    return {f"language_model.model.layers.{layer}.{name}": tensor for name, tensor in found.items()}


def feed_forward(prefix: str, width: int) -> dict[str, tuple[int, int]]:
    return {f"{prefix}{n}_proj": (width, HIDDEN) for n in ("gate", "up")} | {f"{prefix}down_proj": (HIDDEN, width)}


def small(shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape) * 0.05


def expert_tensors(name: str, weight: Tensor, *, int4: bool) -> dict[str, Tensor]:
    """One routed expert's matrix as INT4 in three tensors, or the bf16 matrix that these stand for."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    groups = weight.reshape(weight.shape[0], -1, GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16()
    whole = (groups / scale.float()).round().clamp(-8, 7)
    if not int4:
        return {f"{name}.weight": (whole * scale.float()).reshape(weight.shape).bfloat16()}
    return {
        f"{name}.weight_packed": pack_to_int32(whole.reshape(weight.shape).to(torch.int8), 4),
        f"{name}.weight_scale": scale[..., 0],
        f"{name}.weight_shape": torch.tensor(weight.shape, dtype=torch.int32),
    }


def load_text_model(path: Path) -> torch.nn.Module:
    """The language model of a bf16 directory in transformers, float32; an INT4 one would have to be decompressed."""
    from safetensors.torch import load_file
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    settings = text_config(int4=False)
    scaling = dict(settings.pop("rope_scaling"))
    scaling |= {"rope_type": scaling.pop("type"), "rope_theta": settings["rope_theta"]}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**settings, rope_parameters=scaling)).float().eval()
    tensors = {}
    for name in (HEAD_SHARD, *OTHER_SHARDS):
        for key, tensor in load_file(path / name).items():
            if key.startswith("language_model."):
                tensors[key.removeprefix("language_model.")] = tensor.float()
    names = set(model.state_dict())
    for layer in range(1, LAYERS):
        prefix = f"model.layers.{layer}.mlp.experts."
        if f"{prefix}gate_up_proj" in names:  # transformers 5 keeps a layer's experts in two tensors
            each = [
                [tensors.pop(f"{prefix}{e}.{n}_proj.weight") for e in range(EXPERTS)] for n in ("gate", "up", "down")
            ]
            gate, up, down = map(torch.stack, each)
            tensors |= {f"{prefix}gate_up_proj": torch.cat([gate, up], 1), f"{prefix}down_proj": down}
    model.load_state_dict(tensors)
    return model
