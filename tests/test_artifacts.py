"""samples/ and hidden_states/: their layout on disk, and what is refused. Field faults, parts E and F."""

import hashlib

import datasets
import numpy as np
import pytest
import torch

from common import hidden_states as hs
from common.errors import PipelineError
from common.samples import FILE_NAME, Samples, sample_id_of, write_samples
from tests.conftest import make_sample


def states_of(tokens: int, slots: int = 4, hidden: int = 8) -> torch.Tensor:
    """[T, A + 1, D], a function of token, slot and position, so that any mix-up shows."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, slots, hidden, generator=generator).to(torch.bfloat16)


def test_samples_are_readable_with_datasets_alone(tmp_path):
    made = [make_sample(20 + i, 5, seed=i) for i in range(3)]
    counts = write_samples(tmp_path, made)
    table = datasets.Dataset.from_parquet(str(tmp_path / FILE_NAME), cache_dir=str(tmp_path / "cache"))
    assert table.column_names == [
        *("sample_id", "conversation_id", "input_ids", "loss_mask"),
        *("num_tokens", "num_supervised", "split", "source"),
    ]
    assert table[1]["input_ids"] == made[1].input_ids.tolist()
    assert table[1]["loss_mask"] == made[1].loss_mask.tolist()
    assert counts == {"samples": 3, "tokens": 63, "supervised_tokens": 15, "train_samples": 3, "val_samples": 0}


def test_a_sample_is_found_across_row_groups(tmp_path):
    made = [make_sample(4 + i % 7, 2, seed=i) for i in range(1100)]
    write_samples(tmp_path, made)
    samples = Samples(tmp_path / FILE_NAME, None)
    for index in (0, 511, 512, 1099):
        assert samples[index].sample_id == made[index].sample_id == samples.sample_ids[index]
    assert samples.num_tokens.tolist() == [s.num_tokens for s in made]


def test_the_same_samples_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_samples(tmp_path / name, [make_sample(9, 3)])
    assert (tmp_path / "a" / FILE_NAME).read_bytes() == (tmp_path / "b" / FILE_NAME).read_bytes()


def test_a_sample_id_sees_ids_and_mask():
    ids, mask = np.arange(5, dtype=np.int32), np.array([0, 0, 1, 1, 1], dtype=bool)
    assert sample_id_of(ids, mask) == sample_id_of(ids.copy(), mask.copy())
    assert sample_id_of(ids + 1, mask) != sample_id_of(ids, mask) != sample_id_of(ids, ~mask)


def write(path, states, sample, dtype="bfloat16"):
    slots = [states[:, i].contiguous() for i in range(states.shape[1])]
    path.write_bytes(hs.encode(torch.from_numpy(sample.input_ids), torch.from_numpy(sample.loss_mask), slots, dtype))


def test_a_data_file_has_the_layout_that_speculators_reads(tmp_path):
    sample, states = make_sample(6, 2), states_of(6)
    write(tmp_path / "data_0.pt", states, sample)
    record = torch.load(tmp_path / "data_0.pt", weights_only=True)
    assert list(record) == ["input_ids", "loss_mask", "hidden_states"]
    assert (record["input_ids"].dtype, record["loss_mask"].dtype) == (torch.int64, torch.bool)
    assert [tuple(t.shape) for t in record["hidden_states"]] == [(6, 8)] * 4
    loaded = hs.load_hidden_states(tmp_path / "data_0.pt")
    assert torch.equal(loaded.last, states[:, 3])
    assert torch.equal(torch.stack(loaded.aux, 1), states[:, :3])


def test_fp8_halves_the_bytes_and_keeps_states_within_its_rounding(tmp_path):
    sample, states = make_sample(64, 2), states_of(64, hidden=256)
    for dtype in ("bfloat16", "float8_e4m3fn"):
        write(tmp_path / f"{dtype}.pt", states, sample, dtype)
    big, small = ((tmp_path / f"{d}.pt").stat().st_size for d in ("bfloat16", "float8_e4m3fn"))
    assert small < 0.56 * big
    loaded = hs.load_hidden_states(tmp_path / "float8_e4m3fn.pt")
    error = (loaded.last.float() - states[:, 3].float()).norm() / states[:, 3].float().norm()
    assert error < 0.04  # e4m3 has 3 mantissa bits: half a step is 1/16 of a value, 0.03 on average
    assert loaded.last.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_the_estimate_of_bytes_is_within_two_percent(tmp_path, dtype):
    write(tmp_path / "data_0.pt", states_of(500, hidden=576), make_sample(500, 2), dtype)
    size = (tmp_path / "data_0.pt").stat().st_size
    assert abs(size / (500 * hs.bytes_per_token(4, 576, dtype)) - 1) < 0.02


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "data_3.pt").write_bytes(b"PK half a file")
    with pytest.raises(PipelineError, match=r"data_3\.pt: can't be read"):
        hs.load_hidden_states(tmp_path / "data_3.pt")


def faults(states, ids=None, expected=None):
    expected = torch.arange(states.shape[0]) if expected is None else expected
    ids = expected if ids is None else ids
    return hs.find_faults(states, ids, expected_ids=expected, num_slots=4, hidden_size=8)


def test_right_states_have_no_fault():
    assert faults(states_of(5)) == []


def test_dropped_prefix_rows_are_a_fault():  # E2
    assert "expected [5, 4, 8]" in faults(states_of(3), expected=torch.arange(5))[0]


@pytest.mark.parametrize("rows", [4, 6])
def test_a_row_too_few_or_too_many_is_a_fault(rows):
    assert faults(states_of(rows), expected=torch.arange(5))


def test_states_of_another_request_are_a_fault():  # E1
    assert faults(states_of(5), ids=torch.arange(5) + 1) == ["the engine computed id 1 at token 0, this sample has 0"]


def test_one_nan_is_named_with_row_and_slot():  # E10
    states = states_of(30)
    states[17, 2, 3] = float("nan")
    assert faults(states) == ["a state that is not finite at token 17, slot 2"]


def test_a_row_of_zeros_is_named():
    states = states_of(5)
    states[4, 1] = 0
    assert faults(states) == ["a state of zeros at token 4, slot 1"]


def test_a_slot_too_few_is_a_fault():  # F1
    assert "expected [5, 4, 8]" in faults(states_of(5, slots=3))[0]


def test_swapped_axes_are_a_fault():
    assert "expected [5, 4, 8]" in faults(states_of(5).transpose(0, 1), expected=torch.arange(5))[0]


def test_a_layer_that_is_there_twice_is_a_fault():
    states = states_of(5)
    states[:, 2] = states[:, 1]
    assert faults(states) == ["slots 1 and 2 hold the same states, so a layer is there twice"]


def entry(index: int, **changes) -> hs.LedgerEntry:
    return hs.LedgerEntry(**({"index": index, "sample_id": "a", "tokens": 3, "bytes": 4, "sha256": "x"} | changes))


def test_a_ledger_survives_a_torn_last_line(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = hs.Ledger(path)
    ledger.add(entry(0))
    ledger.close()
    with path.open("a") as file:
        file.write('{"index": 1, "sam')
    assert list(hs.read_ledger(path)) == [0]
    again = hs.Ledger(path)
    again.add(entry(2))
    again.close()
    assert list(hs.read_ledger(path)) == [0, 2]


def test_a_ledger_that_is_broken_in_the_middle_is_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text("nonsense\n{}\n")
    with pytest.raises(PipelineError, match="line 1 is not an entry"):
        hs.read_ledger(path)


def test_a_rewritten_ledger_does_not_tell_how_often_a_run_died(tmp_path):
    for name, order in (("a", [0, 1, 2]), ("b", [2, 0, 1])):
        hs.write_sorted_ledger(tmp_path / name, [entry(i) for i in order])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_file_is_intact_only_with_its_size_and_checksum(tmp_path):
    path = hs.data_path(tmp_path, 0)
    path.write_bytes(b"four")
    digest = hashlib.sha256(b"four").hexdigest()
    assert not hs.is_intact(tmp_path, entry(0, bytes=5), deep=False)
    assert not hs.is_intact(tmp_path, entry(0), deep=True)
    assert hs.is_intact(tmp_path, entry(0, sha256=digest), deep=True)
    assert hs.is_intact(tmp_path, entry(0), deep=False)
    assert not hs.is_intact(tmp_path, entry(7), deep=False)
