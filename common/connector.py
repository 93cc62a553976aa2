"""The part that runs inside vLLM's worker: hands each finished request's states to the artifact's writer, once.

A subclass of vLLM's hidden-states connector, loaded by module path. Only tensor-parallel rank 0 writes. What it
changes (vLLM 0.32.0): the stock class writes safetensors under the request's name, needs CUDA streams and pinned
memory, and reports a failed write to its own log only. What is written, checked and reported is
`common.hidden_states.StatesWriter`'s business.
"""

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

from common.hidden_states import StatesWriter


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
        asked = vllm_config.speculative_config.draft_model_config.hf_config
        self._writer = StatesWriter(
            Path(settings("samples_path", "")),
            Path(settings("ledger_path", "")),
            layer_ids=asked.eagle_aux_hidden_state_layer_ids,
            hidden_size=vllm_config.model_config.get_hidden_size(),
            dtype=settings("storage_dtype", "bfloat16"),
        )

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
        self._writer.write(Path(filename), tensors["hidden_states"], tensors["token_ids"])
