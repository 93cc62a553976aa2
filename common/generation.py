"""Answers by the verifier, and prompts by the verifier: on disk the moment they are finished.

    samples/
        prompts.jsonl   prompts that the verifier wrote itself: attempt, text or the reason it was thrown away
        answers.jsonl   key, completion_ids, finish_reason
        failed.jsonl    what the last run got no answer for: key, conversation_id, source, error

A rerun reads the first two and asks only for what is missing, failures among it; a line torn by a kill is dropped and
asked for again. Seeds come from the run's seed and the prompt, so an answer doesn't depend on the order of the
requests. Who answers, vLLM in this process or a server, is the same to everything here but two functions.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from common import endpoint, engine
from common.config import GenerateSection
from common.errors import PipelineError, Problem
from common.progress import Progress

PROMPTS_NAME, ANSWERS_NAME, FAILED_NAME = "prompts.jsonl", "answers.jsonl", "failed.jsonl"
# Attempts for one prompt of its own that is kept; SmolLM2 needs about 1.3.
MAX_ATTEMPTS_EACH = 4


@dataclass(frozen=True)
class Question:
    """A prompt to answer: the ids that a server would be shown, and where it came from."""

    prompt_ids: tuple[int, ...]
    conversation_id: str
    source: str

    @property
    def key(self) -> str:
        """A hash of the ids: the same prompt is asked once."""
        text = ",".join(map(str, self.prompt_ids))
        return hashlib.sha256(text.encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Answer:
    completion_ids: list[int]
    finish_reason: str  # "stop" at a stop id, which is the last completion id; "length" at the limit


class JsonLines:
    """An append-only log of objects that survives a kill: whole lines count, a torn last one is cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n"):
            path.write_bytes(content[: content.rfind(b"\n") + 1])
        self._file: BinaryIO | None = None

    def read(self) -> Iterator[dict[str, Any]]:
        if self.path.exists():
            with self.path.open(encoding="utf-8") as file:
                yield from (json.loads(line) for line in file)

    def add(self, **record: Any) -> None:
        """Flushed to the kernel at once, so that a killed process loses nothing; `close` flushes it to the disk."""
        if self._file is None:
            self._file = self.path.open("ab")
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def _seed(run_seed: int, key: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{run_seed}:{key}".encode()).digest()[:4], "big") // 2


def read_answers(out_dir: Path) -> dict[str, Answer]:
    """Finished answers by the key of their question."""
    log = JsonLines(out_dir / ANSWERS_NAME)
    return {line["key"]: Answer(line["completion_ids"], line["finish_reason"]) for line in log.read()}


@dataclass(frozen=True)
class Request:
    """A prompt to go on with; `sampling` in vLLM's words, which its server and its engine share."""

    key: str
    prompt_ids: Sequence[int]
    sampling: dict[str, Any]


# Streams (key, answer or the error that took its place) as they finish.
Answerer = Callable[[Iterable[Request]], Iterator[tuple[str, Answer | str]]]


def by_engine(start_llm: Callable[[], Any], stop_ids: Sequence[int], max_num_seqs: int) -> Answerer:
    """Answers from vLLM in this process."""

    def answer(requests: Iterable[Request]) -> Iterator[tuple[str, Answer | str]]:
        llm = start_llm()
        asked = (
            engine.EngineRequest(
                r.key, r.prompt_ids, engine.sampling_params(stop_token_ids=list(stop_ids), **r.sampling)
            )
            for r in requests
        )
        for key, output in engine.stream_requests(llm, asked, max_in_flight=2 * max_num_seqs):
            completion = output.outputs[0]
            yield key, Answer(list(completion.token_ids), completion.finish_reason)

    return answer


def by_server(settings: GenerateSection, stop_ids: Sequence[int], encode: Callable[[str], list[int]]) -> Answerer:
    """Answers from the server at `generate.endpoint`."""

    def answer(requests: Iterable[Request]) -> Iterator[tuple[str, Answer | str]]:
        asked = (endpoint.ServerRequest(r.key, r.prompt_ids, r.sampling) for r in requests)
        for key, got in endpoint.stream_answers(endpoint_of(settings), asked, stop_ids=stop_ids, encode=encode):
            yield key, got.error or Answer(got.completion_ids, got.finish_reason)

    return answer


def endpoint_of(settings: GenerateSection) -> endpoint.Endpoint:
    assert settings.endpoint, "only where generate.endpoint is set"
    return endpoint.Endpoint(
        settings.endpoint,
        settings.endpoint_model,
        settings.endpoint_retries,
        settings.endpoint_timeout_seconds,
        settings.max_num_seqs,
    )


def answer_questions(
    answer: Answerer, questions: Sequence[Question], out_dir: Path, settings: GenerateSection, *, run_seed: int
) -> None:
    """Asks what answers.jsonl doesn't hold yet; each answer is appended as it finishes.

    Raises: PipelineError when more than `max_failed` stay without an answer; failed.jsonl lists them.
    """
    done = read_answers(out_dir)
    missing = {question.key: question for question in questions if question.key not in done}
    (out_dir / FAILED_NAME).unlink(missing_ok=True)
    if not missing:
        return
    log, failures = JsonLines(out_dir / ANSWERS_NAME), JsonLines(out_dir / FAILED_NAME)
    sampling = {
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
    }
    requests = (
        Request(key, question.prompt_ids, sampling | {"seed": _seed(run_seed, key)})
        for key, question in missing.items()
    )
    tokens = failed = 0
    start = len(questions) - len(missing)
    try:
        with Progress(out_dir, total=len(questions), desc="answers", unit="answers", start=start) as bar:
            for key, got in answer(requests):
                if isinstance(got, str):
                    failures.add(key=key, **_origin(missing[key]), error=got)
                    failed += 1
                else:
                    log.add(key=key, completion_ids=got.completion_ids, finish_reason=got.finish_reason)
                    tokens += len(got.completion_ids)
                bar.update(1, tokens=tokens, **({"failed": failed} if failed else {}))
    finally:
        log.close()
        failures.close()
    _refuse_failures(failed, out_dir / FAILED_NAME, settings.max_failed)


def _origin(question: Question) -> dict[str, str]:
    return {"conversation_id": question.conversation_id, "source": question.source}


def _refuse_failures(failed: int, path: Path, max_failed: int) -> None:
    if failed > max_failed:
        last = list(JsonLines(path).read())[-1]["error"]
        what = f"lists {failed} prompts without an answer, the last: {last}"
        fix = f"run the same command, which asks for them again, or --generate.max_failed {failed} to leave them out"
        raise PipelineError(Problem(str(path), what, fix))


# ---- prompts of its own ----------------------------------------------------------------------------------------------


def write_prompts(
    answer: Answerer,
    tokenizer: Any,
    prefix_ids: Sequence[int],
    out_dir: Path,
    settings: GenerateSection,
    *,
    run_seed: int,
) -> list[str]:
    """Lets the verifier write `magpie_prompts` prompts and returns their texts.

    Given the template up to where a user's text begins, an instruction-tuned model writes such a text itself
    (Magpie, Xu et al. 2024). Kept are those that end at an end-of-turn token, have at least three words and aren't
    repeats. Attempts are numbered, so a resumed run goes on with the missing numbers.
    """
    log = JsonLines(out_dir / PROMPTS_NAME)
    texts = {line["attempt"]: line["text"] for line in log.read()}
    wanted, attempts = settings.magpie_prompts, settings.magpie_prompts
    try:
        with Progress(out_dir, total=wanted, desc="prompts", unit="prompts") as bar:
            while True:
                missing = [i for i in range(attempts) if i not in texts]
                for attempt, text in _attempt(answer, tokenizer, prefix_ids, missing, settings, run_seed):
                    log.add(attempt=attempt, text=text)
                    texts[attempt] = text
                    bar.update(1 if text else 0)
                kept = kept_prompts(texts)
                if len(kept) >= wanted or attempts >= MAX_ATTEMPTS_EACH * wanted:
                    return kept[:wanted]
                attempts += max(16, int(1.2 * (wanted - len(kept))))
    finally:
        log.close()


def kept_prompts(texts: dict[int, str | None]) -> list[str]:
    """The usable texts in the order of their attempts, each once."""
    in_order = (texts[attempt] for attempt in sorted(texts))
    return list(dict.fromkeys(text for text in in_order if text))


def _attempt(
    answer: Answerer,
    tokenizer: Any,
    prefix_ids: Sequence[int],
    numbers: Sequence[int],
    settings: GenerateSection,
    run_seed: int,
) -> Iterator[tuple[int, str | None]]:
    if not numbers:
        return
    sampling = {"max_tokens": settings.magpie_max_tokens, "temperature": 1.0}
    keys = (f"prompt-{number}" for number in numbers)
    requests = (Request(key, prefix_ids, sampling | {"seed": _seed(run_seed, key)}) for key in keys)
    for key, got in answer(requests):
        if isinstance(got, str):
            continue  # asked for again by a later run
        text = tokenizer.decode(got.completion_ids, skip_special_tokens=True).strip()
        usable = got.finish_reason == "stop" and len(text.split()) >= 3
        yield int(key.removeprefix("prompt-")), text if usable else None
