"""The vocabulary map: counting, choosing, the three files, importing, and stage 3 from its command line."""

import importlib
import pickle
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

from common import vocab_mapping as vm
from common.errors import PipelineError
from common.manifest import read_manifest, verify_outputs
from common.samples import open_samples
from tests import train_rig

stage = importlib.import_module("03_build_vocab_mapping")


def batches(*rows, size=2):
    """Record batches of (ids, mask, split, source) rows."""
    for start in range(0, len(rows), size):
        ids, masks, splits, sources = zip(*rows[start : start + size], strict=True)
        yield pa.record_batch(
            {
                "input_ids": pa.array(ids, pa.list_(pa.int32())),
                "loss_mask": pa.array(masks, pa.list_(pa.bool_())),
                "split": pa.array(splits),
                "source": pa.array(sources),
            }
        )


def random_rows(count=40, vocab=50, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        length = int(rng.integers(1, 30))
        yield (
            rng.integers(0, vocab, length).tolist(),
            (rng.random(length) < 0.6).tolist(),
            str(rng.choice(["train", "train", "val"])),
            str(rng.choice(["a", "b"])),
        )


# ---- counting


def test_counts_are_those_of_a_slow_loop_by_split_and_source():
    rows = list(random_rows())
    slow = {}
    for ids, mask, split, source in rows:
        for token, supervised in zip(ids, mask, strict=True):
            if supervised:
                slow.setdefault((split, source), Counter())[token] += 1
    found = vm.count_tokens(batches(*rows, size=7), 50)
    assert set(found) == set(slow)
    for key, counter in slow.items():
        assert found[key].tolist() == [counter[i] for i in range(50)]


def test_batches_of_one_group_and_of_many_count_alike():
    rows = list(random_rows())
    one, many = vm.count_tokens(batches(*rows, size=1), 50), vm.count_tokens(batches(*rows, size=40), 50)
    assert all((one[key] == many[key]).all() for key in one) and one.keys() == many.keys()


def test_frequencies_leave_validation_out_of_the_training_counts():
    counts = vm.count_tokens(batches(([7, 7], [True, True], "train", "a"), ([7, 8], [True, True], "val", "a")), 10)
    assert vm.frequencies(counts, "train")[7] == 2 and vm.frequencies(counts, "train")[8] == 0
    assert vm.frequencies(counts, "val").tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1, 0]


def test_an_id_outside_the_verifiers_vocabulary_is_refused_by_number():
    with pytest.raises(PipelineError, match="token id 12 lies outside the verifier's vocabulary of 10"):
        vm.count_tokens(batches(([1, 12], [True, True], "train", "a")), 10)


# ---- choosing


def worked_map():
    """Frequencies 5 4 4 0 1 0 for ids 0..5; K = 4, id 5 forced: 5, then 0, 1, 2 (1 and 2 tie, lowest first)."""
    return vm.build_vocab_mapping(np.array([5, 4, 4, 0, 1, 0]), 4, forced=[5])


def test_the_map_is_worked_out_by_hand():
    mapping = worked_map()
    assert mapping.t2d.tolist() == [True, True, True, False, False, True]
    assert mapping.d2t.tolist() == [0, 0, 0, 2]  # ids 0 1 2 5 minus 0 1 2 3
    assert mapping.target_ids.tolist() == [0, 1, 2, 5]


def test_equal_counts_go_to_the_lowest_id():
    assert vm.build_vocab_mapping(np.array([1, 3, 3, 3]), 2).target_ids.tolist() == [1, 2]


def test_forced_tokens_are_in_whatever_their_count():
    freq = np.arange(100)
    assert set(vm.build_vocab_mapping(freq, 10, forced=[0, 3, 99]).target_ids.tolist()) >= {0, 3, 99}


@pytest.mark.parametrize("size", [1, 17, 100, 199, 200])
def test_without_forced_tokens_the_map_is_speculators(size):
    rng = np.random.default_rng(size)
    freq = rng.integers(0, 4, 200) * (rng.random(200) < 0.5)  # many ties, half of the ids unseen
    d2t, t2d = build_vocab_mappings_from_distribution({i: int(c) for i, c in enumerate(freq) if c}, size, 200)
    mapping = vm.build_vocab_mapping(freq, size)
    assert torch.equal(mapping.d2t, d2t) and torch.equal(mapping.t2d, t2d)


def test_a_small_corpus_is_filled_with_the_lowest_unused_ids_and_counted():
    """Field fault I1: 40 distinct tokens, draft vocabulary 64."""
    freq = np.zeros(500, np.int64)
    freq[100:140] = 3
    mapping = vm.build_vocab_mapping(freq, 64, forced=[499])
    assert mapping.target_ids.tolist() == [*range(23), *range(100, 140), 499]
    assert mapping.t2d.sum() == 64 and len(mapping.d2t) == 64
    assert vm.count_filled(mapping, [499]) == 23


def test_the_whole_vocabulary_is_a_map_of_zero_offsets():
    mapping = vm.build_vocab_mapping(np.array([0, 1, 0]), 3)
    assert mapping.t2d.all() and not mapping.d2t.any()


@pytest.mark.parametrize(
    ("size", "forced", "words"),
    [
        (11, [], "vocab.size: 11 is more than the verifier's vocabulary of 10"),
        (2, [1, 2, 3], "vocab.size: 2 doesn't hold the 3 forced tokens"),
        (5, [10], "vocab.forced_tokens: id 10 lies outside the verifier's vocabulary of 10"),
    ],
)
def test_impossible_requests_are_refused(size, forced, words):
    with pytest.raises(PipelineError, match=words):
        vm.build_vocab_mapping(np.ones(10, np.int64), size, forced)


def test_coverage_is_worked_out_by_hand():
    counts = {
        ("train", "a"): np.array([6, 3, 1, 0]),
        ("val", "a"): np.array([1, 0, 0, 1]),
        ("val", "b"): np.array([2, 0, 0, 0]),
    }
    row = vm.coverages(counts, [2])[0]
    assert row.by_split == {"train": 0.9, "val": 0.75}
    assert row.by_source == {("train", "a"): 0.9, ("val", "a"): 0.5, ("val", "b"): 1.0}
    assert [r.size for r in vm.coverages(counts, [1, 2, 4, 8], forced=[0, 1])] == [2, 4]


def test_what_is_left_out_comes_most_frequent_first():
    mapping = vm.build_vocab_mapping(np.array([9, 1, 5, 4, 4]), 1)
    assert vm.most_frequent_left_out(mapping, 3) == [(2, 5), (3, 4), (4, 4)]


# ---- the files


def test_a_written_map_is_read_back_and_the_same_map_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        vm.write_vocab_mapping(tmp_path / name, worked_map())
    mapping, was_absolute = vm.import_vocab_mapping(tmp_path / "a")
    assert not was_absolute and torch.equal(mapping.d2t, worked_map().d2t)
    for file in vm.FILES:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_the_files_are_bare_tensors_of_the_stated_types(tmp_path):
    vm.write_vocab_mapping(tmp_path, worked_map())
    types = {name: torch.load(tmp_path / name, weights_only=True).dtype for name in vm.FILES}
    assert types == {"t2d.pt": torch.bool, "d2t.pt": torch.int64, "token_freq.pt": torch.int64}


def test_the_older_form_with_verifier_ids_is_recognised_and_converted(tmp_path):
    vm.write_vocab_mapping(tmp_path, worked_map())
    torch.save(worked_map().target_ids, tmp_path / "d2t.pt")
    mapping, was_absolute = vm.import_vocab_mapping(tmp_path)
    assert was_absolute and torch.equal(mapping.d2t, worked_map().d2t)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d2t: torch.zeros_like(d2t), r"d2t\[3\] leads to verifier id 3, t2d says 5"),  # I2
        (
            lambda d2t: d2t - torch.tensor([0, 0, 1, 0]),
            r"d2t\[2\] leads to verifier id 1, t2d says 2",
        ),  # I8, a duplicate
        (
            lambda d2t: d2t + torch.tensor([0, 0, 0, 1]),
            r"d2t\[3\] leads to verifier id 6, t2d says 5",
        ),  # I8, id = vocab
        (lambda d2t: d2t.int(), r"d2t is int32 \[4\], expected one dimension of int64, first entry d2t\[0\] = 0"),  # I8
        (lambda d2t: d2t.bfloat16(), r"d2t is bfloat16 \[4\]"),  # I8
        (lambda d2t: d2t[:3], r"t2d marks 4 ids, d2t has 3 entries \(index 3 has no counterpart\)"),
        (lambda d2t: d2t[None], r"d2t is int64 \[1, 4\]"),
        (lambda d2t: {"d2t": d2t}, "holds a dict, expected a tensor"),
    ],
)
def test_a_wrong_d2t_is_refused_with_the_first_wrong_index(tmp_path, change, words):
    vm.write_vocab_mapping(tmp_path, worked_map())
    torch.save(change(worked_map().d2t), tmp_path / "d2t.pt")
    with pytest.raises(PipelineError, match=words):
        vm.import_vocab_mapping(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("t2d.pt", torch.ones(6, dtype=torch.uint8), r"t2d is uint8 \[6\], expected one dimension of bool"),
        ("token_freq.pt", torch.zeros(5, dtype=torch.int64), "token_freq has 5 entries, t2d has 6"),
        ("token_freq.pt", torch.tensor([0, 0, -1, 0, 0, 0]), r"token_freq\[2\] is negative"),
    ],
)
def test_the_other_two_files_are_checked_too(tmp_path, name, value, words):
    vm.write_vocab_mapping(tmp_path, worked_map())
    torch.save(value, tmp_path / name)
    with pytest.raises(PipelineError, match=words):
        vm.import_vocab_mapping(tmp_path)


class Payload:
    def __reduce__(self):
        return (print, ("ran",))


def test_code_in_a_file_is_never_run(tmp_path, capsys):
    vm.write_vocab_mapping(tmp_path, worked_map())
    (tmp_path / "d2t.pt").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(PipelineError, match=r"d2t\.pt can't be read"):
        vm.import_vocab_mapping(tmp_path)
    assert "ran" not in capsys.readouterr().out


def test_a_missing_file_is_named(tmp_path):
    vm.write_vocab_mapping(tmp_path, worked_map())
    (tmp_path / "t2d.pt").unlink()
    with pytest.raises(PipelineError, match=r"t2d\.pt is missing"):
        vm.import_vocab_mapping(tmp_path)


# ---- the stage


@pytest.fixture
def config_path(tmp_path):
    return train_rig.make_run(tmp_path, num_train=8, num_val=3)


def run(config_path, *flags):
    return stage.main(["--config", str(config_path), *flags])


def test_stage_3_leaves_the_three_files_and_the_manifest(config_path, tmp_path, capsys):
    assert run(config_path) == 0
    out_dir = tmp_path / "run" / "vocab_mapping"
    assert sorted(p.name for p in out_dir.iterdir()) == [
        "d2t.pt",
        "manifest.json",
        "run_state.json",
        "t2d.pt",
        "token_freq.pt",
    ]
    manifest, mapping = vm.open_vocab_mapping(tmp_path / "run")
    verify_outputs(out_dir, manifest)
    assert manifest.fingerprints["vocab_mapping"] == mapping.fingerprint
    counts = manifest.counts
    assert counts["draft_vocab_size"] == 128 and counts["coverage_train"] == 1.0 and counts["filled_tokens"] > 0
    shown = capsys.readouterr().out
    assert "128 *" in shown and "train: made" in shown and "most frequent tokens left out: none" in shown


def test_t2d_has_the_configs_vocabulary_not_the_tokenizers(config_path, tmp_path):
    """Field fault B4: the tokenizer knows 303 tokens, the verifier 320."""
    run(config_path)
    _, mapping = vm.open_vocab_mapping(tmp_path / "run")
    assert mapping.vocab_size == train_rig.VOCAB and len(mapping.token_freq) == train_rig.VOCAB


def test_stop_tokens_think_tags_and_listed_tokens_are_forced_though_never_seen(config_path, tmp_path):
    assert run(config_path, "--vocab.forced_tokens", '["w250", 315]') == 0
    _, mapping = vm.open_vocab_mapping(tmp_path / "run")
    assert mapping.t2d[[2, 300, 301, 250, 315]].all()
    assert not mapping.token_freq[[300, 301, 250, 315]].any()


def test_a_special_token_under_the_mask_is_forced_in(tmp_path, monkeypatch):
    rare = train_rig.make_text(11)
    rare.ids[9][-1] = 302  # <|rarely|>, once, in the validation split
    monkeypatch.setattr(train_rig, "make_text", lambda *_: rare)
    path = train_rig.make_run(tmp_path, num_train=8, num_val=3, vocab_size=20)
    assert run(path) == 0
    _, mapping = vm.open_vocab_mapping(tmp_path / "run")
    assert mapping.t2d[302] and mapping.t2d.sum() == 20


def test_a_token_that_the_tokenizer_does_not_know_is_refused(config_path, caplog):
    assert run(config_path, "--vocab.forced_tokens", '["<nonsense>"]') == 2
    assert "vocab.forced_tokens: '<nonsense>' is not a token of this tokenizer" in caplog.text


def test_a_second_run_does_nothing_and_another_size_is_refused(config_path, caplog):
    run(config_path)
    assert run(config_path) == 0
    assert "is complete with these inputs and settings" in caplog.text
    assert run(config_path, "--vocab.size", "48") == 2  # field fault H4
    assert "vocab.size: was 128, is 48" in caplog.text
    assert run(config_path, "--vocab.size", "48", "--overwrite") == 0


def test_an_interrupted_run_starts_over_and_ends_alike(config_path, tmp_path):
    run(config_path)
    out_dir = tmp_path / "run" / "vocab_mapping"
    before = {p.name: p.read_bytes() for p in out_dir.glob("*.pt")}
    (out_dir / "manifest.json").unlink()
    (out_dir / "d2t.pt").write_bytes(b"half")
    assert run(config_path) == 0
    assert {p.name: p.read_bytes() for p in out_dir.glob("*.pt")} == before


def test_stage_3_refuses_everything_that_is_wrong_at_once(config_path, tmp_path, caplog):
    assert run(config_path, "--vocab.size", "400", "--vocab.import_dir", str(tmp_path / "nowhere")) == 2
    assert "2 problems" in caplog.text
    assert "vocab.size: 400 is more than the verifier's vocabulary of 320" in caplog.text
    assert "t2d.pt is missing" in caplog.text
    assert not (tmp_path / "run" / "vocab_mapping").exists()


def test_samples_of_another_verifier_are_refused(config_path, tmp_path, caplog):
    train_rig.write_verifier(tmp_path / "other", train_rig.make_text(1, seed=5), intermediate_size=65)
    assert run(config_path, "--verifier.path", str(tmp_path / "other")) == 2
    assert "samples: was made with another verifier" in caplog.text


def test_samples_that_are_not_finished_are_refused(config_path, tmp_path, caplog):
    (tmp_path / "run" / "samples" / "manifest.json").unlink()
    assert run(config_path) == 2
    assert "has no manifest" in caplog.text and "01_prepare_data" in caplog.text


def rewrite_samples(run_dir, change):
    """Write samples.parquet again, as somebody else's tool might."""
    path = run_dir / "samples" / "samples.parquet"
    pq.write_table(change(pq.read_table(path)), path)


def test_samples_whose_columns_allow_nulls_give_the_same_map(config_path, tmp_path):
    run(config_path)
    before = vm.open_vocab_mapping(tmp_path / "run")[1]
    rewrite_samples(tmp_path / "run", lambda table: pa.table(table.to_pydict(), schema=nullable(table.schema)))
    assert run(config_path, "--overwrite") == 0
    after = vm.open_vocab_mapping(tmp_path / "run")[1]
    assert torch.equal(after.token_freq, before.token_freq) and after.fingerprint == before.fingerprint


def nullable(schema):
    kinds = [pa.list_(f.type.value_type) if pa.types.is_list(f.type) else f.type for f in schema]
    return pa.schema(list(zip(schema.names, kinds, strict=True)))


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.drop_columns("source"),
        lambda table: table.set_column(2, "input_ids", table["input_ids"].cast(pa.list_(pa.int64()))),
    ],
    ids=["a column missing", "ids of 64 bits"],
)
def test_samples_of_other_columns_are_refused(config_path, tmp_path, caplog, change):
    rewrite_samples(tmp_path / "run", change)
    assert run(config_path) == 2
    assert "samples.parquet: has columns sample_id, conversation_id, input_ids" in caplog.text
    assert "of other names or types" in caplog.text


def test_tokens_left_out_are_shown_as_text_most_frequent_first(config_path, tmp_path, capsys):
    assert run(config_path, "--vocab.size", "20") == 0
    shown = capsys.readouterr().out.replace("\n", " ")
    (_, words) = shown.split("most frequent tokens left out: ")
    _, mapping = vm.open_vocab_mapping(tmp_path / "run")
    first, count = vm.most_frequent_left_out(mapping, 1)[0]
    assert words.startswith(f"'w{first}' {count}, 'w")


def test_import_takes_a_map_made_elsewhere_in_the_older_form(config_path, tmp_path, caplog):
    samples = open_samples(tmp_path / "run")
    freq = vm.frequencies(vm.count_tokens(samples.iter_batches(vm.COUNTED_COLUMNS), train_rig.VOCAB), "train")
    mapping = vm.build_vocab_mapping(freq, 128)
    vm.write_vocab_mapping(tmp_path / "made", mapping)
    torch.save(mapping.target_ids, tmp_path / "made" / "d2t.pt")
    assert run(config_path, "--import", str(tmp_path / "made")) == 0
    assert "d2t holds verifier ids (the older form), converted to offsets" in caplog.text
    assert "the imported map lacks <think>, </think>" in caplog.text
    assert torch.equal(vm.open_vocab_mapping(tmp_path / "run")[1].d2t, mapping.d2t)
    assert read_manifest(tmp_path / "run" / "vocab_mapping").fingerprints["imported_map"] == mapping.fingerprint


def test_an_imported_map_of_another_size_is_refused(config_path, tmp_path, caplog):
    vm.write_vocab_mapping(tmp_path / "made", vm.build_vocab_mapping(np.ones(train_rig.VOCAB, np.int64), 64))
    assert run(config_path, "--import", str(tmp_path / "made")) == 2
    assert "holds 64 draft tokens, vocab.size says 128" in caplog.text


def test_check_changes_nothing(config_path, tmp_path, capsys):
    assert run(config_path, "--check") == 0
    assert "forced tokens" in capsys.readouterr().out
    assert not (tmp_path / "run" / "vocab_mapping").exists()
