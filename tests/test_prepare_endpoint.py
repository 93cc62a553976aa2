"""Answers from a running server: what is asked, what survives a bad one, and what a rerun asks again."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from common import endpoint
from common.errors import PipelineError
from common.manifest import read_manifest
from common.samples import open_samples
from tests.conftest import ROOT, script
from tests.endpoint_rig import FAULTS, FaultyServer

stage = script("01_prepare_data")


@pytest.fixture(autouse=True)
def no_report_and_no_waiting(monkeypatch):
    monkeypatch.setattr("common.stage._write_report", lambda run_dir: None)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.01)


def write_config(tmp_path, url, **generate):
    rows = [{"prompt": f"{name} is the question?"} for name in "abcdefghijklmnop"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"endpoint": url, "temperature": 0.0, "max_tokens": 12, "max_num_seqs": 4, **generate}
    config = tmp_path / "c.yaml"
    prepare = {
        "sources": [{"path": str(tmp_path / "rows.jsonl")}],
        "max_tokens": 128,
        "drop_looping": False,
        "near_duplicate_threshold": 1.0,
    }
    config.write_text(yaml.safe_dump({"run": {"dir": str(tmp_path / "run")}, "prepare": prepare, "generate": settings}))
    return config


def run(config, *flags):
    return stage.main(["--config", str(config), *flags])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def never(number, body):
    return None


def test_an_answer_is_the_ids_that_the_server_gives_after_those_it_was_shown(tmp_path):
    with FaultyServer(never) as server:
        assert run(write_config(tmp_path, server.url)) == 0
    samples = list(open_samples(tmp_path / "run"))
    assert len(samples) == 16
    for sample in samples:
        shown = sample.input_ids[~sample.loss_mask].tolist()
        assert tuple(shown) in server.answered
        assert sample.input_ids[sample.loss_mask].tolist() == [*shown[-3:][::-1], 2]
    assert len(server.asked) == 16


def test_sampling_settings_go_to_the_server(tmp_path):
    bodies = []
    with FaultyServer(lambda number, body: bodies.append(body)) as server:
        assert run(write_config(tmp_path, server.url, temperature=0.7, top_p=0.9, top_k=20)) == 0
    assert {(b["temperature"], b["top_p"], b["top_k"], b["max_tokens"]) for b in bodies} == {(0.7, 0.9, 20, 12)}
    assert all(body["return_token_ids"] and body["stop_token_ids"] == [2] for body in bodies)
    assert len({body["seed"] for body in bodies}) == 16


def test_text_of_a_server_without_ids_is_tokenised_and_gets_the_end_token_it_left_out(tmp_path, smollm2_tokenizer):
    with FaultyServer(never, with_ids=False) as server:
        assert run(write_config(tmp_path, server.url)) == 0
    for sample in open_samples(tmp_path / "run"):
        assert smollm2_tokenizer.decode(sample.input_ids[sample.loss_mask].tolist()) == "made<|im_end|>"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_costs_no_answer(tmp_path, fault):
    with FaultyServer(lambda number, body: fault if number % 3 == 0 else None) as server:
        assert run(write_config(tmp_path, server.url)) == 0
    assert len(server.faults) >= 6
    assert len(open_samples(tmp_path / "run")) == 16
    assert len(lines(tmp_path / "run" / "samples" / "answers.jsonl")) == 16
    assert not (tmp_path / "run" / "samples" / "failed.jsonl").exists()


def test_failures_are_listed_and_the_same_command_asks_for_them_alone(tmp_path, caplog):
    refused = []

    def refuse_two(number, body):
        if len(refused) < 2 or tuple(body["prompt"]) in refused:
            refused.append(tuple(body["prompt"]))
            return "400"
        return None

    with FaultyServer(refuse_two) as server:
        config = write_config(tmp_path, server.url)
        assert run(config) == 2
    assert "failed.jsonl: lists 2 prompts without an answer, the last: Error code: 400" in caplog.text
    failed = lines(tmp_path / "run" / "samples" / "failed.jsonl")
    assert len(failed) == 2 and all(row["conversation_id"] and "on order" in row["error"] for row in failed)
    assert len(lines(tmp_path / "run" / "samples" / "answers.jsonl")) == 14
    with FaultyServer(never) as server:
        assert run(config, "--generate.endpoint", server.url) == 0
    assert sorted(server.asked) == sorted(set(refused))
    assert len(open_samples(tmp_path / "run")) == 16
    assert not (tmp_path / "run" / "samples" / "failed.jsonl").exists()


def test_failures_that_are_allowed_are_left_out_and_counted(tmp_path):
    with FaultyServer(lambda number, body: "400" if number in (3, 4) else None) as server:
        assert run(write_config(tmp_path, server.url, max_failed=2)) == 0
    assert len(open_samples(tmp_path / "run")) == 14
    assert read_manifest(tmp_path / "run" / "samples").counts["dropped_reasons"] == {"no answer from the server": 2}


def test_a_server_that_goes_away_stops_the_stage_and_keeps_what_was_answered(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(endpoint, "GIVE_UP_AFTER", 3)
    with FaultyServer(lambda number, body: "dropped" if len(server.answered) >= 5 else None) as server:
        config = write_config(tmp_path, server.url, endpoint_retries=1)
        assert run(config) == 2
    assert "failed 3 times in a row, last: Connection error." in caplog.text
    kept = len(lines(tmp_path / "run" / "samples" / "answers.jsonl"))
    assert 1 <= kept <= len(server.answered)  # what was on its way when the stage gave up doesn't count
    with FaultyServer(never) as server:
        assert run(config, "--generate.endpoint", server.url) == 0
    assert len(server.asked) == 16 - kept


def test_an_answer_to_another_prompt_is_no_answer(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("asyncio.sleep", _no_sleep)
    with FaultyServer(never) as server:
        whole = server.answer
        server.answer = lambda body: whole(body | {"prompt": [7, *body["prompt"]]})
        assert run(write_config(tmp_path, server.url, endpoint_retries=1)) == 2
    assert "unusable response: it was shown another prompt than the one sent" in caplog.text


async def _no_sleep(seconds):
    return None


def test_a_server_that_is_not_there_is_named_before_anything_starts(tmp_path, caplog):
    assert run(write_config(tmp_path, "http://127.0.0.1:9/v1"), "--check") == 2
    assert "generate.endpoint: http://127.0.0.1:9/v1 does not answer as an OpenAI-compatible server" in caplog.text
    assert not (tmp_path / "run" / "samples").exists()


def test_a_model_that_is_not_served_is_refused():
    with FaultyServer(never) as server, pytest.raises(PipelineError, match="serves made, not other"):
        endpoint.check_endpoint(endpoint.Endpoint(server.url, "other"))


def test_a_finished_stage_asks_no_server(tmp_path, caplog):
    with FaultyServer(never) as server:
        config = write_config(tmp_path, server.url)
        assert run(config) == 0
    assert run(config) == 0
    assert "is complete with these inputs and settings" in caplog.text


def test_an_endpoint_that_would_be_ignored_is_refused(tmp_path, caplog):
    assert run(write_config(tmp_path, "http://127.0.0.1:9/v1", enabled=False)) == 2
    assert "generate.endpoint: would be ignored without generate.enabled" in caplog.text


# ---- a real server ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm_server(smollm2, tmp_path_factory):
    from tests.test_serve import free_port, wait_until_up

    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2)]
    command += ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512", "--port", str(port)]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        wait_until_up(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


@pytest.mark.slow
def test_a_killed_run_through_a_faulty_line_to_real_vllm_loses_no_answer(vllm_server, tmp_path, smollm2_tokenizer):
    """Each fault in turn on the first requests and now and then later; SIGKILL after the third answer, then a rerun."""
    order = dict(enumerate(FAULTS)) | {7: "500", 9: "cut", 12: "dropped"}
    with FaultyServer(lambda number, body: order.get(number), vllm_server) as proxy:
        config = write_config(tmp_path, proxy.url, max_num_seqs=3)
        answers = tmp_path / "run" / "samples" / "answers.jsonl"
        command = [sys.executable, "01_prepare_data.py", "--config", str(config)]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 200
        while not answers.exists() or answers.read_bytes().count(b"\n") < 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
        process.wait()
        before = answers.read_bytes().rpartition(b"\n")[0] + b"\n"
        done = len(before.splitlines())
        asked_before = len(proxy.asked)
        assert run(config) == 0
        assert set(FAULTS) <= set(proxy.faults)
    assert answers.read_bytes().startswith(before)
    assert len(set(proxy.asked[asked_before:])) == 16 - done
    keys = [row["key"] for row in lines(answers)]
    assert len(keys) == len(set(keys)) == 16
    samples = list(open_samples(tmp_path / "run"))
    assert len(samples) == 16
    for sample in samples:
        text = smollm2_tokenizer.decode(sample.input_ids.tolist())
        assert text.count("<|im_start|>assistant\n") == 1
        num_written = sample.num_supervised
        assert num_written == 12 or sample.input_ids[-1] == 2
