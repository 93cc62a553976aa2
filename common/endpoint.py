"""A running OpenAI-compatible server in place of an engine in this process: the same questions, the same answers.

The prompt goes there as ids (`/completions`, which every vLLM and SGLang server has), so that the server's own chat
template, tool parser or reasoning parser can't change what is shown or written; reasoning stays in the answer because
nobody takes it out. vLLM returns the answer's ids (`return_token_ids`); another server's text is tokenised here.

Retries with back-off are the openai client's (timeouts, refused and dropped connections, 408, 409, 429, 5xx, and the
server's Retry-After). What it takes for an answer and isn't, such as half a body under a good status, is asked again
here. What stays without an answer is the caller's to list.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import openai

from common.errors import PipelineError, Problem

# So many failures in a row, each after its retries, and the server is taken to be gone.
GIVE_UP_AFTER = 32
PING_SECONDS = 20.0
# What a server would else take from the verifier's generation_config.json; an engine in this process doesn't.
NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
logger = logging.getLogger("pipeline")


@dataclass(frozen=True)
class Endpoint:
    """Where the server is, and how patient to be with it. `model` None: the first that it names."""

    url: str
    model: str | None = None
    max_retries: int = 8
    timeout_seconds: float = 600.0
    max_in_flight: int = 128


@dataclass(frozen=True)
class ServerRequest:
    """One prompt as ids, and its sampling in the words of vLLM's completions request."""

    key: str
    prompt_ids: Sequence[int]
    sampling: dict[str, Any]


@dataclass(frozen=True)
class ServerAnswer:
    """Either the answer's ids and why it ended ("stop", "length"), or the error that took its place."""

    completion_ids: list[int]
    finish_reason: str
    error: str = ""


class _UnusableError(ValueError):
    """A response that isn't the answer to what was asked."""


def check_endpoint(endpoint: Endpoint) -> str:
    """The served model's name. Raises: PipelineError when the server can't be reached or serves no such model."""
    client = openai.OpenAI(base_url=endpoint.url, api_key=_api_key(), max_retries=1, timeout=PING_SECONDS)
    fix = "start the server, or unset generate.endpoint to answer in this process"
    try:
        with client:
            names = [model.id for model in client.models.list().data]
    except (openai.OpenAIError, ValueError, AttributeError, TypeError) as error:
        what = f"{endpoint.url} does not answer as an OpenAI-compatible server: {_line(error)}"
        raise PipelineError(Problem("generate.endpoint", what, f"{fix}; the URL ends in /v1")) from None
    if not names or (endpoint.model and endpoint.model not in names):
        what = f"{endpoint.url} serves {', '.join(names) or 'no model'}, not {endpoint.model or 'any'}"
        raise PipelineError(Problem("generate.endpoint_model", what, "name one that it serves"))
    return endpoint.model or names[0]


def stream_answers(
    endpoint: Endpoint,
    requests: Iterable[ServerRequest],
    *,
    stop_ids: Sequence[int],
    encode: Callable[[str], list[int]],
) -> Iterator[tuple[str, ServerAnswer]]:
    """Yields (key, answer) as they finish, whatever their order; `max_in_flight` are asked at once.

    encode: makes ids of the text of a server that returns none.

    Raises: PipelineError when the server is gone: nothing but failures for a while.
    """
    loop = asyncio.new_event_loop()
    answers = _answers(endpoint, check_endpoint(endpoint), iter(requests), stop_ids, encode)
    failures_in_a_row = 0
    try:
        while True:
            try:
                key, answer = loop.run_until_complete(anext(answers))
            except StopAsyncIteration:
                return
            failures_in_a_row = failures_in_a_row + 1 if answer.error else 0
            yield key, answer
            if failures_in_a_row >= GIVE_UP_AFTER:
                what = f"{endpoint.url} failed {failures_in_a_row} times in a row, last: {answer.error}"
                fix = "look at the server; the same command asks for what is missing"
                raise PipelineError(Problem("generate.endpoint", what, fix))
    finally:
        loop.run_until_complete(answers.aclose())
        loop.close()


async def _answers(
    endpoint: Endpoint,
    model: str,
    requests: Iterator[ServerRequest],
    stop_ids: Sequence[int],
    encode: Callable[[str], list[int]],
) -> AsyncGenerator[tuple[str, ServerAnswer]]:
    """Keeps `max_in_flight` requests under way; those of an interrupted run are cancelled."""
    retries, timeout = endpoint.max_retries, endpoint.timeout_seconds
    client = openai.AsyncOpenAI(base_url=endpoint.url, api_key=_api_key(), max_retries=retries, timeout=timeout)
    tasks: dict[asyncio.Task[ServerAnswer], str] = {}
    try:
        while True:
            while len(tasks) < endpoint.max_in_flight and (request := next(requests, None)) is not None:
                tasks[asyncio.create_task(_ask(client, model, request, retries, stop_ids, encode))] = request.key
            if not tasks:
                return
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # Answers first: after a failure the caller may give up, and what has been answered must not be lost.
            for task in sorted(done, key=lambda finished: bool(finished.result().error)):
                yield tasks.pop(task), task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()


async def _ask(
    client: openai.AsyncOpenAI,
    model: str,
    request: ServerRequest,
    retries: int,
    stop_ids: Sequence[int],
    encode: Callable[[str], list[int]],
) -> ServerAnswer:
    problem: Exception = _UnusableError("not asked")
    for attempt in range(retries + 1):
        try:
            response = await client.completions.create(
                model=model,
                prompt=list(request.prompt_ids),
                extra_body={
                    **NEUTRAL,
                    **request.sampling,
                    "stop_token_ids": list(stop_ids),
                    "return_token_ids": True,
                    "skip_special_tokens": False,
                    "add_special_tokens": False,
                },
            )
            return _read(response, request, stop_ids, encode)
        except openai.APIResponseValidationError as error:
            problem = error
        except openai.OpenAIError as error:  # the client has retried what can be mended by that
            return ServerAnswer([], "", _line(error))
        except (ValueError, AttributeError, TypeError) as error:  # JSON cut off, or of another form
            problem = error
        await asyncio.sleep(min(0.5 * 2**attempt, 8.0))
    return ServerAnswer([], "", f"unusable response: {_line(problem)}")


def _read(
    response: Any, request: ServerRequest, stop_ids: Sequence[int], encode: Callable[[str], list[int]]
) -> ServerAnswer:
    """Raises: _UnusableError when the response is no whole answer to this prompt."""
    if not getattr(response, "choices", None):
        raise _UnusableError("no choices")
    choice = response.choices[0]
    shown = getattr(choice, "prompt_token_ids", None)
    if shown is not None and list(shown) != list(request.prompt_ids):
        raise _UnusableError("it was shown another prompt than the one sent")
    if choice.finish_reason not in ("stop", "length"):
        raise _UnusableError(f"it ended by {choice.finish_reason!r}")
    given = getattr(choice, "token_ids", None)
    ids = list(given) if given is not None else encode(choice.text)
    if not ids:
        raise _UnusableError("an empty answer")
    if choice.finish_reason == "stop" and ids[-1] not in stop_ids:
        # Servers that return text leave the end token out; it was written all the same. vLLM says which of several.
        reason: Any = getattr(choice, "stop_reason", None)
        ids.append(reason if reason in stop_ids else stop_ids[0])
    return ServerAnswer(ids, choice.finish_reason)


def _api_key() -> str:
    return os.environ.get("OPENAI_API_KEY") or "none"


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
