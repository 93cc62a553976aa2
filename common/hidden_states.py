"""The `hidden_states/` artifact: the verifier's states at every token of every sample.

    hidden_states/
        data_0.pt ... data_{N-1}.pt   input_ids int64 [T], loss_mask bool [T], hidden_states: A + 1 tensors [T, D]
        ledger.jsonl                  one object a sample: index, sample_id, tokens, bytes, sha256
        ledger.2-of-8.jsonl           the same while several hosts share the work, until --merge
        .faults.jsonl                 what the worker could not write, until the next run; .faults.2-of-8.jsonl
        manifest.json                 written last

The aux layers stand in the order of `extract.aux_layer_ids`, the last hidden state (before the final norm) at the
end. FP8 storage adds `scales`: A + 1 float32 tensors [T, 1]; the state is value x scale. This is the layout that
speculators' sample files use. A sample is done when the ledger says so; a file alone means nothing.
"""

import errno
import hashlib
import io
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import PipelineError, Problem
from common.files import fsync_path, sha256_file, write_text
from common.manifest import Manifest, read_manifest
from common.samples import Samples

DIR_NAME = "hidden_states"
LEDGER_NAME = "ledger.jsonl"
OWNED = ("data_*.pt", ".data_*.tmp", "ledger*.jsonl", ".faults*.jsonl")
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
# Root mean square of a layer's states. Verifiers lie between 0.01 (embeddings) and some hundreds (last layers); what
# lies outside is memory that nothing was written to, or weights that were not loaded.
MIN_RMS, MAX_RMS = 1e-5, 1e6
FULL = (errno.ENOSPC, errno.EDQUOT)
FAULT_TRIES, FAULT_PAUSE_SECONDS = 20, 0.25

_INDEX = re.compile(r"data_(\d+)\.pt$")


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
        return [_id_fault(token_ids, expected_ids)]
    if list(states.shape) != shape:
        return [f"states are {list(states.shape)}, expected {shape} (tokens, layers, hidden size)"]
    # One reduction a slot in float32 keeps memory at one slot; a NaN or an infinity survives the sum of squares.
    norms = torch.stack([states[:, slot].float().pow(2).sum(dim=-1) for slot in range(num_slots)], dim=1)
    if not torch.isfinite(norms).all():
        row, slot = (int(i) for i in (~torch.isfinite(norms)).nonzero()[0])
        return [f"a state that is not finite at token {row}, slot {slot}"]
    if bool((norms == 0).any()):
        row, slot = (int(i) for i in (norms == 0).nonzero()[0])
        return [f"a state of zeros at token {row}, slot {slot}"]
    sizes = (norms.mean(dim=0) / hidden_size).sqrt().tolist()
    faults = [
        f"slot {slot} has a root mean square of {size:.3g}, outside {MIN_RMS:g} to {MAX_RMS:g}"
        for slot, size in enumerate(sizes)
        if not MIN_RMS <= size <= MAX_RMS
    ]
    alike = [(a, b) for b in range(num_slots) for a in range(b) if torch.equal(norms[:, a], norms[:, b])]
    twice = [(a, b) for a, b in alike if torch.equal(states[:, a], states[:, b])]
    return faults + [f"slots {a} and {b} hold the same states, so a layer is there twice" for a, b in twice]


def _id_fault(token_ids: Tensor, expected_ids: Tensor) -> str:
    if len(token_ids) != len(expected_ids):
        return f"the engine computed {len(token_ids)} ids, not the {len(expected_ids)} of this sample"
    row = int((token_ids != expected_ids).nonzero()[0])
    return f"the engine computed id {int(token_ids[row])} at token {row}, this sample has {int(expected_ids[row])}"


# ---- the ledger ------------------------------------------------------------------------------------------------------


def ledger_path(out_dir: Path, shard: tuple[int, int] = (1, 1)) -> Path:
    part, parts = shard
    return out_dir / (LEDGER_NAME if parts == 1 else f"ledger.{part}-of-{parts}.jsonl")


def faults_path(ledger: Path) -> Path:
    """`.faults.jsonl`, or `.faults.2-of-8.jsonl`: one for each ledger, so that hosts don't stop each other."""
    return ledger.with_name("." + ledger.name.replace("ledger", "faults"))


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


# ---- writing in the worker -------------------------------------------------------------------------------------------


class StatesWriter:
    """Writes `data_N.pt` files into one directory, each checked first, then one ledger line. Safe in threads.

    The loss mask and the ids that the engine must have computed come from samples.parquet itself. A fault becomes a
    line of `.faults.jsonl`, which the stage raises; after the first one nothing more is written.

    Args:
        layer_ids: what the engine returns, in its order; the stage asked for them ascending, the last layer at the end.
        hidden_size: of the verifier's configuration.
        dtype: storage, `bfloat16` or `float8_e4m3fn`.
    """

    def __init__(
        self, samples_path: Path, ledger_path: Path, *, layer_ids: Sequence[int], hidden_size: int, dtype: str
    ) -> None:
        self._samples_path, self._ledger_path = samples_path, ledger_path
        self._layer_ids, self._hidden_size, self._dtype = list(layer_ids), hidden_size, dtype
        self._lock = threading.Lock()
        self._has_failed = False
        self._samples: Samples | None = None
        self._ledger: Ledger | None = None

    def write(self, path: Path, states: Tensor, token_ids: Tensor) -> None:
        """Writes one sample, or reports why not.

        Args:
            path: .../data_N.pt. states: [T, A + 1, D] as the engine returns them. token_ids: [T], what it computed.

        Raises: anything that is neither a full disk, a failed write nor a wrong state, after it was reported.
        """
        if self._has_failed:
            return
        try:
            entry, content = self._encode(path, states, token_ids)
            write_whole(path, content)
            with self._lock:
                self._open_ledger().add(entry)
        except OSError as error:
            self._report(path, "disk_full" if error.errno in FULL else "write", str(error))
        except _FaultError as error:
            self._report(path, "states", str(error))
        except Exception as error:
            self._report(path, "bug", repr(error))
            raise

    def _encode(self, path: Path, states: Tensor, token_ids: Tensor) -> tuple[LedgerEntry, bytes]:
        found = _INDEX.search(path.name)
        if found is None:
            raise _FaultError(f"{path.name} is not the name of a sample's file")
        index = int(found[1])
        with self._lock:
            samples = self._open_samples()
            if index >= len(samples):
                raise _FaultError(f"there are only {len(samples)} samples in {self._samples_path}")
            sample = samples[index]
        if self._layer_ids != sorted(set(self._layer_ids)):
            raise _FaultError(f"the engine returns layers {self._layer_ids}, which is not their order in the verifier")
        expected = torch.from_numpy(sample.input_ids.astype("int64"))
        faults = find_faults(
            states,
            token_ids.long(),
            expected_ids=expected,
            num_slots=len(self._layer_ids),
            hidden_size=self._hidden_size,
        )
        if faults:
            raise _FaultError("; ".join(faults))
        slots = [states[:, slot].contiguous() for slot in range(states.shape[1])]
        content = encode(expected, torch.from_numpy(sample.loss_mask.copy()), slots, self._dtype)
        digest = hashlib.sha256(content).hexdigest()
        return LedgerEntry(index, sample.sample_id, len(expected), len(content), digest), content

    def _open_samples(self) -> Samples:
        if self._samples is None:
            self._samples = Samples(self._samples_path, manifest=None)  # the stage has checked it
        return self._samples

    def _open_ledger(self) -> Ledger:
        if self._ledger is None:
            self._ledger = Ledger(self._ledger_path)
        return self._ledger

    def _report(self, path: Path, kind: str, what: str) -> None:
        self._has_failed = True
        line = json.dumps({"file": path.name, "kind": kind, "what": what}) + "\n"
        with self._lock:
            append_fault(faults_path(self._ledger_path), line)


class _FaultError(Exception):
    """The states of one sample are not what they should be."""


def write_whole(path: Path, content: bytes) -> None:
    """Writes to `.data_N.pt.tmp`, fsyncs, renames. On an error, such as a full disk, nothing is left."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def append_fault(path: Path, line: str) -> None:
    """Appends a line, whole or not at all. On a full disk it waits for the space that other partial files give back.

    Raises: OSError when there is no room for it after some seconds.
    """
    for attempt in range(1, FAULT_TRIES + 1):
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab") as file:
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
            return
        except OSError as error:
            if path.exists():
                os.truncate(path, size)
            if error.errno not in FULL or attempt == FAULT_TRIES:
                raise
            time.sleep(FAULT_PAUSE_SECONDS)


def read_faults(path: Path) -> list[dict[str, str]]:
    """What a worker could not write: `file`, `kind` (disk_full, write, states, bug) and `what`.

    A line that is still being written, or was torn by a kill, is left out.
    """
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


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
