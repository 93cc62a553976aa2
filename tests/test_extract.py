"""Stage 2 without an engine: what is checked before, watched during and refused after. Field faults, parts E and H."""

import dataclasses
import json

import pytest
import torch

from common import hidden_states as hs
from common.config import VerifierSection, load_config
from common.engine import FIRST_VERSION_WITH_LAST_LAYER, check_can_extract, stream_requests
from common.errors import PipelineError, Problems
from common.manifest import Manifest, write_manifest
from common.samples import FILE_NAME, Samples, open_samples, write_samples
from common.verifier import VerifierHead, open_verifier
from tests.conftest import make_sample, script

stage = script("02_extract_hidden_states")


@pytest.fixture
def run_dir(tmp_path):
    """A run directory with samples and, for each, a file and a ledger line."""
    made = [make_sample(8 + i, 3, seed=i) for i in range(6)]
    write_samples(tmp_path / "samples", made)
    verifier = open_verifier(VerifierSection())
    counts = {"samples": len(made)}
    manifest = Manifest("01", 1, {}, {}, verifier.fingerprints, [], counts, {}, "", "", {}, 0.0, "")
    write_manifest(tmp_path / "samples", manifest)
    (tmp_path / "c.yaml").write_text(f"run: {{dir: {tmp_path}}}\nextract: {{aux_layer_ids: [2, 15, 27]}}\n")
    return tmp_path


def extract(run_dir, index, shard=(1, 1)):
    """What the worker does for one sample, with states that are a function of the sample."""
    sample, out_dir = open_samples(run_dir)[index], run_dir / "hidden_states"
    out_dir.mkdir(exist_ok=True)
    slots = [torch.full((sample.num_tokens, 4), float(index + slot)) for slot in range(4)]
    content = hs.encode(torch.from_numpy(sample.input_ids), torch.from_numpy(sample.loss_mask), slots, "bfloat16")
    path = hs.data_path(out_dir, index)
    path.write_bytes(content)
    entry = hs.LedgerEntry(index, sample.sample_id, sample.num_tokens, len(content), hs.sha256_file(path))
    ledger = hs.Ledger(hs.ledger_path(out_dir, shard))
    ledger.add(entry)
    ledger.close()


def done(run_dir):
    out_dir = run_dir / "hidden_states"
    return sorted(stage.find_done(out_dir, hs.ledger_path(out_dir), open_samples(run_dir)))


def test_what_the_ledger_holds_is_done(run_dir):
    for index in (0, 2, 5):
        extract(run_dir, index)
    assert done(run_dir) == [0, 2, 5]


@pytest.mark.parametrize("content", [b"", b"half", None], ids=["empty", "half-written", "missing"])
def test_a_file_that_is_not_whole_is_not_done(run_dir, content):
    extract(run_dir, 0)
    path = hs.data_path(run_dir / "hidden_states", 0)
    path.unlink() if content is None else path.write_bytes(content)
    assert done(run_dir) == []


def test_a_file_with_one_wrong_bit_is_not_done(run_dir):
    extract(run_dir, 0)
    path = hs.data_path(run_dir / "hidden_states", 0)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert done(run_dir) == []


def test_a_file_without_a_ledger_line_is_not_done(run_dir):
    extract(run_dir, 0)
    hs.ledger_path(run_dir / "hidden_states").unlink()
    assert done(run_dir) == []


def test_reordered_samples_are_not_taken_for_the_old_ones(run_dir):
    extract(run_dir, 0)
    samples = [open_samples(run_dir)[i] for i in (1, 0, 2, 3, 4, 5)]
    write_samples(run_dir / "samples", samples)
    assert done(run_dir) == []


def config_of(run_dir, **extract_settings):
    config = load_config(run_dir / "c.yaml")
    return config.model_copy(update={"extract": config.extract.model_copy(update=extract_settings)})


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([2, 15, 30], "30 is the last layer, which is added by itself"),
        ([2, 15, 31], "the verifier has 30 layers, found 31"),
        ([15, 2, 27], "is not ascending"),
        ([2, 2, 27], "is not ascending, or has repeats"),
        ([], "or is empty"),
    ],
)
def test_layer_ids_that_mean_something_else_are_refused(run_dir, ids, words):
    with pytest.raises(PipelineError, match=words):
        stage.check(config_of(run_dir, aux_layer_ids=ids))


def test_right_inputs_pass_and_the_estimate_holds_both_dtypes(run_dir):
    config = config_of(run_dir)
    inputs = stage.check(config)
    rows = stage.estimate(config, inputs)
    tokens = sum(8 + i for i in range(6))
    assert rows["tokens"] == str(tokens)
    assert rows["bytes in bfloat16"] == hs_bytes(tokens * (4 * 2 * 576 + 9))
    assert rows["bytes in float8_e4m3fn"] == hs_bytes(tokens * (4 * (576 + 4) + 9))
    assert inputs.fingerprints["aux_layer_ids"] == "2,15,27,30"


def hs_bytes(count):
    from common.files import format_bytes

    return format_bytes(count)


def test_samples_of_another_verifier_are_refused(run_dir):
    path = run_dir / "samples" / "manifest.json"
    record = json.loads(path.read_text())
    record["fingerprints"]["chat_template"] = "edited"
    path.write_text(json.dumps(record))
    with pytest.raises(PipelineError, match="the samples were made with another chat template"):
        stage.check(config_of(run_dir))


def test_an_endpoint_is_refused_rather_than_ignored(run_dir):
    with pytest.raises(PipelineError, match="is not supported by this version"):
        stage.check(config_of(run_dir, endpoint="http://localhost:8000"))


def test_a_disk_that_is_too_small_is_refused_before_the_engine_starts(run_dir, monkeypatch):
    monkeypatch.setattr(stage, "free_bytes", lambda _path: 100_000)
    config = config_of(run_dir, min_free_bytes=0)
    with pytest.raises(PipelineError, match=r"disk: .* are needed, 100 kB can be used"):
        stage._check_space(config, stage.check(config), run_dir, range(6))


def test_an_older_vllm_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("common.engine.vllm_version", lambda: type(FIRST_VERSION_WITH_LAST_LAYER)("0.25.0"))
    with pytest.raises(PipelineError, match=r"vllm: 0\.25\.0 can't return the states of the last layer"):
        check_can_extract()


# ---- while it runs ----


def watch(run_dir, min_free_bytes=0):
    (run_dir / "hidden_states").mkdir(exist_ok=True)
    out_dir = run_dir / "hidden_states"
    return stage.Watch(out_dir, hs.ledger_path(out_dir), min_free_bytes)


def test_new_ledger_lines_are_seen_once(run_dir):
    seen = watch(run_dir)
    seen.unwritten = 2
    extract(run_dir, 0)
    extract(run_dir, 1)
    assert [entry.index for entry in seen.wait_until(0)] == [0, 1]
    assert (seen.unwritten, list(seen.wait_until(0))) == (0, [])


@pytest.mark.parametrize(
    ("kind", "what", "fix"),
    [
        ("disk_full", "No space left on device", "free some space, then run the same command"),
        ("states", "a state that is not finite at token 17, slot 2", "nothing of these samples was written"),
    ],
)
def test_what_the_worker_could_not_write_stops_the_stage_by_name(run_dir, kind, what, fix):
    seen = watch(run_dir)
    (run_dir / "hidden_states" / ".faults.jsonl").write_text(
        json.dumps({"file": "data_3.pt", "kind": kind, "what": what}) + "\n"
    )
    with pytest.raises(PipelineError, match=r"data_3\.pt") as error:
        list(seen.wait_until(0))
    assert what in str(error.value) and fix in str(error.value)


def test_a_disk_that_runs_low_stops_the_stage(run_dir):
    with pytest.raises(PipelineError, match=r"less than extract\.min_free_bytes"):
        list(watch(run_dir, min_free_bytes=10**18).wait_until(0))


def test_a_worker_that_writes_nothing_is_found(run_dir, monkeypatch):
    monkeypatch.setattr(stage, "STALLED_SECONDS", 0.05)
    seen = watch(run_dir)
    seen.unwritten = 1
    with pytest.raises(PipelineError, match="1 samples were computed and not written"):
        list(seen.wait_until(0))


@pytest.fixture(scope="module")
def head():
    torch.manual_seed(0)
    weight = torch.randn(50, 16)
    return VerifierHead(weight, weight, torch.rand(16) + 0.5, 1e-5)


def ask(head, tmp_path, states, *, said):
    """Puts each row's state into a file and asks the canary whether it says `said`."""
    canary = stage.Canary(head)
    path = tmp_path / "data_0.pt"
    for row, token in zip(states, said, strict=True):
        slots = [torch.zeros(1, 16), row[None]]
        path.write_bytes(hs.encode(torch.zeros(1), torch.ones(1), slots, "bfloat16"))
        canary.ask(path, token)
    canary.judge(final=True)
    return canary


def test_the_canary_agrees_with_right_states(head, tmp_path):
    states = torch.randn(20, 16) * 5
    said = head.logits(states).argmax(-1).tolist()
    assert ask(head, tmp_path, states, said=said).agreement >= 0.9


@pytest.mark.parametrize("fault", ["norm applied already", "another request", "another layer"])
def test_the_canary_stops_wrong_states(head, tmp_path, fault):
    states = torch.randn(20, 16) * 5
    said = head.logits(states).argmax(-1).tolist()
    skewed = VerifierHead(head.embed, head.head, torch.linspace(-2, 2, 16), head.eps)  # a norm that matters
    wrong = {
        "norm applied already": skewed.normed(states),
        "another request": states.roll(1, 0),
        "another layer": torch.randn(20, 16),
    }[fault]
    said = skewed.logits(states).argmax(-1).tolist() if fault == "norm applied already" else said
    with pytest.raises(PipelineError, match=r"says what the verifier says for \d+ of \d+ samples"):
        ask(skewed if fault == "norm applied already" else head, tmp_path, wrong, said=said)


# ---- shards and verification ----


def test_shards_are_disjoint_and_join(run_dir):
    for index in range(6):
        extract(run_dir, index, shard=(index % 2 + 1, 2))
    out_dir, samples = run_dir / "hidden_states", open_samples(run_dir)
    stage.merge(out_dir, samples)
    assert done(run_dir) == list(range(6))
    assert not list(out_dir.glob("ledger.*-of-*.jsonl"))


def test_a_shard_that_is_missing_is_named(run_dir):
    for index in (0, 2, 4):
        extract(run_dir, index, shard=(1, 2))
    with pytest.raises(PipelineError, match="3 of 6 samples are in no ledger: 1, 3, 5"):
        stage.merge(run_dir / "hidden_states", open_samples(run_dir))


def test_verify_strikes_what_is_damaged_and_names_it(run_dir):
    for index in range(6):
        extract(run_dir, index)
    out_dir, samples = run_dir / "hidden_states", Samples(run_dir / "samples" / FILE_NAME, None)
    assert stage.verify(out_dir, samples) == 0
    hs.data_path(out_dir, 4).write_bytes(b"x")
    with pytest.raises(PipelineError, match=r"1 of 6 files are missing, damaged or of other samples: data_4\.pt"):
        stage.verify(out_dir, samples)
    assert done(run_dir) == [0, 1, 2, 3, 5]


# ---- a fake engine ----


@dataclasses.dataclass
class Output:
    request_id: str
    finished: bool = True


class FakeEngine:
    """Finishes requests last in, first out: what a real engine may do."""

    def __init__(self):
        self.llm_engine = self
        self.held, self.most = [], 0

    def add_request(self, key, _prompt, _params):
        self.held.append(key)
        self.most = max(self.most, len(self.held))

    def step(self):
        return [Output(self.held.pop())]


def test_outputs_are_found_by_key_in_any_order():  # E1
    from common.engine import EngineRequest

    fake = FakeEngine()
    requests = [EngineRequest(str(i), [i], None) for i in range(9)]
    keys = [key for key, output in stream_requests(fake, requests, max_in_flight=3) if output.request_id == key]
    assert sorted(keys) == [str(i) for i in range(9)]
    assert keys != sorted(keys)
    assert fake.most == 3


def test_an_engine_that_dies_is_one_message_that_says_how_to_go_on():
    from common.engine import EngineRequest

    class Dying(FakeEngine):
        def step(self):
            from vllm.v1.engine.exceptions import EngineDeadError

            raise EngineDeadError

    with pytest.raises(PipelineError, match="its process ended while requests were running") as error:
        list(stream_requests(Dying(), [EngineRequest("0", [1], None)], max_in_flight=1))
    assert "run the same command again, it goes on with what is missing" in str(error.value)


def test_a_bug_while_streaming_stays_a_bug():
    from common.engine import EngineRequest

    class Broken(FakeEngine):
        def step(self):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(stream_requests(Broken(), [EngineRequest("0", [1], None)], max_in_flight=1))


def test_problems_of_layers_are_gathered():
    problems = Problems()
    stage._check_layers(problems, [31, 2], open_verifier(VerifierSection()))
    assert len(problems) == 2
