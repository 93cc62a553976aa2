"""Stage 1 on data with its own answers: what is kept, what is dropped and why, what is refused. No engine starts."""

import json
import subprocess
import sys

import pytest

from common.samples import open_samples
from tests.conftest import ROOT, script

stage = script("01_prepare_data")


def say(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    monkeypatch.setattr("common.stage._write_report", lambda run_dir: None)


@pytest.fixture
def run(tmp_path):
    """Runs stage 1 over these rows, without generation."""

    def run_rows(rows, *flags):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = tmp_path / "c.yaml"
        config.write_text(
            f"run: {{dir: {tmp_path}/run}}\n"
            f"prepare: {{sources: [{{path: {tmp_path}/rows.jsonl}}], max_tokens: 128, val_fraction: 0.3}}\n"
            "generate: {enabled: false}\n"
        )
        return stage.main(["--config", str(config), *flags])

    run_rows.dir = tmp_path / "run"
    return run_rows


def dropped(run):
    return [json.loads(line) for line in (run.dir / "samples" / "dropped.jsonl").read_text().splitlines()]


def test_conversations_become_samples_split_by_conversation(run):
    rows = [{"messages": say(f"question number {i}?", f"answer {i}", "and then?", "more")} for i in range(40)]
    assert run(rows) == 0
    samples = open_samples(run.dir)
    assert len(samples) == 40
    assert 4 <= samples.splits.count("val") <= 20
    by_conversation = {s.conversation_id: {s.split} for s in samples}
    for sample in samples:
        by_conversation[sample.conversation_id].add(sample.split)
    assert all(len(splits) == 1 for splits in by_conversation.values())


def test_the_same_rows_give_the_same_bytes(run, tmp_path):
    rows = [{"messages": say(f"question number {i}?", f"answer {i}")} for i in range(5)]
    run(rows)
    first = (run.dir / "samples" / "samples.parquet").read_bytes()
    run(rows, "--overwrite")
    assert (run.dir / "samples" / "samples.parquet").read_bytes() == first


def test_every_dropped_row_is_counted_under_its_reason(run, caplog):
    rows = [
        {"messages": say("a fine question", "a fine answer")},
        {"messages": say("a fine question", "another answer")},
        {"messages": say("an empty answer follows", "  ")},
        {"messages": [{"role": "system", "content": "x"}]},
        {"prompt": "a prompt without an answer"},
        {"messages": say("long " * 200, "cut away")},
        {"nothing": 1},
    ]
    assert run(rows) == 0
    assert [row["reason"] for row in dropped(run)] == [
        "a duplicate prompt",
        "an empty assistant turn",
        "only a system message",
        "no assistant turn",
        "too few supervised tokens",
        "no messages, conversations or prompt",
    ]
    assert len(open_samples(run.dir)) == 1


def test_a_held_out_prompt_is_not_trained_on(run):
    question = "Compose an engaging travel blog post about a recent trip to Hawaii, highlighting cultural experiences "
    rows = [{"messages": say(question + "and must-see attractions.", "No.")}, {"messages": say("else?", "Yes.")}]
    assert run(rows) == 0
    assert [row["reason"] for row in dropped(run)] == ["a held-out prompt"]


def test_a18_rows_with_few_supervised_tokens_are_dropped_at_the_threshold(run):
    """0, 1, 2 and 50 supervised tokens after cutting to 128, the end token among them."""
    rows = [
        {"messages": say("long " * 200, "cut away")},
        {"messages": say("one is left? " + "a " * 92, "b c d")},
        {"messages": say("two?", "b")},
        {"messages": say("fifty?", "b" + " c" * 48)},
    ]
    assert run(rows, "--prepare.min_supervised_tokens", "1") == 0
    assert [sample.num_supervised for sample in open_samples(run.dir)] == [1, 2, 50]
    assert run(rows, "--prepare.min_supervised_tokens", "2", "--overwrite") == 0
    assert [sample.num_supervised for sample in open_samples(run.dir)] == [2, 50]
    assert [row["reason"] for row in dropped(run)] == ["too few supervised tokens"] * 2


def test_a17_a_question_that_fills_the_sample_is_dropped_with_a_count(run):
    rows = [{"messages": say("word " * 200, "five words of an answer")}, {"messages": say("short?", "yes")}]
    assert run(rows, "--prepare.max_tokens", "64") == 0
    counts = json.loads((run.dir / "samples" / "manifest.json").read_text())["counts"]
    assert counts["dropped_reasons"] == {"too few supervised tokens": 1}
    assert all(sample.num_supervised for sample in open_samples(run.dir))


def test_a1_the_share_of_supervised_tokens_is_printed(run, caplog):
    assert run([{"messages": say("a question?", "an answer")}]) == 0
    (sample,) = open_samples(run.dir)
    assert f"{100 * sample.num_supervised / sample.num_tokens:.1f}% of the tokens are supervised" in caplog.text


def test_c1_no_row_of_a_broken_form_ends_the_run(run):
    messages = [[], [{"role": "system", "content": "x"}], [{"role": "assistant", "content": "x"}], say("a")[:1] * 2]
    assert run([{"messages": m} for m in messages] + [{"messages": say("a question?", "an answer")}]) == 0
    assert len(open_samples(run.dir)) == 1
    assert len(dropped(run)) == 4


def test_c4_a_file_of_another_name_is_read_line_by_line(run, tmp_path):
    content = (
        "\ufeff" + json.dumps({"messages": say("one?", "1")}) + "\r\n\r\n" + json.dumps({"messages": say("two?", "2")})
    )
    (tmp_path / "rows.dat").write_bytes((content + '\n{"messages": [{"ro').encode())
    assert run([], "--prepare.sources", json.dumps([{"path": str(tmp_path / "rows.dat")}])) == 0
    assert len(open_samples(run.dir)) == 2
    assert dropped(run) == [{"reason": "not JSON", "row": "rows.dat line 4", "source": "rows.dat"}]


@pytest.mark.parametrize("threshold", ["0", "-1"])
def test_a18_a_threshold_that_keeps_empty_samples_is_refused(run, threshold, caplog):
    assert run([], "--prepare.min_supervised_tokens", threshold) == 2
    assert "prepare.min_supervised_tokens: Input should be greater than or equal to 1" in caplog.text


def test_d1_an_answer_that_was_cut_is_counted_and_gets_no_end(run, smollm2_tokenizer):
    assert run([{"messages": say("a question?", "half an ans"), "finish_reason": "length"}]) == 0
    (sample,) = open_samples(run.dir)
    assert smollm2_tokenizer.decode(sample.input_ids[sample.loss_mask].tolist()) == "half an ans"
    record = json.loads((run.dir / "samples" / "manifest.json").read_text())
    assert record["counts"]["cut_answers"] == 1


def test_c4_a_source_without_a_usable_row_is_refused(run, caplog):
    assert run([{"nothing": 1}]) == 2
    assert "no row gave a sample: {'no messages, conversations or prompt': 1}" in caplog.text


def test_no_source_at_all_is_refused(tmp_path, caplog):
    (tmp_path / "c.yaml").write_text(f"run: {{dir: {tmp_path}/run}}\ngenerate: {{enabled: false}}\n")
    assert stage.main(["--config", str(tmp_path / "c.yaml")]) == 2
    assert "prepare.sources: is empty" in caplog.text


def test_settings_that_would_be_ignored_are_refused(run, caplog):
    assert run([], "--generate.magpie_prompts", "5") == 2
    assert "generate.magpie_prompts: would be ignored without generate.enabled" in caplog.text


def test_a_wrong_expected_token_id_stops_the_stage(run, caplog):
    assert run([{"messages": say("a", "b")}], "--verifier.expected_token_ids", '{"<|im_end|>": 7}') == 2
    assert "<|im_end|> should be 7, the loaded tokenizer gives 2" in caplog.text


def test_the_preview_shows_samples_in_a_terminal(run):
    assert run([{"messages": say("a question?", "an answer")}]) == 0
    config = run.dir.parent / "c.yaml"
    command = [sys.executable, "01_prepare_data.py", "--config", str(config), "--preview", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "sample 0: 3 of" in done.stdout and "an answer<|im_end|>" in done.stdout
