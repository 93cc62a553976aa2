"""Training runs on tiny drafts: continuing exactly, what counts as best, what is skipped, refused or reported."""

import copy
import dataclasses
import json
import math
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common import checkpoints, trainer
from common.config import DraftSection, TrainSection
from common.draft import build_draft, check_earlier_draft, read_earlier_mapping
from common.errors import PipelineError, Problem
from common.packing import PackSampler, SplitRows, make_loader
from common.training_log import Reporter
from common.verifier import VerifierHead
from common.vocab_mapping import build_vocab_mapping
from tests import train_rig


class KilledError(BaseException):
    """Stands in for a kill -9 after a step: nothing is saved on the way out."""


@pytest.fixture(scope="module")
def text():
    return train_rig.make_text(30)


@pytest.fixture
def verifier_path(tmp_path, text):
    return train_rig.write_verifier(tmp_path / "verifier", text)


def settings(**changes):
    return TrainSection(**(train_rig.TRAIN | changes))


def split(text, indices, load=None):
    return SplitRows(load or text.states, list(indices), [len(text.ids[i]) for i in indices])


def make_model(text, verifier_path, train, size=128, **draft):
    under_mask = np.concatenate([ids[mask] for ids, mask in zip(text.ids, text.masks, strict=True)])
    return build_draft(
        DraftSection(**(train_rig.DRAFT | draft)),
        train,
        mapping=build_vocab_mapping(np.bincount(under_mask, minlength=train_rig.VOCAB), size),
        weights=VerifierHead(text.embed, text.head, text.norm, 1e-6),
        verifier_path=str(verifier_path),
        aux_layer_ids=train_rig.AUX,
        seed=0,
    )


@pytest.fixture
def train(text, verifier_path, monkeypatch):
    """train(out_dir, kill_at=step, signal_at=step, rows=..., **settings) -> TrainingResult, or None when killed."""

    def run(
        out_dir, *, kill_at=None, signal_at=None, rows=range(24), val=range(24, 30), load=None, model=None, **changes
    ):
        chosen = settings(**changes)
        original = Reporter.step

        def step(self, position, window, **fields):
            original(self, position, window, **fields)
            if position.steps == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if position.steps == kill_at:
                raise KilledError

        monkeypatch.setattr(Reporter, "step", step)
        model = model or make_model(text, verifier_path, chosen)
        try:
            return trainer.train_draft(
                model, chosen, split(text, rows, load), split(text, val, load), out_dir=out_dir, seed=0
            )
        except KilledError:
            return None
        finally:
            monkeypatch.setattr(Reporter, "step", original)

    return run


def newest(out_dir):
    return out_dir / str(checkpoints.list_checkpoints(out_dir)[-1])


def exact_state(out_dir):
    """Weights, optimiser, schedule, random states and position of the newest checkpoint, and its draft's bytes."""
    state_dir = newest(out_dir) / checkpoints.STATE_DIR
    names = (checkpoints.OPTIMIZER_FILE, checkpoints.SCHEDULER_FILE, checkpoints.RANDOM_FILE)
    return {
        "masters": load_file(state_dir / checkpoints.MASTERS_FILE),
        **{name: torch.load(state_dir / name, weights_only=True) for name in names},
        "position": checkpoints.read_position(newest(out_dir)),
        "draft": (newest(out_dir) / checkpoints.WEIGHTS_FILE).read_bytes(),
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def log_lines(out_dir):
    """The log without what depends on the clock."""
    lines = [json.loads(line) for line in (out_dir / checkpoints.LOG_FILE).read_text().splitlines()]
    return [{k: v for k, v in line.items() if "second" not in k} for line in lines]


# ---- a run


def test_a_run_learns_and_leaves_a_draft_an_epoch(train, tmp_path):
    result = train(tmp_path / "c", num_epochs=4, lr=1e-2)
    assert checkpoints.list_checkpoints(tmp_path / "c") == [0, 1, 2, 3]
    assert sorted(p.name for p in (tmp_path / "c" / "3").iterdir() if p.suffix != ".py") == [
        "config.json",
        "exact_state",
        "model.safetensors",
        "val_metrics.json",
    ]
    assert not (tmp_path / "c" / "2" / checkpoints.STATE_DIR).exists()
    lines = [line for line in log_lines(tmp_path / "c") if "step" in line]
    assert [line["step"] for line in lines] == list(range(1, result.position.steps + 1))
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert {"loss_0", "full_acc_2", "cond_acc_1", "lr", "grad_norm", "tokens", "skipped_steps"} <= lines[0].keys()
    assert result.best_metrics["acceptance_length_epoch"] > 1.05
    assert sum(line["tokens"] for line in lines) == result.position.tokens


def test_the_same_run_gives_the_same_bytes(train, tmp_path):
    for name in ("a", "b"):
        train(tmp_path / name)
    assert same(exact_state(tmp_path / "a"), exact_state(tmp_path / "b"))
    assert log_lines(tmp_path / "a") == log_lines(tmp_path / "b")


# ---- continuing


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_killed_at_any_step_and_continued_ends_with_the_same_bytes(train, tmp_path, optimizer):
    options = {"optimizer": optimizer, "checkpoint_steps": 2, "dtype": "bfloat16", "rows": range(12)}
    steps = train(tmp_path / "whole", **options).position.steps
    expected, lines = exact_state(tmp_path / "whole"), log_lines(tmp_path / "whole")
    for kill_at in range(1, steps + 1):
        out_dir = tmp_path / f"killed{kill_at}"
        assert train(out_dir, kill_at=kill_at, **options) is None
        train(out_dir, **options)
        assert same(exact_state(out_dir), expected), f"killed after step {kill_at}"
        assert log_lines(out_dir) == lines


def test_a_run_killed_again_and_again_ends_with_the_same_bytes(train, tmp_path):
    options = {"checkpoint_steps": 1, "accumulation": 2}
    steps = train(tmp_path / "whole", **options).position.steps
    for kill_at in range(1, steps + 1):
        train(tmp_path / "killed", kill_at=kill_at, **options)
    train(tmp_path / "killed", **options)
    assert same(exact_state(tmp_path / "killed"), exact_state(tmp_path / "whole"))


def test_a_signal_saves_at_the_next_step_and_the_run_continues_exactly(train, tmp_path):
    train(tmp_path / "whole")
    result = train(tmp_path / "stopped", signal_at=3)
    assert result.interrupted and result.position.steps == 3
    assert checkpoints.read_position(newest(tmp_path / "stopped")).steps == 3
    assert not train(tmp_path / "stopped").interrupted
    assert same(exact_state(tmp_path / "stopped"), exact_state(tmp_path / "whole"))


def test_signal_handlers_are_put_back(train, tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    train(tmp_path / "c", num_epochs=1)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_moments_after_one_step_are_saved_in_full_and_come_back(train, tmp_path):
    """Field fault K3: save after one step, resume; the moments are there and equal."""
    train(tmp_path / "c", checkpoint_steps=1, kill_at=2)
    saved = torch.load(newest(tmp_path / "c") / checkpoints.STATE_DIR / checkpoints.OPTIMIZER_FILE, weights_only=True)
    moments = [state["exp_avg"] for state in saved[0]["state"].values()]
    assert moments and all(m.dtype == torch.float32 and m.any() for m in moments)
    seen = {}
    original = trainer.DraftTrainer.setup_optimizer

    def setup(self):
        original(self)
        seen["state"] = copy.deepcopy(self.optimizers[0].state_dict()["state"])

    trainer.DraftTrainer.setup_optimizer = setup
    try:
        train(tmp_path / "c")
    finally:
        trainer.DraftTrainer.setup_optimizer = original
    assert {state["step"].item() for state in saved[0]["state"].values()} == {1}
    assert same(seen["state"], saved[0]["state"])


def test_masters_are_float32_and_the_draft_beside_them_bfloat16(train, tmp_path):
    train(tmp_path / "c", num_epochs=1)
    masters = load_file(tmp_path / "c" / "0" / checkpoints.STATE_DIR / checkpoints.MASTERS_FILE)
    draft = load_file(tmp_path / "c" / "0" / checkpoints.WEIGHTS_FILE)
    assert all(tensor.dtype == torch.float32 for tensor in masters.values())
    for name, tensor in masters.items():
        assert draft[name].dtype == torch.bfloat16 and torch.equal(draft[name], tensor.bfloat16())
        assert not torch.equal(draft[name].float(), tensor), name  # so bf16 alone would not be enough


@pytest.mark.parametrize("moment", ["while writing", "between the renames"])
def test_a_kill_while_saving_loses_nothing_that_was_finished(train, tmp_path, moment):
    train(tmp_path / "whole", checkpoint_steps=2)
    train(tmp_path / "c", checkpoint_steps=2, kill_at=3)
    out_dir = tmp_path / "c"
    if moment == "while writing":
        (out_dir / ".0.saving").mkdir()
        (out_dir / ".0.saving" / "model.safetensors").write_bytes(b"half")
    else:
        (out_dir / "0").rename(out_dir / ".0.old")
    train(out_dir, checkpoint_steps=2)
    assert same(exact_state(out_dir), exact_state(tmp_path / "whole"))
    assert not list(out_dir.glob(".*"))


def test_the_validation_that_a_kill_prevented_is_made_up_for(train, tmp_path, monkeypatch):
    train(tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr(trainer.DraftTrainer, "val_epoch", lambda *_: (_ for _ in ()).throw(KilledError))
        assert train(tmp_path / "c") is None
    assert checkpoints.read_val_metrics(tmp_path / "c", 0) is None
    train(tmp_path / "c")
    for epoch in (0, 1):
        read = [checkpoints.read_val_metrics(tmp_path / name, epoch) for name in ("c", "whole")]
        assert read[0] == read[1] is not None
    assert checkpoints.best_number(tmp_path / "c") == checkpoints.best_number(tmp_path / "whole")


def test_a_checkpoint_without_its_exact_state_is_not_continued_silently(train, tmp_path):
    train(tmp_path / "c", num_epochs=1)
    shutil.rmtree(tmp_path / "c" / "0" / checkpoints.STATE_DIR)
    with pytest.raises(PipelineError, match="has no exact_state, so it can't be continued exactly"):
        train(tmp_path / "c")


def test_a_torn_line_of_the_log_is_dropped(train, tmp_path):
    train(tmp_path / "c", checkpoint_steps=1, kill_at=3)
    with (tmp_path / "c" / checkpoints.LOG_FILE).open("a") as file:
        file.write('{"step": 4, "lo')
    train(tmp_path / "c")
    steps = [line["step"] for line in log_lines(tmp_path / "c") if "step" in line]
    assert steps == list(range(1, len(steps) + 1))


# ---- rounds and warm starts


def test_a_round_goes_on_with_weights_optimiser_schedule_and_steps(train, tmp_path):
    first = train(tmp_path / "one" / "checkpoints", rows=range(12), num_epochs=1, total_steps=12)
    second = train(
        tmp_path / "two" / "checkpoints",
        rows=range(12, 24),
        num_epochs=1,
        total_steps=12,
        continue_from=tmp_path / "one",
    )
    assert second.position.steps > first.position.steps > 0
    assert second.position.tokens > first.position.tokens
    lines = [line for line in log_lines(tmp_path / "two" / "checkpoints") if "step" in line]
    assert lines[0]["step"] == first.position.steps + 1
    before = [line for line in log_lines(tmp_path / "one" / "checkpoints") if "step" in line]
    falls = [line["lr"] for line in before + lines]
    assert falls == sorted(falls, reverse=True) and len(set(falls)) == len(falls)  # one schedule through both
    assert lines[0]["loss"] < before[0]["loss"]
    state = torch.load(
        tmp_path / "two" / "checkpoints" / "0" / checkpoints.STATE_DIR / checkpoints.OPTIMIZER_FILE, weights_only=True
    )
    assert {s["step"].item() for s in state[0]["state"].values()} == {second.position.steps}


def test_a_round_killed_and_continued_ends_with_the_same_bytes(train, tmp_path):
    train(tmp_path / "one" / "checkpoints", rows=range(12), num_epochs=1, total_steps=12)
    options = {
        "rows": range(12, 24),
        "num_epochs": 1,
        "total_steps": 12,
        "continue_from": tmp_path / "one",
        "checkpoint_steps": 1,
    }
    train(tmp_path / "whole" / "checkpoints", **options)
    train(tmp_path / "killed" / "checkpoints", kill_at=5, **options)
    train(tmp_path / "killed" / "checkpoints", **options)
    assert same(exact_state(tmp_path / "killed" / "checkpoints"), exact_state(tmp_path / "whole" / "checkpoints"))


def test_a_warm_start_has_the_earlier_drafts_weights_and_map(train, tmp_path, text, verifier_path):
    train(tmp_path / "c", num_epochs=3)
    earlier = tmp_path / "c" / "2"
    mapping = read_earlier_mapping(earlier, train_rig.VOCAB)
    assert mapping.size == 128
    model = make_model(text, verifier_path, settings(init_from=earlier))
    saved = load_file(earlier / checkpoints.WEIGHTS_FILE)
    assert torch.equal(model.fc.weight, saved["fc.weight"].float())
    assert torch.equal(model.t2d, mapping.t2d)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"intermediate_size": 64}, "draft.intermediate_size is 64, there 48"),
        ({"norm_output": True}, "draft.norm_output is True"),
    ],
)
def test_a_warm_start_from_another_shape_is_refused(train, tmp_path, change, words):
    train(tmp_path / "c", num_epochs=1)
    with pytest.raises(PipelineError, match=words):
        check_earlier_draft(tmp_path / "c" / "0", DraftSection(**(train_rig.DRAFT | change)), train_rig.AUX)


def test_a_warm_start_from_other_layers_is_refused(train, tmp_path):
    train(tmp_path / "c", num_epochs=1)
    draft = DraftSection(**train_rig.DRAFT)
    with pytest.raises(PipelineError, match=r"the states are of layers \[1, 2, 4\], the draft in .* reads \[1, 2, 3\]"):
        check_earlier_draft(tmp_path / "c" / "0", draft, [1, 2, 4])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda saved: saved | {"d2t": saved["d2t"] + saved["d2t"].new_ones(1)}, "the vocabulary map of .* is wrong"),
        (lambda saved: saved | {"d2t": saved["d2t"].int()}, "d2t is int32"),
        (lambda saved: saved | {"t2d": torch.cat([saved["t2d"], saved["t2d"][:1] & False])}, "t2d has 321 entries"),
    ],
    ids=["offsets moved", "int32", "longer vocabulary"],
)
def test_a_warm_start_with_a_broken_map_is_refused(train, tmp_path, change, words):
    train(tmp_path / "c", num_epochs=1)
    path = tmp_path / "c" / "0" / checkpoints.WEIGHTS_FILE
    save_file(change(load_file(path)), path)
    with pytest.raises(PipelineError, match=words):
        read_earlier_mapping(tmp_path / "c" / "0", train_rig.VOCAB)


# ---- packs and samples


def packs_of(monkeypatch, lengths, world_size, accumulation, epoch=0):
    """The packs of each optimiser step, over all ranks."""
    found = []
    for rank in range(world_size):
        monkeypatch.setattr("speculators.train.distributed._dp_size", world_size)
        monkeypatch.setattr("speculators.train.distributed._dp_rank", rank)
        sampler = PackSampler(lengths, max_tokens=96, accumulation=accumulation, seed=0)
        sampler.set_epoch(epoch)
        found.append([sorted(pack.tolist()) for pack in sampler])
    steps = len(found[0]) // accumulation
    return [
        [found[r][s * accumulation + a] for r in range(world_size) for a in range(accumulation)] for s in range(steps)
    ]


@pytest.mark.parametrize("epoch", [0, 3])
def test_ranks_and_accumulation_are_interchangeable(monkeypatch, text, epoch):
    lengths = [len(ids) for ids in text.ids]
    alone = packs_of(monkeypatch, lengths, 1, 4, epoch)
    assert alone == packs_of(monkeypatch, lengths, 2, 2, epoch) == packs_of(monkeypatch, lengths, 4, 1, epoch)
    used = [index for step in alone for pack in step for index in pack]
    assert len(used) == len(set(used)) and len(used) > len(lengths) - 4


def test_a_pack_never_holds_more_than_its_tokens(monkeypatch, text):
    lengths = [len(ids) for ids in text.ids]
    assert all(sum(lengths[i] for i in pack) <= 96 for step in packs_of(monkeypatch, lengths, 1, 2) for pack in step)


def failing(text, *numbers):
    def load(index):
        if index in numbers:
            raise PipelineError(Problem(f"data_{index}.pt", "can't be read: torn"))
        return text.states(index)

    return load


def test_a_sample_that_cannot_be_read_stops_the_run_with_its_name(train, tmp_path, text):
    with pytest.raises(PipelineError, match=r"hidden states: can't be read: sample 7: data_7.pt: can't be read: torn"):
        train(tmp_path / "c", load=failing(text, 7))


def test_a_tolerance_leaves_unreadable_samples_out_and_counts_them(train, tmp_path, text):
    result = train(tmp_path / "c", load=failing(text, 7, 9), max_unreadable_samples=4, num_epochs=2)
    assert result.unreadable == 4  # two samples in each of two epochs
    with pytest.raises(PipelineError, match="sample"):
        train(tmp_path / "d", load=failing(text, 7, 9), max_unreadable_samples=3, num_epochs=2)


def test_worker_processes_deliver_the_same_packs(text, verifier_path, tmp_path):
    rows = SplitRows(PickledStates(text), list(range(12)), [len(text.ids[i]) for i in range(12)])
    options = {"accumulation": 1, "seed": 0, "hidden_size": train_rig.HIDDEN, "num_aux": 3, "tolerance": 0}
    alone, helped = (list(make_loader(rows, settings(num_workers=n), **options)) for n in (0, 1))
    assert len(alone) == len(helped) > 2
    assert all(
        same({k: v for k, v in a.items() if k != "error_records"}, {k: v for k, v in b.items() if k != "error_records"})
        for a, b in zip(alone, helped, strict=True)
    )


class PickledStates:
    """`text.states` in a form that a spawned worker can unpickle."""

    def __init__(self, text):
        self.text = text

    def __call__(self, index):
        return self.text.states(index)


def test_a_step_without_a_supervised_token_is_skipped_and_counted(train, tmp_path, text, verifier_path):
    """Weight decay and momentum would move the weights if such a step reached the optimiser."""

    def silent(index):
        states = text.states(index)
        return dataclasses.replace(states, loss_mask=torch.zeros_like(states.loss_mask))

    model = make_model(text, verifier_path, settings())
    before = {name: p.detach().clone() for name, p in trainer.trainable_parameters(model).items()}
    result = train(tmp_path / "c", load=silent, model=model, weight_decay=0.5, num_epochs=1)
    assert result.position.skipped == result.position.steps > 3
    assert all(torch.equal(before[name], p) for name, p in trainer.trainable_parameters(model).items())
    assert log_lines(tmp_path / "c")[-2]["skipped_steps"] == result.position.steps


def test_a_gradient_that_is_not_a_number_stops_the_run(train, tmp_path, text):
    def broken(index):
        states = text.states(index)
        return dataclasses.replace(states, aux=[a * float("inf") for a in states.aux])

    with pytest.raises(PipelineError, match="the gradient of step 1 is not a number"):
        train(tmp_path / "c", load=broken)


def test_accumulation_averages_the_packs_of_a_step(train, tmp_path, text, verifier_path):
    """SGD-like check by hand: after one step of two packs the gradient is the mean of the packs' gradients."""
    grads = []
    original = trainer._CLIP_GRAD_NORM

    def spy(parameters, norm):
        grads.append([p.grad.clone() for p in parameters])
        return original(parameters, norm)

    trainer._CLIP_GRAD_NORM = spy
    try:
        train(tmp_path / "two", accumulation=2, max_steps=1, lr=1e-9)
        together = grads[0]
        model = make_model(text, verifier_path, settings())
        chosen = settings(accumulation=2)
        options = {"accumulation": 2, "seed": 0, "hidden_size": train_rig.HIDDEN, "num_aux": 3, "tolerance": 0}
        loader = make_loader(split(text, range(24)), chosen, **options)
        loader.batch_sampler.set_epoch(0)
        for batch, _ in zip(loader, range(2), strict=False):
            batch.pop("error_records")
            _, loss, _ = model(**batch, ttt_steps=3, ttt_step_loss_decay=0.8)
            (loss / 2).backward()
        alone = [p.grad for p in model.parameters() if p.grad is not None]
        for a, b in zip(together, alone, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    finally:
        trainer._CLIP_GRAD_NORM = original


def test_the_clip_is_the_configured_one(train, tmp_path):
    norms = []
    original = trainer.DraftTrainer._optimizers_step

    def spy(self):
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norms.append(torch.stack([g.norm() for g in grads]).norm().item())
        original(self)

    trainer.DraftTrainer._optimizers_step = spy
    try:
        train(tmp_path / "c", max_grad_norm=0.25, num_epochs=1)
    finally:
        trainer.DraftTrainer._optimizers_step = original
    assert max(norms) == pytest.approx(0.25, rel=1e-3)


def test_max_steps_is_counted_in_optimiser_steps(train, tmp_path):
    result = train(tmp_path / "c", max_steps=3, accumulation=2, num_epochs=5)
    assert result.position.steps == 3
    assert len([line for line in log_lines(tmp_path / "c") if "step" in line]) == 3


@pytest.mark.parametrize("scheduler", ["linear", "cosine", "none"])
def test_the_rate_rises_over_the_warm_up_and_falls_to_zero(train, tmp_path, scheduler):
    train(tmp_path / "c", scheduler=scheduler, warmup_ratio=0.34, max_steps=9, num_epochs=9)
    rates = [line["lr"] for line in log_lines(tmp_path / "c") if "step" in line]
    if scheduler == "none":
        assert set(rates) == {3e-3}
        return
    assert rates[0] == 0 and rates[3] == pytest.approx(3e-3) == max(rates) and rates[-1] < 1e-3
    assert rates[3:] == sorted(rates[3:], reverse=True)


# ---- the best checkpoint


def with_lengths(monkeypatch, *lengths):
    """Let validation report these acceptance lengths, and a loss that says the opposite."""
    values = iter(lengths)

    def val_epoch(self, epoch):
        length = next(values)
        return {"acceptance_length_epoch": length, "loss_epoch": length}

    monkeypatch.setattr(trainer.DraftTrainer, "val_epoch", val_epoch)


def test_the_best_checkpoint_has_the_longest_acceptance_not_the_lowest_loss(train, tmp_path, monkeypatch):
    with_lengths(monkeypatch, 1.2, 1.5, 1.4)
    result = train(tmp_path / "c", num_epochs=3)
    assert result.best == 1 and (tmp_path / "c" / "checkpoint_best").resolve().name == "1"
    assert checkpoints.find_checkpoint(_as_run(tmp_path / "c"), "best").name == "1"


def _as_run(out_dir):
    """find_checkpoint takes a run directory."""
    run_dir = out_dir.parent / "as_run"
    run_dir.mkdir(exist_ok=True)
    link = run_dir / checkpoints.DIR_NAME
    if not link.exists():
        link.symlink_to(out_dir)
    return run_dir


def test_training_stops_early_when_acceptance_has_stopped_growing(train, tmp_path, monkeypatch):
    with_lengths(monkeypatch, 1.2, 1.5, 1.4, 1.45, 1.9)
    result = train(tmp_path / "c", num_epochs=9, early_stop=2)
    assert result.stopped_early and checkpoints.list_checkpoints(tmp_path / "c") == [0, 1, 2, 3] and result.best == 1


def test_early_stop_counts_on_after_a_kill(train, tmp_path, monkeypatch):
    with_lengths(monkeypatch, 1.5, 1.4)
    train(tmp_path / "c", num_epochs=2)
    with_lengths(monkeypatch, 1.3, 1.9)
    result = train(tmp_path / "c", num_epochs=9, early_stop=2)
    assert result.stopped_early and checkpoints.list_checkpoints(tmp_path / "c") == [0, 1, 2] and result.best == 0


def test_without_a_validation_split_the_last_epoch_is_the_best(train, tmp_path):
    assert train(tmp_path / "c", val=()).best == 1


def test_checkpoints_are_found_by_name_and_number(train, tmp_path):
    train(tmp_path / "c")
    run_dir = _as_run(tmp_path / "c")
    assert checkpoints.find_checkpoint(run_dir, "last").name == "1"
    assert checkpoints.find_checkpoint(run_dir, "0").name == "0"
    with pytest.raises(PipelineError, match="has no 'third'"):
        checkpoints.find_checkpoint(run_dir, "third")
    (tmp_path / "c" / "0" / "model.safetensors").unlink()
    with pytest.raises(PipelineError, match=r"lacks model\.safetensors"):
        checkpoints.find_checkpoint(run_dir, "0")


def test_tensorboard_gets_the_metrics(train, tmp_path):
    train(tmp_path / "run" / "checkpoints", num_epochs=1, loggers=["tensorboard"])
    assert list((tmp_path / "run" / "logs" / "metrics" / "run").glob("events.out.tfevents.*"))


def test_two_splits_too_small_for_a_step_are_refused(train, tmp_path):
    with pytest.raises(PipelineError, match="2 training samples don't fill one step"):
        train(tmp_path / "c", rows=range(2), accumulation=4)


def test_simulated_acceptance_is_one_for_a_fresh_draft_and_finite(train, tmp_path):
    result = train(tmp_path / "c", num_epochs=1, lr=1e-9)
    assert math.isfinite(result.best_metrics["acceptance_length_epoch"])
