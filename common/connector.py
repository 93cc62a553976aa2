"""The part that runs inside vLLM's worker: writes each sample's `data_N.pt` once, checked, by rename.

A subclass of vLLM's hidden-states connector, loaded by module path. Only tensor-parallel rank 0 writes. What it
changes (vLLM 0.32.0): the stock class writes safetensors under the request's name, needs CUDA streams and pinned
memory, and reports a failed write to its own log only.

The worker opens samples.parquet itself: the loss mask comes from there, and the ids that the engine computed are
compared with the sample's own. Each finished file becomes a line of the ledger, each fault a line of `.faults.jsonl`.
"""

import errno
import json
import os
import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)

from common.files import fsync_path
from common.hidden_states import FAULTS_NAME, Ledger, LedgerEntry, encode, find_faults
from common.samples import Samples

_INDEX = re.compile(r"data_(\d+)\.pt$")


class _Done:
    """Stands for the copy event of the GPU path where the copy has already happened."""

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class DataFileConnector(ExampleHiddenStatesConnector):
    """Writes `data_N.pt` for the request that carries that path."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = self._kv_transfer_config.get_from_extra_config
        self._samples_path = Path(settings("samples_path", ""))
        self._ledger_path = Path(settings("ledger_path", ""))
        self._storage_dtype = settings("storage_dtype", "bfloat16")
        self._lock = threading.Lock()
        self._samples: Samples | None = None
        self._ledger: Ledger | None = None

    def _submit_async_write(self, pending: PendingSave) -> None:
        if self._kv_cache is None or self._kv_cache.device.type != "cpu":
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (torch.arange(self._block_size)[None] + blocks[:, None] * self._block_size).flatten()
        # Indexing copies, so the cache's blocks may be given to other requests at once.
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        tensors = {"hidden_states": states, "token_ids": pending.token_ids}
        event: Any = _Done()
        future = self._executor.submit(self._write_tensors, tensors, event, pending.filename, None)
        self._req_copy_events[pending.req_id] = event
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))

    def _write_tensors(self, tensors: dict[str, Tensor], event: Any, filename: str, _lock_fd: int | None) -> None:  # type: ignore[override]
        """Runs in a writer thread, once for each sample. States arrive as [T, A + 1, D]."""
        event.synchronize()
        path = Path(filename)
        try:
            entry, content = self._encode(path, tensors["hidden_states"], tensors["token_ids"])
            write_whole(path, content)
            with self._lock:
                self._open_ledger().add(entry)
        except OSError as error:
            kind = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "write"
            self._report(path, kind, str(error))
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
            sample = self._open_samples()[index]
        expected = torch.from_numpy(sample.input_ids.astype("int64"))
        faults = find_faults(
            states,
            token_ids.long(),
            expected_ids=expected,
            num_slots=self.num_hidden_states,
            hidden_size=states.shape[-1],
        )
        if faults:
            raise _FaultError("; ".join(faults))
        slots = [states[:, slot].contiguous() for slot in range(states.shape[1])]
        content = encode(expected, torch.from_numpy(sample.loss_mask.copy()), slots, self._storage_dtype)
        digest = _sha256(content)
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
        line = json.dumps({"file": path.name, "kind": kind, "what": what}) + "\n"
        with self._lock, (path.parent / FAULTS_NAME).open("a", encoding="utf-8") as file:
            file.write(line)


class _FaultError(Exception):
    """The states of one sample are not what they should be."""


def _sha256(content: bytes) -> str:
    import hashlib

    return hashlib.sha256(content).hexdigest()


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
