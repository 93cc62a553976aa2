"""What the machine must have before an hour is spent on it: cards, memory, versions, links, files, limits.

    python -m common.preflight --config configs/kimi_k25_int4.yaml   # all of it, for a host that has no samples yet
    python -m common.preflight --table                               # the runbook's table

Every stage asks `check_host` for its own part, with --check and before each run. What can't work is a problem and stops
the stage; what works badly (a slow link, a version that nobody has run) is a warning. The memory arithmetic is an
estimate from the configuration and the sizes of the files: vLLM measures, and has the last word.
"""

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from common import engine
from common.config import Config, load_config
from common.errors import PipelineError, Problem, Problems, some
from common.files import format_bytes, format_count, free_bytes
from common.hidden_states import bytes_per_token
from common.manifest import package_versions
from common.verifier import Verifier, check_weight_files, open_verifier, weight_bytes

CARD_FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "compute_cap", "driver_version")
PROCESS_FIELDS = ("pid", "process_name", "used_gpu_memory")
MIB = 2**20
# Beside weights and cache: activations, the logits of 64 sequences over 163,840 tokens, CUDA's own context.
ALLOWANCE_BYTES = 4_000_000_000
DEFAULT_UTILIZATION = 0.9
# What a driver and a desktop hold; more is somebody's model.
IDLE_BYTES = 1_000_000_000
# Compute capability 12.0 came with CUDA 12.8 (its release notes), which wants driver 570.
BLACKWELL, BLACKWELL_CUDA, BLACKWELL_DRIVER = Version("12.0"), Version("12.8"), Version("570")
MIN_SHM_BYTES = 2 * 2**30  # a container's default of 64 MB ends NCCL and the workers' queues
MIN_OPEN_FILES = 4096  # 64 shards for each of eight workers, their pipes, and the samples' files
CHECKED_PACKAGES = ("vllm", "torch", "transformers", "speculators", "compressed-tensors")
REQUIREMENTS = Path(__file__).parent.parent / "requirements.txt"

# Rates that the table rests on: public reports, none of them measured here.
PREFILL_TOKENS_PER_SECOND = 7400.0  # 8x RTX PRO 6000, prefills of 8k with the right NCCL graph
TRAIN_TOKENS_PER_CARD_SECOND = 6e9 / (1500 * 3600)  # lightseekorg/kimi-k2.5-eagle3: 6 B tokens in 1,500 H200-hours
GENERATE_TOKENS_PER_SECOND = 1000.0  # an assumption, to scale by what stage 1 shows after its first minutes


# ---- the host, as its own tools describe it ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Card:
    index: int
    name: str
    total_bytes: int
    used_bytes: int
    capability: Version
    driver: Version


@dataclass(frozen=True)
class Host:
    """What was read. `links` holds the kinds of connection between cards, as `nvidia-smi topo -m` names them."""

    cards: Sequence[Card] = ()
    processes: Sequence[str] = ()
    cuda: Version | None = None
    links: frozenset[str] = frozenset()
    shm_bytes: int = 2**62
    open_files: int = 2**31
    environment: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)


def read_host() -> Host:
    """Asks nvidia-smi and the operating system. Without nvidia-smi there are no cards, and that is no fault."""
    if not shutil.which("nvidia-smi"):
        return Host(environment=dict(os.environ), packages=package_versions())
    shm = Path("/dev/shm")
    return Host(
        cards=parse_cards(_ask(f"--query-gpu={','.join(CARD_FIELDS)}", "--format=csv,noheader,nounits")),
        processes=parse_processes(
            _ask(f"--query-compute-apps={','.join(PROCESS_FIELDS)}", "--format=csv,noheader,nounits")
        ),
        cuda=parse_cuda(_ask()),
        links=parse_links(_ask("topo", "-m")),
        shm_bytes=shutil.disk_usage(shm).total if shm.is_dir() else 2**62,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        environment=dict(os.environ),
        packages=package_versions(),
    )


def _ask(*arguments: str) -> str:
    """Raises: PipelineError with nvidia-smi's own words when it fails, as it does when driver and kernel differ."""
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        words = (done.stdout + done.stderr).strip().splitlines() or [f"status {done.returncode}"]
        raise PipelineError(Problem("nvidia-smi", words[0], "mend the driver (a reboot after its update often does)"))
    return done.stdout


def parse_cards(text: str) -> list[Card]:
    """`nvidia-smi --query-gpu=... --format=csv,noheader,nounits`: one line a card, memory in MiB."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return [
        Card(int(index), name, int(total) * MIB, int(used) * MIB, Version(capability), Version(driver))
        for index, _uuid, name, total, used, capability, driver in rows
    ]


def parse_processes(text: str) -> list[str]:
    """`nvidia-smi --query-compute-apps=...`: `4242, VLLM::Worker_TP0, 70210` becomes `VLLM::Worker_TP0 (4242)`."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return list(dict.fromkeys(f"{row[1]} ({row[0]})" for row in rows if len(row) >= 2))


def parse_cuda(text: str) -> Version | None:
    """The newest CUDA that the driver runs, from the head of plain `nvidia-smi`."""
    found = re.search(r"CUDA(?: UMD)? Version:\s*(\d+\.\d+)", text)
    return Version(found[1]) if found else None


def parse_links(text: str) -> frozenset[str]:
    """`nvidia-smi topo -m`: NV# is NVLink; PIX, PXB, PHB, NODE and SYS are PCIe, from near to far."""
    rows = (re.split(r"\s+", re.sub(r"\x1b\[[0-9;]*m", "", line).strip()) for line in text.splitlines())
    cells = [(row[0], row[1:]) for row in rows if re.fullmatch(r"GPU\d+", row[0]) and len(row) > 1]
    cells = [(name, row) for name, row in cells if not re.fullmatch(r"GPU\d+", row[0])]
    kinds = {kind for _, row in cells for kind in row[: len(cells)]}
    return frozenset(kind for kind in kinds if re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", kind))


# ---- what a stage needs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Need:
    """What one stage asks of the cards. `length`: tokens of the longest sequence; `token_bytes`: cache of one token on
    each card; both 0 where no engine runs."""

    engine: bool
    training: bool = False
    length: int = 0
    token_bytes: int = 0


def need_of(script: str, config: Config, verifier: Verifier) -> Need:
    cache = kv_bytes_per_token(verifier, config.verifier.tensor_parallel_size)
    if script == "01_prepare_data" and config.generate.enabled:
        return Need(True, length=config.prepare.max_tokens + config.generate.max_tokens, token_bytes=cache)
    if script == "02_extract_hidden_states":
        states = 2 * verifier.hidden_size * (len(config.extract.aux_layer_ids) + 1)  # every card keeps a copy
        return Need(True, length=config.prepare.max_tokens + 1, token_bytes=cache + states)
    if script == "05_convert_checkpoint" and config.export.serve_check:
        return Need(True, length=config.export.max_model_len, token_bytes=cache)
    return Need(False, training=script == "04_train")


def kv_bytes_per_token(verifier: Verifier, tensor_parallel_size: int) -> int:
    """Bytes of 16-bit cache that a token takes on each card. MLA's latent is the same on all of them."""
    text = verifier.text_config
    if text.get("kv_lora_rank"):
        return 2 * verifier.num_layers * (text["kv_lora_rank"] + text.get("qk_rope_head_dim", 0))
    heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    head_dim = text.get("head_dim") or verifier.hidden_size // text["num_attention_heads"]
    return 4 * verifier.num_layers * head_dim * max(1, heads // tensor_parallel_size)


def check_host(
    script: str, config: Config, verifier: Verifier, host: Host | None = None
) -> tuple[list[Problem], dict[str, str]]:
    """What this stage needs of this machine: warnings, and rows for the --check table.

    Raises: PipelineError with everything that can't work.
    """
    need = need_of(script, config, verifier)
    wants_cards = config.verifier.tensor_parallel_size > 1
    if not (need.engine or need.training):
        return [], {}
    host = host or read_host()
    if not host.cards and not wants_cards:
        return [], {}  # the CPU build
    problems = Problems()
    cards = host.cards if need.training else host.cards[: config.verifier.tensor_parallel_size]
    for problem in _card_problems(config, host, need, cards):
        problems.add(problem.where, problem.what, problem.fix)
    rows: dict[str, str] = {}
    if need.engine and cards:
        with problems.collect():
            rows = _memory(config, verifier, need, cards)
    problems.raise_if_any()
    return list(_warnings(config, host, verifier)), rows


def _card_problems(config: Config, host: Host, need: Need, cards: Sequence[Card]) -> Iterator[Problem]:
    wanted = config.verifier.tensor_parallel_size
    if need.engine and len(host.cards) < wanted:
        what = f"{wanted}; nvidia-smi shows {len(host.cards)} cards"
        fix = "run on the host with the cards, or set it to what is there"
        yield Problem("verifier.tensor_parallel_size", what, fix)
    busy = [card for card in cards if card.used_bytes > IDLE_BYTES]
    if busy:
        held = max(card.used_bytes for card in busy)
        who = some(host.processes) or "processes that nvidia-smi doesn't show (another container, or root's)"
        what = f"{some([card.index for card in busy], 8)} hold up to {format_bytes(held)} for {who}"
        yield Problem("cards", what, "stop that server, wait until its memory is free, then run again")
    if any(card.capability >= BLACKWELL for card in cards):
        if host.cuda is None or host.cuda < BLACKWELL_CUDA:
            what = f"the driver runs CUDA {host.cuda or 'of an unknown version'}, these cards need {BLACKWELL_CUDA}"
            yield Problem("driver", what, f"install driver {BLACKWELL_DRIVER} or later")
        elif cards[0].driver < BLACKWELL_DRIVER:
            what = f"{cards[0].driver} is older than these cards"
            yield Problem("driver", what, f"install driver {BLACKWELL_DRIVER} or later")
    if len({card.name for card in cards}) > 1:
        names = some(sorted({card.name for card in cards}))
        yield Problem("cards", f"are of different kinds: {names}", "choose equal ones with CUDA_VISIBLE_DEVICES")
    if cards and host.shm_bytes < MIN_SHM_BYTES:
        what = f"{format_bytes(host.shm_bytes)}; NCCL and the workers' queues need {format_bytes(MIN_SHM_BYTES)}"
        yield Problem("/dev/shm", what, "start the container with --ipc=host or --shm-size=16g")


def _memory(config: Config, verifier: Verifier, need: Need, cards: Sequence[Card]) -> dict[str, str]:
    """Raises: PipelineError when weights and one longest sequence don't fit on a card."""
    smallest = min(card.total_bytes for card in cards)
    share = float(config.verifier.engine_args.get("gpu_memory_utilization", DEFAULT_UTILIZATION))
    weights = weight_bytes(verifier) // config.verifier.tensor_parallel_size
    left = int(share * smallest) - weights - ALLOWANCE_BYTES
    one = need.length * need.token_bytes
    if one > left:
        what = f"{format_bytes(weights)} of weights and {format_bytes(one)} for {format_count(need.length)} tokens don't fit"
        what += f" beside {format_bytes(ALLOWANCE_BYTES)} of activations into {share:.0%} of {format_bytes(smallest)}"
        fix = "shorten prepare.max_tokens, or raise verifier.tensor_parallel_size or gpu_memory_utilization"
        raise PipelineError(Problem("memory of a card", what, fix))
    return {
        "weights a card": format_bytes(weights),
        "cache a card": f"{format_bytes(left)}, {format_bytes(need.token_bytes)} a token",
        "sequences at once": f"{left // one} of {format_count(need.length)} tokens",
    }


def _warnings(config: Config, host: Host, verifier: Verifier) -> Iterator[Problem]:
    yield from _link_warnings(config, host)
    if host.cards and host.open_files < MIN_OPEN_FILES:
        what = f"{host.open_files} open files are allowed; shards, workers and samples take up to {MIN_OPEN_FILES}"
        yield Problem("ulimit", what, "ulimit -n 65536 before the run")
    pinned = {r.name: str(r.specifier).removeprefix("==") for r in _requirements()}
    for name in CHECKED_PACKAGES:
        found = host.packages.get(name, "")
        if host.cards and found.partition("+")[0] != pinned[name]:
            what = f"{found or 'is not installed'}; {verifier.path.name} was prepared with {pinned[name]}"
            yield Problem(name, what, "pip install -r requirements.txt")


def _link_warnings(config: Config, host: Host) -> Iterator[Problem]:
    """PCIe set-up decides: 8k prefills ran at 876 tokens/s with a wrong NCCL graph and at 7,400 with the right one."""
    if config.verifier.tensor_parallel_size < 2 or any(kind.startswith("NV") for kind in host.links) or not host.cards:
        return
    if host.environment.get("NCCL_P2P_LEVEL") != "SYS":
        found = host.environment.get("NCCL_P2P_LEVEL", "unset")
        what = f"is {found}, and the cards are joined by PCIe only ({', '.join(sorted(host.links)) or 'no link shown'})"
        yield Problem("NCCL_P2P_LEVEL", what, "export NCCL_P2P_LEVEL=SYS; IOMMU and ACS off in firmware and kernel")
    if host.environment.get("NCCL_P2P_DISABLE", "0") != "0":
        yield Problem("NCCL_P2P_DISABLE", "is set: every exchange goes through host memory", "unset NCCL_P2P_DISABLE")
    if config.verifier.tensor_parallel_size > 2 and not config.verifier.engine_args.get("disable_custom_all_reduce"):
        what = "custom all-reduce is made for two PCIe cards at most"
        yield Problem("verifier.engine_args", what, "add disable_custom_all_reduce: true")


def _requirements() -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines())
    return [Requirement(line) for line in lines if line]


# ---- what a corpus takes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CorpusPlan:
    """Bytes and hours of one corpus on the eight-card host, from the rates above."""

    num_samples: int
    tokens: int
    bfloat16_bytes: int
    float8_bytes: int
    answer_hours: float
    extract_hours: float
    train_hours: float


def plan_corpus(
    num_samples: int,
    *,
    tokens_each: int = 2000,
    answer_share: float = 0.75,
    hidden_size: int = 7168,
    num_states: int = 4,
    num_epochs: int = 2,
    num_cards: int = 8,
) -> CorpusPlan:
    """answer_share: of a sample's tokens, those that the verifier writes. num_states: aux layers and the last."""
    tokens = num_samples * tokens_each
    return CorpusPlan(
        num_samples,
        tokens,
        tokens * bytes_per_token(num_states, hidden_size, "bfloat16"),
        tokens * bytes_per_token(num_states, hidden_size, "float8_e4m3fn"),
        tokens * answer_share / GENERATE_TOKENS_PER_SECOND / 3600,
        tokens / PREFILL_TOKENS_PER_SECOND / 3600,
        tokens * num_epochs / (TRAIN_TOKENS_PER_CARD_SECOND * num_cards) / 3600,
    )


def markdown_table(sizes: Sequence[int] = (1_000, 10_000, 100_000)) -> str:
    """The runbook's table: samples of 2,000 tokens, two epochs."""
    lines = [
        "| samples | tokens | states, bf16 | states, FP8 | answers | extraction | training |",
        "|---|---|---|---|---|---|---|",
    ]
    for plan in map(plan_corpus, sizes):
        sizes_of = f"{format_bytes(plan.bfloat16_bytes)} | {format_bytes(plan.float8_bytes)}"
        hours = " | ".join(f"{h:,.1f} h" for h in (plan.answer_hours, plan.extract_hours, plan.train_hours))
        lines.append(f"| {plan.num_samples:,} | {plan.tokens / 1e6:,.0f} M | {sizes_of} | {hours} |")
    return "\n".join(lines)


# ---- the command -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: nothing stops a run here; 2: something does, each with its fix."""
    parser = argparse.ArgumentParser(prog="python -m common.preflight", description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", type=Path, metavar="FILE", help="the run's YAML")
    what.add_argument("--table", action="store_true", help="print what 1k, 10k and 100k samples take, and stop")
    flags = parser.parse_args(argv)
    if flags.table:
        sys.stdout.write(markdown_table() + "\n")
        return 0
    try:
        lines = survey(load_config(flags.config))
    except PipelineError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def survey(config: Config, host: Host | None = None) -> list[str]:
    """All stages' needs at once, before there are samples. Returns lines to read.

    Raises: PipelineError with everything that can't work.
    """
    problems = Problems()
    verifier = None
    warnings: dict[Problem, None] = {}
    lines: list[str] = []
    with problems.collect():
        engine.check_can_extract()
    with problems.collect():
        verifier = open_verifier(config.verifier)
        check_weight_files(verifier, whole=True)
    host = host or read_host()
    for script in ("01_prepare_data", "02_extract_hidden_states", "04_train", "05_convert_checkpoint"):
        if verifier is None:
            break
        with problems.collect():
            found, rows = check_host(script, config, verifier, host)
            warnings |= dict.fromkeys(found)
            lines += [f"{script}: {key} {value}" for key, value in rows.items()]
    problems.raise_if_any()
    lines.append(f"free on the disk of {config.run.dir}: {format_bytes(free_bytes(config.run.dir.absolute()))}")
    return [*lines, *(f"warning: {line}" for line in map(str, warnings))]


if __name__ == "__main__":
    sys.exit(main())
