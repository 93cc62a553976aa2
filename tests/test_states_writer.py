"""What runs in vLLM's worker, without vLLM: states of a made-up engine with one fault at a time. Field faults E, F, H.

The good path is tested on the real engine (test_extract_vllm.py, test_pipeline.py).
"""

import errno
import json
import os
import re
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from common import hidden_states as hs
from common.samples import FILE_NAME, Samples, write_samples
from tests.conftest import make_sample, script

HIDDEN, LAYERS = 16, [2, 4, 6, 8]
LENGTHS = (5, 9, 7)


@pytest.fixture
def out_dir(tmp_path):
    write_samples(tmp_path / "samples", [make_sample(n, 2, seed=n) for n in LENGTHS])
    (tmp_path / "hidden_states").mkdir()
    return tmp_path / "hidden_states"


def writer_of(out_dir, **changes):
    settings = {"layer_ids": LAYERS, "hidden_size": HIDDEN, "dtype": "bfloat16"} | changes
    return hs.StatesWriter(out_dir.parent / "samples" / FILE_NAME, hs.ledger_path(out_dir), **settings)


def sample_of(out_dir, index):
    return Samples(out_dir.parent / "samples" / FILE_NAME, None)[index]


def ids_of(out_dir, index):
    return torch.tensor(sample_of(out_dir, index).input_ids.tolist())


def states_of(ids, hidden=HIDDEN):
    """What a working engine returns, [T, A + 1, D]: a function of layer, token and position."""
    rows = [
        torch.randn(len(LAYERS), hidden, generator=torch.Generator().manual_seed(int(token) * 1000 + position))
        for position, token in enumerate(ids)
    ]
    return torch.stack(rows).to(torch.bfloat16)


def write(out_dir, index, *, states=None, ids=None, **changes):
    sample = sample_of(out_dir, index)
    states = states_of(sample.input_ids) if states is None else states
    ids = ids_of(out_dir, index) if ids is None else ids
    writer_of(out_dir, **changes).write(hs.data_path(out_dir, index), states, ids)


def faults(out_dir):
    return hs.read_faults(hs.faults_path(hs.ledger_path(out_dir)))


def names(out_dir):
    return sorted(path.name for path in out_dir.iterdir())


def test_right_states_become_a_file_and_a_ledger_line(out_dir):
    write(out_dir, 1)
    sample, found = sample_of(out_dir, 1), hs.load_hidden_states(hs.data_path(out_dir, 1))
    expected = states_of(sample.input_ids)
    assert torch.equal(torch.stack([*found.aux, found.last], dim=1), expected)
    assert found.input_ids.tolist() == sample.input_ids.tolist()
    assert found.loss_mask.tolist() == sample.loss_mask.tolist()
    (entry,) = hs.read_ledger(hs.ledger_path(out_dir)).values()
    assert (entry.index, entry.sample_id, entry.tokens) == (1, sample.sample_id, 9)
    assert hs.is_intact(out_dir, entry, deep=True)
    assert names(out_dir) == ["data_1.pt", "ledger.jsonl"]


def zeroed(states, row):
    states = states.clone()
    states[row] = 0
    return states


def not_a_number(states):
    states = states.clone()
    states[3, 2, 5] = float("nan")
    return states


def infinite(states):
    states = states.clone()
    states[0, 1, 0] = float("inf")
    return states


# Sample 0 holds 5 tokens, sample 1 holds 9; every one of these reached training somewhere without a word.
SWITCHES = {
    "first rows missing": (lambda s: s[2:], r"states are \[3, 4, 16\], expected \[5, 4, 16\]"),
    "last row missing": (lambda s: s[:-1], r"states are \[4, 4, 16\], expected \[5, 4, 16\]"),
    "one row more": (lambda s: torch.cat([s, s[-1:]]), r"states are \[6, 4, 16\]"),
    "a row never written": (lambda s: zeroed(s, 4), "a state of zeros at token 4, slot 0"),
    "NaN": (not_a_number, "a state that is not finite at token 3, slot 2"),
    "infinity": (infinite, "a state that is not finite at token 0, slot 1"),
    "a layer fewer": (lambda s: s[:, :3], r"states are \[5, 3, 16\]"),
    "a layer twice": (lambda s: s[:, [0, 0, 2, 3]], "slots 0 and 1 hold the same states"),
    "a layer twice, apart": (lambda s: s[:, [0, 1, 0, 3]], "slots 0 and 2 hold the same states"),
    "axes swapped": (lambda s: s.transpose(0, 1), r"states are \[4, 5, 16\]"),
    "narrower than the verifier": (lambda s: s[..., :8], r"states are \[5, 4, 8\], expected \[5, 4, 16\]"),
    "wider than the verifier": (lambda s: torch.cat([s, s], dim=-1), r"states are \[5, 4, 32\]"),
    "memory nothing was written to": (lambda s: s * 1e-7, r"slot 0 has a root mean square of .*e-08, outside 1e-05"),
    "a layer that exploded": (lambda s: s * torch.tensor([1, 1, 1e8, 1])[:, None], r"slot 2 has a root mean square"),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_fault_of_the_engine_is_named_and_nothing_is_written(out_dir, switch):
    change, words = SWITCHES[switch]
    write(out_dir, 0, states=change(states_of(sample_of(out_dir, 0).input_ids)))
    (fault,) = faults(out_dir)
    assert (fault["file"], fault["kind"]) == ("data_0.pt", "states")
    assert re.search(words, fault["what"]), fault["what"]
    assert names(out_dir) == [".faults.jsonl"]


def test_the_states_of_another_request_are_refused(out_dir):  # E1
    other = ids_of(out_dir, 1)
    write(out_dir, 0, states=states_of(other), ids=other)
    assert "the engine computed 9 ids, not the 5 of this sample" in faults(out_dir)[0]["what"]


def test_ids_of_the_same_number_that_differ_are_refused(out_dir):
    ids = ids_of(out_dir, 0)
    ids[2] += 1
    write(out_dir, 0, ids=ids)
    was = int(sample_of(out_dir, 0).input_ids[2])
    assert f"id {was + 1} at token 2, this sample has {was}" in faults(out_dir)[0]["what"]
    assert names(out_dir) == [".faults.jsonl"]


def test_layers_out_of_their_order_are_refused(out_dir):
    write(out_dir, 0, layer_ids=[4, 2, 6, 8])
    assert "the engine returns layers [4, 2, 6, 8], which is not their order" in faults(out_dir)[0]["what"]


def test_a_path_that_is_no_samples_is_refused(out_dir):
    writer_of(out_dir).write(out_dir / "states.pt", torch.zeros(1), torch.zeros(1))
    write_beyond = hs.data_path(out_dir, 3)
    writer_of(out_dir).write(write_beyond, torch.zeros(1), torch.zeros(1))
    assert [f["what"].split(" in ")[0] for f in faults(out_dir)] == [
        "states.pt is not the name of a sample's file",
        "there are only 3 samples",
    ]


def test_after_a_fault_nothing_more_is_written(out_dir):
    writer, first, second = writer_of(out_dir), ids_of(out_dir, 0), ids_of(out_dir, 1)
    writer.write(hs.data_path(out_dir, 0), torch.zeros(5, 4, HIDDEN), first)
    writer.write(hs.data_path(out_dir, 1), states_of(second), second)
    assert names(out_dir) == [".faults.jsonl"]


def test_threads_write_each_file_once(out_dir):
    writer = writer_of(out_dir)
    rows = [ids_of(out_dir, i) for i in range(3)]
    threads = [
        threading.Thread(target=writer.write, args=(hs.data_path(out_dir, i), states_of(ids), ids))
        for i, ids in enumerate(rows)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = hs.read_ledger(hs.ledger_path(out_dir))
    assert sorted(entries) == [0, 1, 2] and faults(out_dir) == []
    assert all(hs.is_intact(out_dir, entry, deep=True) for entry in entries.values())


def test_a_bug_is_reported_and_raised(out_dir, monkeypatch):
    monkeypatch.setattr(hs, "encode", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(out_dir, 0)
    assert faults(out_dir)[0]["kind"] == "bug"


# ---- fault lines ----


def test_shards_have_fault_files_of_their_own(out_dir):
    paths = {hs.faults_path(hs.ledger_path(out_dir, shard)).name for shard in ((1, 1), (1, 2), (2, 2))}
    assert paths == {".faults.jsonl", ".faults.1-of-2.jsonl", ".faults.2-of-2.jsonl"}


def test_a_torn_fault_line_is_left_out(out_dir):
    path = out_dir / ".faults.jsonl"
    path.write_text(json.dumps({"file": "data_1.pt", "kind": "write", "what": "x"}) + '\n{"file": "data_2.pt", "ki')
    assert [fault["file"] for fault in hs.read_faults(path)] == ["data_1.pt"]
    path.write_text('{"file": "da')
    assert hs.read_faults(path) == []
    (out_dir / "ledger.jsonl").touch()
    assert list(script("02_extract_hidden_states").Watch(out_dir, out_dir / "ledger.jsonl", 0).wait_until(0)) == []


def test_a_fault_line_waits_for_room_on_a_full_disk(out_dir, monkeypatch):
    path, pauses, real = out_dir / ".faults.jsonl", [], os.fsync
    path.write_text("{}\n")

    def full_twice(descriptor):
        if len(pauses) < 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(hs.os, "fsync", full_twice)
    monkeypatch.setattr(hs.time, "sleep", pauses.append)
    hs.append_fault(path, '{"a": 1}\n')
    assert path.read_text() == '{}\n{"a": 1}\n'  # whole, and once
    assert len(pauses) == 2


def test_a_fault_line_without_room_for_good_is_an_error_and_leaves_no_half(out_dir, monkeypatch):
    path, pauses = out_dir / ".faults.jsonl", []

    def full(_descriptor):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(hs.os, "fsync", full)
    monkeypatch.setattr(hs.time, "sleep", pauses.append)
    with pytest.raises(OSError, match="quota"):
        hs.append_fault(path, '{"a": 1}\n')
    assert path.read_bytes() == b"" and len(pauses) == hs.FAULT_TRIES - 1


# ---- a disk that fills ----


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 40 MB."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(where)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs is refused here: {mounted.stderr.decode().strip()}")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_a_disk_that_fills_leaves_whole_files_and_a_fault_line(small_disk):  # H9
    hidden, tokens = 4096, 256  # 8.4 MB a sample: the fifth doesn't fit
    write_samples(small_disk / "samples", [make_sample(tokens, 2, seed=i) for i in range(6)])
    out_dir = small_disk / "hidden_states"
    out_dir.mkdir()
    writer = writer_of(out_dir, hidden_size=hidden)
    for index in range(6):
        ids = ids_of(out_dir, index)
        writer.write(hs.data_path(out_dir, index), states_of(ids, hidden), ids)
    (fault,) = faults(out_dir)
    assert (fault["file"], fault["kind"]) == ("data_4.pt", "disk_full")
    assert names(out_dir) == [".faults.jsonl", *(f"data_{i}.pt" for i in range(4)), "ledger.jsonl"]
    entries = hs.read_ledger(hs.ledger_path(out_dir))
    assert sorted(entries) == [0, 1, 2, 3]
    assert all(hs.is_intact(out_dir, entry, deep=True) for entry in entries.values())


def test_the_last_byte_of_a_disk_still_holds_a_fault_line(small_disk):
    """Another process takes all that is left while a sample is written, and gives it back a little later."""
    write_samples(small_disk / "samples", [make_sample(256, 2, seed=0)])
    out_dir = small_disk / "hidden_states"
    out_dir.mkdir()
    hog = small_disk / "hog"
    with hog.open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            assert file.write(b"x" * 4096) == 4096
    ids = ids_of(out_dir, 0)
    released = threading.Timer(0.4, Path.unlink, [hog])
    released.start()
    writer_of(out_dir, hidden_size=4096).write(hs.data_path(out_dir, 0), states_of(ids, 4096), ids)
    released.join()
    assert [fault["kind"] for fault in faults(out_dir)] == ["disk_full"]
    assert names(out_dir) == [".faults.jsonl"]
