"""Answers by the verifier, and prompts by the verifier: on disk the moment they are finished.

    samples/
        prompts.jsonl   prompts that the verifier wrote itself: attempt, text or the reason it was thrown away
        answers.jsonl   key, prompt_ids, completion_ids, finish_reason

A rerun reads both and asks only for what is missing; a line torn by a kill is dropped and asked for again. Seeds come
from the run's seed and the prompt, so an answer doesn't depend on the order of the requests.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from common import engine
from common.config import GenerateSection
from common.progress import Progress

PROMPTS_NAME, ANSWERS_NAME = "prompts.jsonl", "answers.jsonl"
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


def answer_questions(
    llm: Any,
    questions: Sequence[Question],
    out_dir: Path,
    settings: GenerateSection,
    *,
    stop_ids: Sequence[int],
    run_seed: int,
) -> None:
    """Asks what answers.jsonl doesn't hold yet; each answer is appended as it finishes."""
    done = read_answers(out_dir)
    missing = [question for question in questions if question.key not in done]
    log = JsonLines(out_dir / ANSWERS_NAME)
    requests = (
        engine.EngineRequest(
            question.key,
            question.prompt_ids,
            engine.sampling_params(
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                stop_token_ids=list(stop_ids),
                seed=_seed(run_seed, question.key),
            ),
        )
        for question in missing
    )
    start = len(questions) - len(missing)
    tokens = 0
    try:
        with Progress(out_dir, total=len(questions), desc="answers", unit="answers", start=start) as bar:
            for key, output in engine.stream_requests(llm, requests, max_in_flight=2 * settings.max_num_seqs):
                completion = output.outputs[0]
                ids = list(completion.token_ids)
                log.add(key=key, completion_ids=ids, finish_reason=completion.finish_reason)
                tokens += len(ids)
                bar.update(1, tokens=tokens)
    finally:
        log.close()


# ---- prompts of its own ----------------------------------------------------------------------------------------------


def write_prompts(
    start_llm: Callable[[], Any],
    tokenizer: Any,
    prefix_ids: Sequence[int],
    out_dir: Path,
    settings: GenerateSection,
    *,
    stop_ids: Sequence[int],
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
                for attempt, text in _attempt(start_llm, tokenizer, prefix_ids, missing, settings, stop_ids, run_seed):
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
    start_llm: Callable[[], Any],
    tokenizer: Any,
    prefix_ids: Sequence[int],
    numbers: Sequence[int],
    settings: GenerateSection,
    stop_ids: Sequence[int],
    run_seed: int,
) -> Iterator[tuple[int, str | None]]:
    if not numbers:
        return
    requests = (
        engine.EngineRequest(
            f"prompt-{number}",
            prefix_ids,
            engine.sampling_params(
                max_tokens=settings.magpie_max_tokens,
                temperature=1.0,
                stop_token_ids=list(stop_ids),
                seed=_seed(run_seed, f"prompt-{number}"),
            ),
        )
        for number in numbers
    )
    for key, output in engine.stream_requests(start_llm(), requests, max_in_flight=2 * settings.max_num_seqs):
        completion = output.outputs[0]
        text = tokenizer.decode(list(completion.token_ids), skip_special_tokens=True).strip()
        usable = completion.finish_reason == "stop" and len(text.split()) >= 3
        yield int(key.removeprefix("prompt-")), text if usable else None
