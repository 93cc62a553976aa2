"""Rows of any format that people have, as conversations; a row that can't be used is skipped with its reason.

Understands OpenAI `messages`, ShareGPT `conversations`, bare prompts (`prompt`, `instruction`, `text`), in JSONL, JSON,
Parquet, a `datasets` directory, or a hub name where there is a network. One bad row never ends a run; a source
without a single usable row does. Knows nothing of tokens.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from common.config import SourceSection
from common.embedded import is_embedded, read_prompt_set
from common.errors import PipelineError, Problem

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
PROMPT_KEYS = ("prompt", "instruction", "question", "text")
Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages in OpenAI's form; `source` says where they came from.

    is_cut: the row says that its last answer met a length limit (`finish_reason: length`), so it has no end.
    """

    messages: list[Message]
    conversation_id: str
    source: str
    tools: list[Any] | None = None
    is_cut: bool = False


@dataclass(frozen=True)
class Skipped:
    """A row that gives no conversation: where it stands and why."""

    where: str
    reason: str
    source: str


@dataclass
class Counts:
    """Rows taken, and rows skipped by reason."""

    taken: int = 0
    skipped: dict[str, int] = field(default_factory=dict)


def read_source(source: SourceSection, seed: int = 0) -> Iterator[Conversation | Skipped]:
    """Streams one source. `weight` keeps that share of its rows, chosen by hash; `max_rows` ends it early.

    Raises: PipelineError when the source is absent or of no known format.
    """
    taken = 0
    for item in _conversations(source.path):
        if isinstance(item, Conversation):
            if source.weight < 1 and unit_hash(f"{seed}:{item.conversation_id}") >= source.weight:
                continue
            taken += 1
        yield item
        if source.max_rows is not None and taken >= source.max_rows:
            return


def unit_hash(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def _conversations(path: str) -> Iterator[Conversation | Skipped]:
    if is_embedded(path):
        for prompt in read_prompt_set(path):
            yield Conversation([{"role": "user", "content": prompt.text}], prompt.prompt_id, path)
        return
    for where, row in _rows(path):
        if isinstance(row, Skipped):
            yield row
            continue
        yield to_conversation(row, where, source=Path(path).name or path)


def check_source(path: str) -> None:
    """Raises: PipelineError when the source can't be opened; reads no row."""
    if is_embedded(path):
        read_prompt_set(path)
        return
    found = Path(path)
    if not found.exists() and _looks_like_a_path(path):
        raise PipelineError(Problem("prepare.sources", f"{path} does not exist", "name a file or a directory"))
    if found.is_file() and found.stat().st_size == 0:
        raise PipelineError(Problem("prepare.sources", f"{path} is empty", "name a file with rows"))


def _looks_like_a_path(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") != 1 or bool(Path(path).suffix)


def _rows(path: str) -> Iterator[tuple[str, Any]]:
    found = Path(path)
    if found.is_dir():
        yield from _dataset_rows(found)
    elif found.suffix == ".parquet":
        number = 0
        for batch in pq.ParquetFile(found).iter_batches(batch_size=512):
            for row in batch.to_pylist():
                yield f"{found.name} row {number}", _without_nulls(row)
                number += 1
    elif found.suffix == ".json":
        yield from _json_rows(found)
    elif found.is_file():
        yield from _jsonl_rows(found)
    else:
        yield from _hub_rows(path)


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """One object a line; blank lines, CRLF and a byte order mark are fine, other lines are skipped by number."""
    with path.open(encoding="utf-8-sig", errors="replace", newline=None) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path.name} line {number}"
            try:
                yield where, json.loads(line)
            except json.JSONDecodeError:
                yield where, Skipped(where, "not JSON", path.name)


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        what = f"is not JSON: {error}"
        raise PipelineError(Problem(str(path), what, "a file of one object a line is named .jsonl")) from None
    if not isinstance(rows, list):
        raise PipelineError(Problem(str(path), f"holds a {type(rows).__name__}, expected a list of rows", "wrap it"))
    yield from ((f"{path.name} row {number}", row) for number, row in enumerate(rows))


def _dataset_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError, OSError) as error:
        fix = "name a directory that datasets' save_to_disk wrote, or a file"
        raise PipelineError(Problem("prepare.sources", f"{path} is no data set: {error}", fix)) from None
    parts = loaded.values() if isinstance(loaded, datasets.DatasetDict) else [loaded]
    rows = (row for part in parts for row in part)
    yield from ((f"{path.name} row {number}", _without_nulls(row)) for number, row in enumerate(rows))


def _without_nulls(value: Any) -> Any:
    """An Arrow value without the keys that only other rows fill: there a struct has the same keys in every row."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _hub_rows(name: str) -> Iterator[tuple[str, Any]]:
    import datasets

    try:
        loaded = datasets.load_dataset(name, split="train", streaming=True)
        yield from ((f"{name} row {number}", row) for number, row in enumerate(loaded))
    except Exception as error:  # the hub client raises whatever its transport raises
        what = f"{name} is no file here, and can't be loaded by name: {str(error).splitlines()[0]}"
        raise PipelineError(Problem("prepare.sources", what, "name a local file where there is no network")) from None


# ---- one row ---------------------------------------------------------------------------------------------------------


def to_conversation(row: Any, where: str, *, source: str) -> Conversation | Skipped:
    """A row's conversation, checked for a shape that chat templates take; else why it is skipped."""
    if not isinstance(row, Mapping):
        return Skipped(where, f"a {type(row).__name__}, not an object", source)
    messages = _messages_of(row)
    if messages is None:
        return Skipped(where, "no messages, conversations or prompt", source)
    reason = _fault_of(messages)
    if reason:
        return Skipped(where, reason, source)
    tools = _parsed(row.get("tools")) or None
    if tools is not None and not isinstance(tools, list):
        return Skipped(where, "tools that are not a list", source)
    identity = row.get("conversation_id") or row.get("id") or _hash_of(messages)
    return Conversation(messages, str(identity), source, tools, is_cut=row.get("finish_reason") == "length")


def _messages_of(row: Mapping[str, Any]) -> list[Message] | None:
    if isinstance(row.get("messages"), list):
        return [_plain(message) for message in row["messages"]]
    if isinstance(row.get("conversations"), list):
        return [_from_sharegpt(turn) for turn in row["conversations"]]
    for key in PROMPT_KEYS:
        if isinstance(row.get(key), str):
            return [{"role": "user", "content": row[key]}]
    return None


def _plain(message: Any) -> Message:
    """A message without empty keys, its text parts joined; columns that other rows filled are None here."""
    if not isinstance(message, Mapping):
        return {"role": None, "content": None}
    kept: Message = {key: value for key, value in message.items() if value is not None}
    content = kept.get("content")
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, Mapping) and p.get("type", "text") == "text" else None for p in content]
        kept["content"] = "".join(parts) if all(isinstance(p, str) for p in parts) else None  # type: ignore[arg-type]
        if kept["content"] is None:
            kept["role"] = "not text"
    if "reasoning" in kept:  # the newer of two names
        kept.setdefault("reasoning_content", kept.pop("reasoning"))
    calls = _parsed(kept.get("tool_calls"))
    if calls:
        kept["tool_calls"] = [_tool_call(call) for call in calls] if isinstance(calls, list) else calls
    else:
        kept.pop("tool_calls", None)
    return kept


def _parsed(value: Any) -> Any:
    """A value that some data sets keep as JSON text; text that is no JSON stays as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _tool_call(call: Any) -> Any:
    """Arguments as an object, as vLLM gives them to the template (0.32.0, `_postprocess_messages`)."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": _parsed(function.get("arguments")) or {}}}


def _from_sharegpt(turn: Any) -> Message:
    if not isinstance(turn, Mapping):
        return {"role": None, "content": None}
    return {"role": SHAREGPT_ROLES.get(str(turn.get("from")).lower()), "content": turn.get("value")}


def _fault_of(messages: list[Message]) -> str | None:
    """Why these messages can't be used; None when they can."""
    roles = [message.get("role") for message in messages]
    if not roles:
        return "no messages"
    if "not text" in roles:
        return "content that is not text"
    if any(role not in ROLES for role in roles):
        return "an unknown role"
    if not all(_is_well_formed(message) for message in messages):
        return "a message of another form than OpenAI's"
    turns = [role for role in roles if role != "system"]
    if not turns:
        return "only a system message"
    if turns[0] != "user":
        return f"starts with {turns[0]}"
    if any(a == b == "user" for a, b in itertools.pairwise(turns)):
        return "two user turns in a row"
    if any(role == "user" and not _text(m).strip() for role, m in zip(roles, messages, strict=True)):
        return "an empty user turn"
    return None


def _is_well_formed(message: Message) -> bool:
    """Whether texts are texts and calls name a function: templates stop at anything else, or print it as Python."""
    calls = message.get("tool_calls") or []
    texts = (message.get("content"), message.get("reasoning_content"))
    is_call = (isinstance(c, Mapping) and isinstance(c.get("function"), Mapping) for c in calls)
    return all(isinstance(text, str | None) for text in texts) and isinstance(calls, list) and all(is_call)


def _text(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _hash_of(messages: list[Message]) -> str:
    return hashlib.sha256(json.dumps(messages, sort_keys=True, default=str).encode()).hexdigest()[:16]


def prompt_of(conversation: Conversation) -> list[Message]:
    """The messages before the first answer: what the verifier is asked."""
    roles = [message["role"] for message in conversation.messages]
    end = roles.index("assistant") if "assistant" in roles else len(roles)
    return conversation.messages[:end]


def user_text(messages: Iterable[Message]) -> str:
    return "\n".join(_text(message) for message in messages if message["role"] == "user")
