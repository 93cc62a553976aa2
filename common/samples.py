"""The `samples/` artifact: one row a training sample, readable with `datasets` alone.

    samples/
        samples.parquet   sample_id, conversation_id, input_ids, loss_mask, num_tokens, num_supervised, split, source
        manifest.json     written last

`sample_id` is a hash of the ids and the mask, so an edited, re-templated or re-cut sample is another sample. Row N is
sample N: `hidden_states/data_N.pt` holds its states.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common.errors import PipelineError, Problem
from common.files import replacing
from common.manifest import Manifest, read_manifest

DIR_NAME = "samples"
FILE_NAME = "samples.parquet"
SPLITS = ("train", "val")
ROWS_AT_A_TIME = 512  # a row group: at most a few MB, so that a million rows need no memory
_COLUMNS = {
    "sample_id": pa.string(),
    "conversation_id": pa.string(),
    # Said to hold no nulls, ids and mask are read 1.5 times as fast.
    "input_ids": pa.list_(pa.field("element", pa.int32(), nullable=False)),
    "loss_mask": pa.list_(pa.field("element", pa.bool_(), nullable=False)),
    "num_tokens": pa.int32(),
    "num_supervised": pa.int32(),
    "split": pa.string(),
    "source": pa.string(),
}
SCHEMA = pa.schema([pa.field(name, kind, nullable=False) for name, kind in _COLUMNS.items()])


@dataclass(frozen=True)
class Sample:
    """input_ids int32 [T] and loss_mask bool [T], true where the assistant wrote the token."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    conversation_id: str
    split: str
    source: str

    def __post_init__(self) -> None:
        assert self.input_ids.dtype == np.int32 and self.loss_mask.dtype == np.bool_, "int32 ids and a bool mask"
        assert self.input_ids.shape == self.loss_mask.shape and self.input_ids.ndim == 1, "one mask entry a token"
        assert self.split in SPLITS, self.split

    @cached_property
    def sample_id(self) -> str:
        return sample_id_of(self.input_ids, self.loss_mask)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_supervised(self) -> int:
        return int(self.loss_mask.sum())


def sample_id_of(input_ids: np.ndarray, loss_mask: np.ndarray) -> str:
    """32 hex digits over the ids (little-endian int32) and the mask (one byte a token)."""
    digest = hashlib.sha256(np.ascontiguousarray(input_ids, dtype="<i4").tobytes())
    digest.update(np.ascontiguousarray(loss_mask, dtype=np.uint8).tobytes())
    return digest.hexdigest()[:32]


def write_samples(out_dir: Path, samples: Iterable[Sample]) -> dict[str, int]:
    """Writes samples.parquet as they come, by rename at the end. Returns the counts for the manifest."""
    counts = dict.fromkeys(("samples", "tokens", "supervised_tokens", "train_samples", "val_samples"), 0)
    # Ids are written plain: stage 3 reads them 1.7 times as fast as compressed, and 2 bytes a token more are nothing
    # beside the thousands that its states take.
    plain = {"compression": "none", "use_dictionary": ["split", "source"]}
    with replacing(out_dir / FILE_NAME) as temporary, pq.ParquetWriter(temporary, SCHEMA, **plain) as writer:
        for rows in _batched(samples):
            writer.write_table(pa.Table.from_pylist([_row(sample) for sample in rows], schema=SCHEMA))
            for sample in rows:
                counts["samples"] += 1
                counts["tokens"] += sample.num_tokens
                counts["supervised_tokens"] += sample.num_supervised
                counts[f"{sample.split}_samples"] += 1
    return counts


def _batched(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    rows: list[Sample] = []
    for sample in samples:
        rows.append(sample)
        if len(rows) == ROWS_AT_A_TIME:
            yield rows
            rows = []
    if rows:
        yield rows


def _row(sample: Sample) -> dict[str, object]:
    return {
        "sample_id": sample.sample_id,
        "conversation_id": sample.conversation_id,
        "input_ids": sample.input_ids,
        "loss_mask": sample.loss_mask,
        "num_tokens": sample.num_tokens,
        "num_supervised": sample.num_supervised,
        "split": sample.split,
        "source": sample.source,
    }


class Samples:
    """A complete `samples/`, opened. The small columns are in memory; ids and masks are read when asked for."""

    def __init__(self, path: Path, manifest: Manifest | None) -> None:
        self.path = path
        self.manifest = manifest
        self._file = pq.ParquetFile(path, memory_map=True)
        small = self._file.read(["sample_id", "num_tokens", "num_supervised", "split", "source"])
        self.sample_ids: list[str] = small["sample_id"].to_pylist()
        self.num_tokens: np.ndarray = small["num_tokens"].to_numpy()
        self.num_supervised: np.ndarray = small["num_supervised"].to_numpy()
        self.splits: list[str] = small["split"].to_pylist()
        self.sources: list[str] = small["source"].to_pylist()
        self._group_starts = np.cumsum([0] + [self._file.metadata.row_group(g).num_rows for g in self._groups])
        self._held: tuple[int, pa.Table] | None = None

    @property
    def _groups(self) -> range:
        return range(self._file.num_row_groups)

    def __len__(self) -> int:
        return len(self.sample_ids)

    def indices_of(self, split: str) -> list[int]:
        return [i for i, name in enumerate(self.splits) if name == split]

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`; neighbours cost nothing more, since a row group is held."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        group = int(np.searchsorted(self._group_starts, index, side="right")) - 1
        if self._held is None or self._held[0] != group:
            self._held = (group, self._file.read_row_group(group))
        return _sample(self._held[1], index - int(self._group_starts[group]))

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def iter_batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Record batches of these columns, in order, a row group at a time."""
        return self._file.iter_batches(batch_size=ROWS_AT_A_TIME, columns=list(columns))


def _types(schema: pa.Schema) -> list[tuple[str, pa.DataType]]:
    """Names and types, whether or not nulls are allowed: no reader here makes a difference."""
    kinds = [(f.name, f.type) for f in schema]
    return [(name, pa.list_(kind.value_type) if pa.types.is_list(kind) else kind) for name, kind in kinds]


def _sample(table: pa.Table, row: int) -> Sample:
    return Sample(
        input_ids=table["input_ids"][row].values.to_numpy(),
        loss_mask=table["loss_mask"][row].values.to_numpy(zero_copy_only=False),
        conversation_id=table["conversation_id"][row].as_py(),
        split=table["split"][row].as_py(),
        source=table["source"][row].as_py(),
    )


def open_samples(run_dir: Path) -> Samples:
    """Opens a complete `samples/` and checks its columns.

    Raises: PipelineError when it has no manifest, the file is unreadable or has other columns, or holds no row.
    """
    out_dir = run_dir / DIR_NAME
    manifest = read_manifest(out_dir, "01_prepare_data")
    path = out_dir / FILE_NAME
    fix = "run 01_prepare_data.py --overwrite"
    try:
        found = pq.read_schema(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise PipelineError(Problem(str(path), f"can't be read: {error}", fix)) from None
    if _types(found) != _types(SCHEMA):
        what = f"has columns {', '.join(found.names)} of other names or types, expected {', '.join(SCHEMA.names)}"
        raise PipelineError(Problem(str(path), what, fix))
    samples = Samples(path, manifest)
    if not len(samples):
        raise PipelineError(Problem(str(path), "holds no sample", fix))
    return samples
