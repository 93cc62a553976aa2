"""What the machine must have: each check seen to pass on a good host and to fail on one broken thing.

The outputs are written to nvidia-smi's documented formats; nobody here has such a host.
"""

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from safetensors.torch import save_file

from common import preflight
from common.config import VerifierSection, load_config
from common.errors import PipelineError
from common.preflight import Host, check_host, parse_cards, parse_cuda, parse_links, parse_processes
from common.verifier import open_verifier

ROOT = Path(__file__).parent.parent
PACKAGES = {"vllm": "0.32.0", "torch": "2.13.0+cu130", "transformers": "5.19.0"}
PACKAGES |= {"speculators": "0.9.0", "compressed-tensors": "0.17.0"}
CARDS = "".join(
    f"{i}, GPU-0000000{i}-1111-2222-3333-444444444444, NVIDIA RTX PRO 6000 Blackwell Server Edition, 97887, 4, 12.0, 580.95.05\n"
    for i in range(8)
)
HEAD = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.95.05              Driver Version: 580.95.05      CUDA Version: 13.0     |
+-----------------------------------------+------------------------+----------------------+
"""
PCIE = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tPIX\tNODE\tSYS\tNODE\t0-63\t0\t\tN/A
GPU1\tPIX\t X \tNODE\tSYS\tNODE\t0-63\t0\t\tN/A
GPU2\tNODE\tNODE\t X \tSYS\tPHB\t0-63\t0\t\tN/A
GPU3\tSYS\tSYS\tSYS\t X \tSYS\t64-127\t1\t\tN/A
NIC0\tNODE\tNODE\tPHB\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""
NVLINK = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-63\nGPU1\tNV18\t X \t0-63\n"
PROCESSES = "4242, VLLM::Worker_TP0, 70210\n4243, VLLM::Worker_TP1, 70210\n4242, VLLM::Worker_TP0, 70210\n"


@pytest.fixture
def host():
    return Host(
        cards=parse_cards(CARDS),
        cuda=parse_cuda(HEAD),
        links=parse_links(PCIE),
        shm_bytes=64 * 2**30,
        open_files=65536,
        environment={"NCCL_P2P_LEVEL": "SYS"},
        packages=PACKAGES,
    )


@pytest.fixture
def config():
    return load_config(ROOT / "configs" / "kimi_k25_int4.yaml")


@pytest.fixture
def kimi_sized(tmp_path, monkeypatch):
    """Kimi-K2.5's sizes; its 595 GB are only said to be there."""
    text = {"vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64}
    text |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_key_value_heads": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    monkeypatch.setattr(preflight, "weight_bytes", lambda _verifier: 595_000_000_000)
    return open_verifier(VerifierSection(path=str(tmp_path)))


def with_args(config, **changes):
    section = config.verifier
    section = section.model_copy(update={"engine_args": {**section.engine_args, **changes}})
    return config.model_copy(update={"verifier": section})


def warned(config, verifier, host, script="02_extract_hidden_states"):
    return "\n".join(map(str, check_host(script, config, verifier, host)[0]))


def refused(config, verifier, host, script="02_extract_hidden_states"):
    with pytest.raises(PipelineError) as error:
        check_host(script, config, verifier, host)
    return str(error.value)


# ---- what nvidia-smi says ----


def test_cards_are_read_in_bytes_with_capability_and_driver():
    cards = parse_cards(CARDS)
    assert [card.index for card in cards] == list(range(8))
    assert cards[3].total_bytes == 97887 * 2**20 and cards[3].used_bytes == 4 * 2**20
    assert (cards[0].capability, cards[0].driver) == (Version("12.0"), Version("580.95.05"))


@pytest.mark.parametrize(
    ("text", "version"),
    [(HEAD, Version("13.0")), ("| CUDA UMD Version: 13.1 |", Version("13.1")), ("No devices were found", None)],
)
def test_the_drivers_cuda_is_read_from_the_head(text, version):
    assert parse_cuda(text) == version


def test_links_are_those_between_cards():
    assert parse_links(PCIE) == {"PIX", "NODE", "SYS"}  # PHB is a network card's
    assert parse_links(NVLINK) == {"NV18"}
    assert parse_links("\x1b[4m\tGPU0\tGPU1\x1b[0m\nGPU0\t X \tPXB\nGPU1\tPXB\t X \n") == {"PXB"}


def test_processes_are_named_once():
    assert parse_processes(PROCESSES) == ["VLLM::Worker_TP0 (4242)", "VLLM::Worker_TP1 (4243)"]
    assert parse_processes("\n") == []


def write_smi(tmp_path, monkeypatch, body):
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_the_host_is_what_its_nvidia_smi_prints(tmp_path, monkeypatch):
    for name, text in {"cards": CARDS, "apps": PROCESSES, "topo": PCIE, "head": HEAD}.items():
        (tmp_path / name).write_text(text)
    cases = f"--query-gpu=*) cat {tmp_path}/cards;; --query-compute-apps=*) cat {tmp_path}/apps;; topo) cat {tmp_path}/topo;;"
    write_smi(tmp_path, monkeypatch, f'case "$1" in {cases} *) cat {tmp_path}/head;; esac')
    host = preflight.read_host()
    assert (len(host.cards), len(host.processes), host.cuda) == (8, 2, Version("13.0"))
    assert host.links == {"PIX", "NODE", "SYS"} and host.shm_bytes > 0 and host.open_files > 0
    assert "transformers" in host.packages


def test_a_driver_that_does_not_answer_is_told_in_its_own_words(tmp_path, monkeypatch):
    words = "Failed to initialize NVML: Driver/library version mismatch"
    write_smi(tmp_path, monkeypatch, f'echo "{words}"; exit 18')
    with pytest.raises(PipelineError, match=f"nvidia-smi: {words}"):
        preflight.read_host()


# ---- a good host ----


@pytest.mark.parametrize("script", ["01_prepare_data", "02_extract_hidden_states", "04_train", "05_convert_checkpoint"])
def test_a_good_host_is_left_in_peace(config, kimi_sized, host, script):
    assert warned(config, kimi_sized, host, script) == ""


def test_memory_is_worked_out_a_card(config, kimi_sized, host):
    """97,887 MiB x 0.92 = 94.43 GB, less 595/8 = 74.38 GB of weights and 4 GB: 16.05 GB.

    A token takes 2 x 61 x (512 + 64) = 70,272 bytes of cache and in stage 2 another 4 x 7168 x 2 = 57,344 of states.
    """
    _, rows = check_host("02_extract_hidden_states", config, kimi_sized, host)
    assert rows["weights a card"] == "74.4 GB"
    assert rows["cache a card"] == "16.1 GB, 128 kB a token"
    assert rows["sequences at once"] == "30 of 4,097 tokens"  # 16.05e9 / (4,097 x 127,616) = 30.7
    _, rows = check_host("01_prepare_data", config, kimi_sized, host)
    assert rows["cache a card"] == "16.1 GB, 70.3 kB a token"


def test_a_cpu_without_nvidia_smi_is_left_in_peace(smollm2, monkeypatch):
    monkeypatch.setattr(preflight, "read_host", Host)
    verifier = open_verifier(VerifierSection(path=str(smollm2)))
    config = load_config(ROOT / "configs" / "smollm2_135m.yaml")
    assert check_host("02_extract_hidden_states", config, verifier) == ([], {})


def test_stage_3_asks_nothing_of_the_cards(config, kimi_sized):
    assert check_host("03_build_vocab_mapping", config, kimi_sized, Host()) == ([], {})


def test_heads_of_other_attention_are_shared_out_over_the_cards(smollm2):
    """SmolLM2: 30 layers, 3 key heads of 64, keys and values of 2 bytes; a card holds one head at least."""
    verifier = open_verifier(VerifierSection(path=str(smollm2)))
    assert preflight.kv_bytes_per_token(verifier, 1) == 30 * 3 * 64 * 2 * 2
    assert preflight.kv_bytes_per_token(verifier, 8) == 30 * 1 * 64 * 2 * 2


# ---- one broken thing each ----


def test_too_few_cards(config, kimi_sized, host):
    words = refused(config, kimi_sized, replace(host, cards=host.cards[:7]))
    assert "verifier.tensor_parallel_size: 8; nvidia-smi shows 7 cards" in words
    assert "nvidia-smi shows 0 cards" in refused(config, kimi_sized, Host())


@pytest.mark.parametrize("script", ["02_extract_hidden_states", "04_train"])
def test_a_server_that_still_holds_the_cards_is_named(config, kimi_sized, host, script):
    cards = [replace(card, used_bytes=70_000_000_000) if card.index < 2 else card for card in host.cards]
    words = refused(config, kimi_sized, replace(host, cards=cards, processes=parse_processes(PROCESSES)), script)
    assert "cards: 0, 1 hold up to 70 GB for VLLM::Worker_TP0 (4242), VLLM::Worker_TP1 (4243)" in words
    assert "stop that server" in words
    assert "another container" in refused(config, kimi_sized, replace(host, cards=cards), script)


@pytest.mark.parametrize("cuda", [Version("12.7"), None])
def test_a_driver_whose_cuda_is_too_old_for_these_cards(config, kimi_sized, host, cuda):
    words = refused(config, kimi_sized, replace(host, cuda=cuda))
    assert "these cards need 12.8\n  fix: install driver 570 or later" in words


def test_a_driver_older_than_the_cards(config, kimi_sized, host):
    cards = [replace(card, driver=Version("550.54")) for card in host.cards]
    assert "driver: 550.54 is older than these cards" in refused(config, kimi_sized, replace(host, cards=cards))


def test_older_cards_do_not_need_the_newest_driver(config, kimi_sized, host):
    cards = [replace(card, capability=Version("9.0"), driver=Version("550.54")) for card in host.cards]
    assert warned(config, kimi_sized, replace(host, cards=cards, cuda=Version("12.4"))) == ""


def test_cards_of_different_kinds(config, kimi_sized, host):
    cards = [replace(host.cards[0], name="NVIDIA RTX A4000"), *host.cards[1:]]
    assert "are of different kinds: NVIDIA RTX A4000, " in refused(config, kimi_sized, replace(host, cards=cards))


def test_weights_that_leave_no_room(config, kimi_sized, host, monkeypatch):
    cards = [replace(card, total_bytes=78 * 2**30) for card in host.cards]
    words = refused(config, kimi_sized, replace(host, cards=cards))
    assert (
        "74.4 GB of weights and 523 MB for 4,097 tokens don't fit beside 4 GB of activations into 92% of 83.8 GB"
        in words
    )


def test_a_utilization_that_leaves_no_room(config, kimi_sized, host):
    assert "don't fit" in refused(with_args(config, gpu_memory_utilization=0.75), kimi_sized, host)


def test_little_shared_memory(config, kimi_sized, host):
    words = refused(config, kimi_sized, replace(host, shm_bytes=64_000_000))
    assert "/dev/shm: 64 MB" in words and "--ipc=host" in words


def test_few_open_files(config, kimi_sized, host):
    assert "ulimit: 1024 open files are allowed" in warned(config, kimi_sized, replace(host, open_files=1024))


@pytest.mark.parametrize("name", PACKAGES)
def test_another_version_than_the_one_that_was_read(config, kimi_sized, host, name):
    assert f"{name}: 0.0.1; " in warned(config, kimi_sized, replace(host, packages={**PACKAGES, name: "0.0.1"}))
    absent = {key: value for key, value in PACKAGES.items() if key != name}
    assert f"{name}: is not installed; " in warned(config, kimi_sized, replace(host, packages=absent))


def test_nccl_that_is_left_to_guess_over_pcie(config, kimi_sized, host):
    words = warned(config, kimi_sized, replace(host, environment={}))
    assert "NCCL_P2P_LEVEL: is unset, and the cards are joined by PCIe only (NODE, PIX, SYS)" in words
    assert warned(config, kimi_sized, replace(host, environment={}, links=parse_links(NVLINK))) == ""


def test_peer_access_switched_off(config, kimi_sized, host):
    environment = {"NCCL_P2P_LEVEL": "SYS", "NCCL_P2P_DISABLE": "1"}
    assert "every exchange goes through host memory" in warned(
        config, kimi_sized, replace(host, environment=environment)
    )


def test_custom_all_reduce_over_pcie(config, kimi_sized, host):
    words = warned(with_args(config, disable_custom_all_reduce=False), kimi_sized, host)
    assert "add disable_custom_all_reduce: true" in words


# ---- the commands ----


@pytest.fixture
def whole_run(tmp_path):
    """A verifier directory for `survey`, and a configuration that names it."""
    verifier = tmp_path / "v"
    verifier.mkdir()
    sizes = {"vocab_size": 320, "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
    (verifier / "config.json").write_text(json.dumps(sizes))
    save_file({"model.norm.weight": torch.ones(8)}, verifier / "model.safetensors")
    path = tmp_path / "run.yaml"
    path.write_text(f"run: {{dir: {tmp_path}/run}}\nverifier: {{path: {verifier}, tensor_parallel_size: 8}}\n")
    return path


def test_all_stages_needs_are_told_at_once(whole_run, host):
    lines = preflight.survey(load_config(whole_run), replace(host, open_files=8))
    assert any(line.startswith("01_prepare_data: weights a card") for line in lines)
    assert sum("ulimit" in line for line in lines) == 1
    assert "free on the disk" in "\n".join(lines)


def test_the_command_ends_with_2_where_something_stops_a_run(whole_run, capsys, monkeypatch):
    monkeypatch.setattr(preflight, "read_host", Host)
    (whole_run.parent / "v" / "model.safetensors").write_bytes(b"cut")
    assert preflight.main(["--config", str(whole_run)]) == 2
    words = capsys.readouterr().err
    assert "nvidia-smi shows 0 cards" in words and "is not a safetensors file" in words


def test_every_run_of_a_stage_looks_at_the_machine_first(whole_run, caplog):
    """The kind of machine that CI has: no cards, and a configuration that wants eight."""
    import importlib

    from tests.train_rig import write_tokenizer

    write_tokenizer(whole_run.parent / "v")
    verifier = whole_run.parent / "v"
    (verifier / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    (verifier / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    prompts = whole_run.parent / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n")
    flags = ["--config", str(whole_run), "--prepare.sources", json.dumps([{"path": str(prompts)}])]
    for also in ([], ["--check"]):
        assert importlib.import_module("01_prepare_data").main([*flags, *also]) == 2
        assert "nvidia-smi shows 0 cards" in caplog.text
        caplog.clear()
    assert not (whole_run.parent / "run" / "samples").exists()


# ---- the corpus ----


def test_a_thousand_samples_take_what_the_arithmetic_says():
    """2,000,000 tokens of 4 x 7168 x 2 + 9 bytes; FP8: 4 x (7168 + 4) + 9."""
    plan = preflight.plan_corpus(1000)
    assert plan.bfloat16_bytes == 2_000_000 * 57_353
    assert plan.float8_bytes == 2_000_000 * 28_697
    assert plan.extract_hours == pytest.approx(2_000_000 / 7400 / 3600)
    assert plan.train_hours == pytest.approx(4_000_000 / 8 / (6e9 / (1500 * 3600)) / 3600)
    assert plan.answer_hours == pytest.approx(1_500_000 / 1000 / 3600)


def test_the_runbooks_table_is_the_one_that_the_code_computes(capsys):
    assert preflight.main(["--table"]) == 0
    table = capsys.readouterr().out.strip()
    assert len(table.splitlines()) == 5
    assert table in (ROOT / "docs" / "RUNBOOK.md").read_text()


def test_the_runbooks_other_figures_are_computed_too(kimi_sized):
    text = " ".join((ROOT / "docs" / "RUNBOOK.md").read_text().split())
    rate = preflight.PREFILL_TOKENS_PER_SECOND
    assert f"{rate * preflight.bytes_per_token(4, 7168, 'bfloat16') / 1e6:.0f} MB/s" in text
    assert f"extraction at {rate:,.0f} tokens/s" in text
    assert f"{preflight.TRAIN_TOKENS_PER_CARD_SECOND:,.0f} tokens/s a card" in text
    assert f"answers at {preflight.GENERATE_TOKENS_PER_SECOND:,.0f} tokens/s" in text
    assert f"the weights take {preflight.weight_bytes(kimi_sized) / 8e9:.0f} GB of each" in text
