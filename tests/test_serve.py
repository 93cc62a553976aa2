"""Exports that real vLLM serves: both layouts, a misread one, an imported one, and the model card's own command."""

import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from common import export
from common.config import load_config
from common.serve_check import Bench
from common.simulation import Simulation, first_answer, judge
from common.verifier import load_head
from tests.serve_rig import make_served_run

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
stage = importlib.import_module("05_convert_checkpoint")


def write_elsewhere(config: Path, out: Path, *flags: str) -> Path:
    """Stage 5 once more over the same inputs, into another run directory."""
    out.mkdir()
    for name in ("samples", "hidden_states", "vocab_mapping", "checkpoints"):
        (out / name).symlink_to(config.parent / "run" / name)
    assert stage.main(["--config", str(config), "--run.dir", str(out), "--export.serve_check", "false", *flags]) == 0
    return out / "draft"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The YAML of a run whose draft is trained, exported and serve-checked, with its report."""
    config = make_served_run(tmp_path_factory.mktemp("served"), lossless_prompts=4)
    assert stage.main(["--config", str(config)]) == 0
    return config, json.loads((config.parent / "run" / "draft" / "serving_report.json").read_text())


def serve_validation(config_path: Path, draft_dir: Path):
    """The counters of the validation prompts, served with a draft of any layout."""
    config = load_config(config_path)
    inputs = stage.check(config)
    prompts = stage._prompt_set(config, inputs, "val").prompts
    stops = inputs.verifier.stop_token_ids
    bench = Bench(config.verifier, config.export, inputs.verifier.path, draft_dir, stops, draft_dir.parent / "vllm.log")
    with bench.engine(drafts=3) as llm:
        return bench.serve(llm, prompts, 3).counters


def simulation_of(config_path: Path) -> Simulation:
    config = load_config(config_path)
    inputs = stage.check(config)
    draft = export.read_draft(inputs.source.checkpoint)
    rows = [stage._row(inputs.source.hidden_states, i) for i in inputs.source.samples.indices_of("val")]
    answers = [first_answer(row, config.export.max_tokens) for row in rows]
    return Simulation(draft, answers, load_head(inputs.verifier).embed, inputs.source.mapping.target_ids)


def test_serving_accepts_what_was_simulated_for_the_same_prompts(exported):
    (entry,) = exported[1]["runs"]
    assert entry["num_drafts"] > 50 and entry["acceptance_length"] > 1.5
    assert entry["acceptance_length"] == pytest.approx(entry["simulated_acceptance_length"], rel=0.1)
    assert entry["agrees"] is True


def test_greedy_output_in_float32_is_the_verifiers(exported):
    assert exported[1]["greedy"]["float32"] == {"prompts": 4, "same": 4}


def test_the_report_has_the_time_per_token_of_every_setting(exported):
    settings = {(row["num_draft_tokens"], row["streams"]) for row in exported[1]["pace"]}
    assert settings == {(0, 1), (0, 8), (3, 1), (3, 8)}


def test_the_original_layout_without_embeddings_is_served_with_the_same_acceptance(exported, tmp_path):
    config, report = exported
    flags = ("--export.format", "llama_eagle3", "--export.share_embeddings", "true")
    draft_dir = write_elsewhere(config, tmp_path / "other", *flags)
    assert "LlamaForCausalLMEagle3" in (draft_dir / "config.json").read_text()
    found = serve_validation(config, draft_dir)
    (entry,) = report["runs"]
    assert found.acceptance_length == pytest.approx(entry["acceptance_length"], rel=0.02)


def test_a_server_that_ignores_norm_before_fc_is_found_by_its_rates(exported, tmp_path):
    config, _ = exported
    draft_dir = shutil.copytree(config.parent / "run" / "draft", tmp_path / "draft")
    file = draft_dir / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"norm_before_fc": False}))
    found, simulation = serve_validation(config, draft_dir), simulation_of(config)
    verdict = judge(
        found.acceptance_by_position, found.num_drafts, simulation.at(3), misread=lambda: simulation.misread(3)
    )
    assert verdict.agrees is False
    assert verdict.text.endswith("as if norm_before_fc is read as false")


def test_an_imported_draft_is_checked_and_starts_another_training(exported, tmp_path):
    """What was exported in the original layout comes back bit for bit, and stage 4 takes it as train.init_from."""
    config, _ = exported
    public = write_elsewhere(config, tmp_path / "public", "--export.format", "llama_eagle3")
    flags = ["--export.serve_check", "false", "--import", str(public)]
    imported = tmp_path / "imported"
    assert stage.main(["--config", str(config), "--run.dir", str(imported), *flags]) == 0
    ours, theirs = export.read_draft(imported / "draft"), export.read_draft(config.parent / "run" / "draft")
    assert all((ours.tensors[name] == tensor).all() for name, tensor in theirs.tensors.items())
    assert ours.aux_layer_ids == theirs.aux_layer_ids
    again = tmp_path / "again"
    again.mkdir()
    for name in ("samples", "hidden_states", "vocab_mapping"):
        (again / name).symlink_to(config.parent / "run" / name)
    start = ["--train.init_from", str(imported / "draft"), "--train.max_steps", "1"]
    train = importlib.import_module("04_train")
    assert train.main(["--config", str(config), "--run.dir", str(again), *start]) == 0


# ---- the model card ----


def test_the_card_is_one_that_the_hub_reads(exported):
    card = ModelCard.load(exported[0].parent / "run" / "draft" / "README.md")
    assert card.data.library_name == "speculators" and "eagle3" in card.data.tags


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def request(url: str, body: dict | None = None) -> str:
    data = json.dumps(body).encode() if body else None
    made = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(made, timeout=60) as response:
        return response.read().decode()


def wait_until_up(process: subprocess.Popen, base: str, log: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            request(f"{base}/health")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(1)
    pytest.fail(log.read_text()[-3000:])


def test_the_cards_command_starts_a_server_that_answers_with_the_draft(exported, tmp_path):
    """Nothing is added to the command but the port."""
    config, _ = exported
    card = (config.parent / "run" / "draft" / "README.md").read_text()
    blocks = re.findall(r"```\n(.*?)```", card, flags=re.S)
    (command,) = (block.strip() for block in blocks if "api_server" in block)
    port, log = free_port(), tmp_path / "server.log"
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with log.open("w") as out:
        process = subprocess.Popen(
            ["bash", "-c", f"exec env {command} --port {port}"],
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        base = f"http://127.0.0.1:{port}"
        wait_until_up(process, base, log)
        model = json.loads(request(f"{base}/v1/models"))["data"][0]["id"]
        asked = {"model": model, "messages": [{"role": "user", "content": "w5 w9 w30"}], "max_tokens": 24}
        answer = json.loads(request(f"{base}/v1/chat/completions", asked | {"temperature": 0}))
        assert answer["usage"]["completion_tokens"] == 24
        metrics = request(f"{base}/metrics")
        drafts = re.search(r"^vllm:spec_decode_num_drafts_total\{.*\} ([0-9.e+]+)$", metrics, flags=re.M)
        assert drafts and float(drafts[1]) > 0
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
