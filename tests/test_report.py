"""The report: one file, no network, every plot drawn, the manifests' numbers in its tables."""

import json
import re
import shutil
from pathlib import Path

import pytest

from common import report
from common.config import VerifierSection
from common.errors import PipelineError
from common.files import write_json
from common.manifest import Identity, Manifest, write_manifest, write_run_state
from common.samples import write_samples
from common.verifier import open_verifier
from tests.conftest import make_sample

CHROMIUM = shutil.which("chromium")


def manifest(stage, counts, **settings):
    return Manifest(stage, 1, settings, {}, {}, [], counts, {}, f"python {stage}.py --config c.yaml", "", {}, 61.0, "")


def write_run(path: Path, *, length: float = 1.546) -> Path:
    """A finished run as its manifests and logs tell it, without weights."""
    made = [make_sample(20 + i, 5 + i, seed=i, split="val" if i == 3 else "train") for i in range(4)]
    counts = write_samples(path / "samples", made) | {"dropped_reasons": {"a <b>bold</b> reason": 12}}
    config = {"verifier": VerifierSection().model_dump(mode="json")}
    first = manifest("01_prepare_data", counts)
    write_manifest(path / "samples", Manifest(**{**first.__dict__, "config": config}))
    coverage = {"4096": {"train": 0.97, "val": 0.88}, "8192": {"train": 1.0, "val": 0.93}}
    vocab = {"draft_vocab_size": 8192, "coverage": coverage}
    write_manifest(path / "vocab_mapping", manifest("03_build_vocab_mapping", vocab))
    validation = {
        "loss": 7.1,
        "acceptance_length": 1.523,
        "full_acc_0": 0.377,
        "full_acc_1": 0.157,
        "full_acc_2": 0.078,
    }
    steps = [{"step": i + 1, "loss": 9.0 - i, "full_acc_0": 0.1 * i, "full_acc_1": 0.05 * i} for i in range(4)]
    lines = [*steps, {"validation": validation, "epoch": 0}]
    log = path / "checkpoints" / "training_log.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "lo')
    write_manifest(path / "checkpoints", manifest("04_train", {"steps": 4}))
    entry = {
        "prompt_set": "embedded:mt_bench",
        "num_prompts": 80,
        "num_draft_tokens": 3,
        "num_drafts": 6715,
        "acceptance_length": length,
        "acceptance_by_position": [0.352, 0.133, 0.061],
        "simulated_acceptance_length": 1.523,
        "output_tokens_per_second": {"with_draft": 260.0, "without": 473.0},
    }
    greedy = {"float32": {"prompts": 16, "same": 16}}
    write_json(path / "draft" / "serving_report.json", {"runs": [entry], "greedy": greedy})
    write_manifest(path / "draft", manifest("05_convert_checkpoint", {"bytes": 1}))
    return path


@pytest.fixture
def run_dir(tmp_path):
    return write_run(tmp_path / "mine")


def cells(page: str) -> list[str]:
    return re.findall(r"<td[^>]*>(.*?)</td>", page)


def test_the_tables_hold_the_numbers_of_the_run(run_dir):
    found = cells(report.render(run_dir))
    for value in ("1.546", "1.523", "0.352, 0.133, 0.061", "16 of 16", "93.000%", "7.1000", "0.377", "12"):
        assert value in found, value


def test_text_from_the_data_is_shown_and_never_run(run_dir):
    page = report.render(run_dir)
    assert "a &lt;b&gt;bold&lt;/b&gt; reason" in page
    assert "<b>bold</b>" not in page


def test_supervised_tokens_are_marked(run_dir, smollm2_tokenizer):
    page = report.render(run_dir)
    marks = re.findall(r"<mark>(.*?)</mark>", page, flags=re.S)
    assert len(marks) == 4
    assert open_verifier(VerifierSection()).vocab_size == 49152


def test_a_run_that_has_only_begun_has_a_report(tmp_path):
    write_run_state(
        tmp_path / "samples", "01_prepare_data", Identity({}, {}, {}), "python 01_prepare_data.py --config c.yaml"
    )
    page = report.render(tmp_path)
    assert "01_prepare_data" in page
    assert "Plotly" not in page  # nothing to draw, so five megabytes less


def test_two_runs_stand_side_by_side(run_dir, tmp_path):
    other = write_run(tmp_path / "other", length=1.4)
    found = cells(report.render(run_dir, other))
    assert {"mine", "other", "1.546", "1.400"} <= set(found)


def test_an_artifact_that_cannot_be_read_is_named(run_dir):
    (run_dir / "samples" / "samples.parquet").write_bytes(b"x")
    with pytest.raises(PipelineError, match=r"samples\.parquet: can't be read"):
        report.render(run_dir)


def test_the_trailing_mean_knows_nothing_of_later_steps():
    values = [float(i % 7) for i in range(60)]
    slow = [sum(values[max(0, i - 24) : i + 1]) / len(values[max(0, i - 24) : i + 1]) for i in range(60)]
    assert report._smoothed(values) == pytest.approx(slow, abs=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_draws_every_plot_without_an_error_or_a_request(run_dir, width):
    from playwright.sync_api import sync_playwright

    path = report.write_report(run_dir)
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = browser.new_page(viewport={"width": width, "height": 900})
        said, asked = [], []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_function("document.querySelectorAll('.plot .main-svg').length > 0")
        empty = "[...document.querySelectorAll('.plot')].filter(p => !p.querySelector('.trace, .bars, .boxes')).length"
        assert page.evaluate(empty) == 0
        assert page.evaluate("document.querySelectorAll('.plot').length") == 6
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        browser.close()
    assert said == []
    assert asked == [path.as_uri()]
