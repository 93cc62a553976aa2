"""The `hidden_states/` artifact: the verifier's states at every token of every sample.

    hidden_states/
        data_0.pt ... data_{N-1}.pt   input_ids int64 [T], loss_mask bool [T], hidden_states: A + 1 tensors [T, D]
        ledger.jsonl                  one object a sample: index, sample_id, tokens, bytes, sha256
        ledger.2-of-8.jsonl           the same while several hosts share the work, until --merge
        manifest.json                 written last

The aux layers stand in the order of `extract.aux_layer_ids`, the last hidden state (before the final norm) at the
end. FP8 storage adds `scales`: A + 1 float32 tensors [T, 1]; the state is value x scale. This is the layout that
speculators' sample files use. A sample is done when the ledger says so; a file alone means nothing.
"""

import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import PipelineError, Problem
from common.files import fsync_path, sha256_file, write_text
from common.manifest import Manifest, read_manifest

DIR_NAME = "hidden_states"
LEDGER_NAME = "ledger.jsonl"
FAULTS_NAME = ".faults.jsonl"  # what the worker could not write
OWNED = ("data_*.pt", ".data_*.tmp", "ledger*.jsonl", FAULTS_NAME)
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


@dataclass(frozen=True)
class HiddenStates:
    """One sample: input_ids int64 [T], loss_mask bool [T], aux: A tensors bf16 [T, D], last: bf16 [T, D]."""

    input_ids: Tensor
    loss_mask: Tensor
    aux: list[Tensor]
    last: Tensor


@dataclass(frozen=True)
class LedgerEntry:
    index: int
    sample_id: str
    tokens: int
    bytes: int
    sha256: str


def data_path(out_dir: Path, index: int) -> Path:
    return out_dir / f"data_{index}.pt"


def bytes_per_token(num_slots: int, hidden_size: int, dtype: str) -> int:
    """Bytes on disk for one token: the states, plus 9 for its id and mask; FP8 adds a 4-byte scale a slot."""
    state = hidden_size + 4 if dtype == "float8_e4m3fn" else 2 * hidden_size
    return num_slots * state + 9


# ---- one file --------------------------------------------------------------------------------------------------------


def encode(input_ids: Tensor, loss_mask: Tensor, slots: Sequence[Tensor], dtype: str) -> bytes:
    """The bytes of a data_N.pt. slots: A + 1 tensors [T, D], contiguous; input_ids [T]; loss_mask [T]."""
    record: dict[str, Any] = {"input_ids": input_ids.long(), "loss_mask": loss_mask.bool()}
    if dtype == "float8_e4m3fn":
        quantised = [_to_fp8(slot) for slot in slots]
        record["hidden_states"] = [value for value, _ in quantised]
        record["scales"] = [scale for _, scale in quantised]
    else:
        record["hidden_states"] = [slot.to(torch.bfloat16).contiguous() for slot in slots]
    buffer = io.BytesIO()
    torch.save(record, buffer)
    return buffer.getvalue()


def _to_fp8(slot: Tensor) -> tuple[Tensor, Tensor]:
    """Per-token scale so that the largest value of a token is the largest that e4m3 holds (448)."""
    scale = slot.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / FP8_MAX
    return (slot.float() / scale).to(FP8), scale


def load_hidden_states(path: Path) -> HiddenStates:
    """Reads one data_N.pt; FP8 is decoded to bf16.

    Raises: PipelineError naming the file when it can't be read or has another layout.
    """
    fix = "run 02_extract_hidden_states.py --verify, then run it again"
    try:
        record = torch.load(path, weights_only=True, mmap=True)
        slots = record["hidden_states"]
        if "scales" in record:
            slots = [(v.float() * s).to(torch.bfloat16) for v, s in zip(slots, record["scales"], strict=True)]
        return HiddenStates(record["input_ids"], record["loss_mask"], list(slots[:-1]), slots[-1])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError) as error:
        raise PipelineError(Problem(str(path), f"can't be read: {error}", fix)) from None


def find_faults(
    states: Tensor, token_ids: Tensor, *, expected_ids: Tensor, num_slots: int, hidden_size: int
) -> list[str]:
    """What is wrong with the states of one sample, before they are written; empty when nothing is.

    Args:
        states: [T, A + 1, D] as the engine returns them. token_ids: int64 [T], what the engine says it computed.
        expected_ids: int64 [T], the sample's ids.
    """
    shape = [len(expected_ids), num_slots, hidden_size]
    if not torch.equal(token_ids, expected_ids):
        return [f"the engine computed {len(token_ids)} ids, not the {len(expected_ids)} of this sample"]
    if list(states.shape) != shape:
        return [f"states are {list(states.shape)}, expected {shape} (tokens, layers, hidden size)"]
    faults = []
    # One reduction a slot in float32 keeps memory at one slot; a NaN or an infinity survives the sum of squares.
    norms = torch.stack([states[:, slot].float().pow(2).sum(dim=-1) for slot in range(num_slots)], dim=1)
    if not torch.isfinite(norms).all():
        row, slot = (int(i) for i in (~torch.isfinite(norms)).nonzero()[0])
        faults.append(f"a state that is not finite at token {row}, slot {slot}")
    elif bool((norms == 0).any()):
        row, slot = (int(i) for i in (norms == 0).nonzero()[0])
        faults.append(f"a state of zeros at token {row}, slot {slot}")
    twice = [slot for slot in range(1, num_slots) if torch.equal(states[:, slot], states[:, slot - 1])]
    return faults + [f"slots {slot - 1} and {slot} hold the same states, so a layer is there twice" for slot in twice]


# ---- the ledger ------------------------------------------------------------------------------------------------------


def ledger_path(out_dir: Path, shard: tuple[int, int] = (1, 1)) -> Path:
    part, parts = shard
    return out_dir / (LEDGER_NAME if parts == 1 else f"ledger.{part}-of-{parts}.jsonl")


def read_ledger(path: Path) -> dict[int, LedgerEntry]:
    """Entries by index, the latest line winning; a torn last line (a kill while it was written) is dropped.

    Raises: PipelineError when a line before the last isn't an entry.
    """
    if not path.exists():
        return {}
    entries: dict[int, LedgerEntry] = {}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            entry = LedgerEntry(**json.loads(line))
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError):
            if number == len(lines):
                break
            what = f"line {number} is not an entry"
            raise PipelineError(Problem(str(path), what, "rerun 02_extract_hidden_states.py --overwrite")) from None
        entries[entry.index] = entry
    return entries


class Ledger:
    """Appends entries. Each is flushed to the kernel at once and to the disk once in a while and at the end."""

    def __init__(self, path: Path, *, sync_every: int = 64) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        self._path, self._sync_every, self._unsynced = path, sync_every, 0
        self._file = path.open("a", encoding="utf-8")

    def add(self, entry: LedgerEntry) -> None:
        self._file.write(json.dumps(asdict(entry)) + "\n")
        self._file.flush()
        self._unsynced += 1
        if self._unsynced >= self._sync_every:
            fsync_path(self._path)
            self._unsynced = 0

    def close(self) -> None:
        self._file.close()
        fsync_path(self._path)


def _drop_torn_line(path: Path) -> None:
    if path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])


def write_sorted_ledger(path: Path, entries: Iterable[LedgerEntry]) -> None:
    """Rewrites the ledger in the order of the samples, one line each, so that it doesn't tell how often a run died."""
    ordered = sorted(entries, key=lambda entry: entry.index)
    write_text(path, "".join(json.dumps(asdict(entry)) + "\n" for entry in ordered))


def is_intact(out_dir: Path, entry: LedgerEntry, *, deep: bool) -> bool:
    """Whether the entry's file is there with its size, and, if `deep`, with its checksum."""
    path = data_path(out_dir, entry.index)
    try:
        if path.stat().st_size != entry.bytes:
            return False
    except FileNotFoundError:
        return False
    return not deep or sha256_file(path) == entry.sha256


# ---- the whole -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HiddenStatesDir:
    """A complete `hidden_states/`."""

    path: Path
    manifest: Manifest
    aux_layer_ids: list[int]
    hidden_size: int
    num_samples: int

    def __len__(self) -> int:
        return self.num_samples

    def load(self, index: int) -> HiddenStates:
        """Reads sample `index`. Raises: PipelineError when the file is damaged or has other slots or sizes."""
        states = load_hidden_states(data_path(self.path, index))
        if len(states.aux) != len(self.aux_layer_ids) or states.last.shape[-1] != self.hidden_size:
            what = f"has {len(states.aux)} aux layers of size {states.last.shape[-1]}, the manifest says "
            what += f"{len(self.aux_layer_ids)} of {self.hidden_size}"
            fix = "run 02_extract_hidden_states.py --overwrite"
            raise PipelineError(Problem(str(data_path(self.path, index)), what, fix))
        return states


def open_hidden_states(run_dir: Path) -> HiddenStatesDir:
    """Raises: PipelineError when the artifact has no manifest; how far it has come is in the message."""
    out_dir = run_dir / DIR_NAME
    manifest = read_manifest(out_dir, "02_extract_hidden_states")
    return HiddenStatesDir(
        path=out_dir,
        manifest=manifest,
        aux_layer_ids=list(manifest.settings["extract.aux_layer_ids"]),
        hidden_size=int(manifest.counts["hidden_size"]),
        num_samples=int(manifest.counts["samples"]),
    )
