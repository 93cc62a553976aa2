"""From a conversation to token ids and an exact assistant mask, for fast and slow tokenizers alike.

No generation tags, offsets or regular expressions: the template is rendered up to each assistant turn, with and
without it, and what the second text adds is that turn. Prompt and turn are tokenised apart, as a server does (it
never merges a token across the two). A template that can't be split so is refused by name, before any row is read.

Where the text of an answer stands is found by rendering a marker in its place, not by searching for it: the answer
`think` after a supplied `<think></think>` is not the first `think` that a search finds.

    rendered up to the turn    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n          mask 0
    the turn                                                                     Hello<|im_end|>  mask 1
    what the template adds                                                                      \\n  mask 0
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np

from common.corpus import Message
from common.errors import PipelineError, Problem

SENTINEL = "\u2063sentinel\u2063"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Encoded:
    """input_ids int32 [T], loss_mask bool [T]."""

    input_ids: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True)
class Turn:
    """One assistant turn as text: what a server is shown, what the template supplies, and what the verifier writes."""

    prompt: str
    supplied: str
    written: str
    trailing: str


class UnusableError(Exception):
    """This conversation gives no sample; the message is the reason it is counted under."""


class ChatEncoder:
    """Renders and tokenises with one verifier's template. `stop_ids` end an answer."""

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: Sequence[int],
        template_kwargs: dict[str, Any] | None = None,
        *,
        supervise_empty_think: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_texts = [tokenizer.decode([i], skip_special_tokens=False) for i in stop_ids]
        self._template_kwargs = template_kwargs or {}
        self._supervise_empty_think = supervise_empty_think

    def check_template(self) -> None:
        """Looks at what the template does with the plainest conversation, before any row is read.

        Raises: PipelineError naming what can't be handled.
        """
        messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
        try:
            turn = self.turn(messages, 1, None)
        except UnusableError as error:
            raise PipelineError(
                Problem("chat template", str(error), "set prepare.template_kwargs, or mend it")
            ) from None
        if not any(turn.written.endswith(stop) for stop in self._stop_texts):
            what = f"ends an assistant's turn in none of the verifier's stop tokens ({', '.join(self._stop_texts)})"
            fix = "name the token that ends a turn as eos_token_id in generation_config.json"
            raise PipelineError(Problem("chat template", what, fix))

    def render(self, messages: Sequence[Message], tools: list[Any] | None, *, generate: bool) -> str:
        """Raises: PipelineError when the verifier has no template; UnusableError when it refuses these messages."""
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=generate, **self._template_kwargs
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise UnusableError(f"the chat template refuses it: {str(error).splitlines()[0]}") from None
        except ValueError as error:
            if "chat_template" not in str(error) and "chat template" not in str(error):
                raise
            what = "the verifier has no chat template"
            raise PipelineError(Problem("verifier", what, "put chat_template.jinja into its directory")) from None

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text: special tokens in it are parsed, none are added."""
        if not text:
            return []
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def prompt_ids(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[int]:
        """What a server would be shown: the messages and the generation prompt."""
        return self.encode(self.render(messages, tools, generate=True))

    def user_prefix_ids(self) -> list[int]:
        """The template up to where a first user's text begins: given this, a verifier writes a prompt itself."""
        text = self.render([{"role": "user", "content": SENTINEL}], None, generate=False)
        head, found, _ = text.partition(SENTINEL)
        if not found:
            raise PipelineError(Problem("chat template", "does not show the user's text", "use another template"))
        return self.encode(head)

    # ---- turns ----

    def turn(self, messages: Sequence[Message], index: int, tools: list[Any] | None) -> Turn:
        """Assistant turn `index`, in the context that a server would have shown.

        Raises: PipelineError naming the template when the turn can't be told from the prompt; UnusableError when the
            turn is empty, or has reasoning that the template leaves out.
        """
        shown, message = messages[:index], messages[index]
        prompt = self.render(shown, tools, generate=True)
        if not (_text(message, "content") or _text(message, "reasoning_content") or message.get("tool_calls")):
            raise UnusableError("an empty assistant turn")
        added = self._added(shown, message, prompt, tools)
        before, after = self._around_content(shown, message, tools, prompt, added)
        reasoning = _text(message, "reasoning_content")
        if not reasoning or self._shows_reasoning(shown, message, tools, prompt, added):
            start = 0 if reasoning or self._supervise_empty_think else len(before)
            start -= 0 if start == 0 else _leading_space(before, message.get("content") or "")
        elif prompt.rstrip().endswith(THINK_OPEN) and before.strip() == THINK_CLOSE:
            # The prompt opens the think tag and this rendering closes it at once: what the verifier wrote between
            # the two is left out wherever the turn counts as history, as in Kimi-K2.5's template.
            added, before, start = reasoning + added, reasoning + before, 0
        else:
            raise UnusableError("reasoning that the template leaves out")
        stop = self._end(added, len(added) - len(after), has_calls=bool(message.get("tool_calls")))
        return Turn(prompt, added[:start], added[start:stop], added[stop:])

    def _added(self, shown: Sequence[Message], message: Message, prompt: str, tools: list[Any] | None) -> str:
        """What rendering assistant turn `message` adds after its generation prompt.

        A finished turn can change how earlier ones are shown (Kimi's template drops the reasoning of a tool chain once
        it has been answered), so that the whole no longer begins with the prompt. The turn then stands after the
        header that the generation prompt ends in, the last one before the turn's own text.

        Raises: PipelineError naming the template when the turn can't be told from the prompt.
        """
        whole = self.render([*shown, message], tools, generate=False)
        if whole.startswith(prompt):
            return whole[len(prompt) :]
        history = self.render(shown, tools, generate=False)
        header = prompt[len(history) :] if prompt.startswith(history) else ""
        marked = self.render([*shown, {**message, "content": SENTINEL, "reasoning_content": ""}], tools, generate=False)
        at = marked.rfind(header, 0, marked.find(SENTINEL)) if header and SENTINEL in marked else -1
        if at < 0 or whole[: at + len(header)] != marked[: at + len(header)]:
            common = len(_common_prefix(prompt, whole))
            what = "an assistant turn does not begin where its generation prompt ends: after "
            what += f"{prompt[:common][-40:]!r} it has {whole[common:][:20]!r}, the prompt {prompt[common:][:20]!r}"
            raise PipelineError(Problem("chat template", what, "set prepare.template_kwargs, or mend the template"))
        return whole[at + len(header) :]

    def _around_content(
        self, shown: Sequence[Message], message: Message, tools: list[Any] | None, prompt: str, added: str
    ) -> tuple[str, str]:
        """What the turn adds before and after the answer's text; a marker in the text's place shows where it is.

        Raises: PipelineError when the template doesn't show the text.
        """
        marked = self._added(shown, {**message, "content": SENTINEL}, prompt, tools)
        before, found, _ = marked.partition(SENTINEL)
        content = _text(message, "content")
        # White space that the template kept around the text stands between `before` and the stripped text.
        start = len(before)
        start += len(added[start:]) - len(added[start:].lstrip()) if content else 0
        if content and not (found and added.startswith(before) and added.startswith(content, start)):
            what = f"does not show the assistant's text {content[:40]!r}"
            raise PipelineError(Problem("chat template", what, "use the template the verifier was published with"))
        if not added.startswith(before):  # a template that shows a turn without text otherwise
            reasoning = _text(message, "reasoning_content")
            start = added.rfind(reasoning) + len(reasoning) if reasoning else 0
        return added[:start], added[start + len(content) :]

    def _shows_reasoning(
        self, shown: Sequence[Message], message: Message, tools: list[Any] | None, prompt: str, added: str
    ) -> bool:
        """Whether the reasoning stands in the turn, by a marker again: `think` also occurs in an empty pair."""
        marked = self._added(shown, {**message, "reasoning_content": SENTINEL}, prompt, tools)
        before, found, _ = marked.partition(SENTINEL)
        is_there = added.startswith(before) and added[len(before) :].lstrip().startswith(
            _text(message, "reasoning_content")
        )
        return bool(found) and is_there

    def _end(self, added: str, content_end: int, *, has_calls: bool) -> int:
        """Where the written part ends: at the first stop token after the text; after calls, which hold text of their
        own, at the last one."""
        if not has_calls:
            return self._end_after(added, content_end)
        ends = (added.rfind(stop) + len(stop) for stop in self._stop_texts if stop in added[content_end:])
        return max(ends, default=len(added))

    def _end_after(self, added: str, content_end: int) -> int:
        """The end of the first stop token after the text; the end of the text where none follows."""
        ends = [(at, len(stop)) for stop in self._stop_texts if (at := added.find(stop, content_end)) >= 0]
        if not ends:
            return content_end
        at, length = min(ends)
        return at + length

    def encode_conversation(
        self, messages: Sequence[Message], tools: list[Any] | None, turns: str, *, is_cut: bool = False
    ) -> list[Encoded]:
        """The samples of one conversation.

        turns: "conversation": one sample with all its assistant turns; "turn": one sample each; "auto": one for the
            conversation where the template and the tokenizer leave history as it was, else one each.
        is_cut: the last answer met a length limit, so the end token that the template adds was never written.

        Raises: UnusableError when there is no assistant turn, or one is empty; PipelineError as `turn`.
        """
        indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not indices:
            raise UnusableError("no assistant turn")
        found = [self.turn(messages, i, tools) for i in indices]
        if is_cut:
            found[-1] = self._without_end(found[-1])
        if turns != "turn":
            whole = self._as_one(found)
            if whole is not None:
                return [whole]
            if turns == "conversation":
                what = "rewrites earlier turns, so one sample can't hold what a server would have shown"
                raise PipelineError(Problem("chat template", what, "set prepare.turns: turn, or auto"))
        pieces = ([(t.prompt, False), (t.supplied, False), (t.written, True)] for t in found)
        return [self._at_once(p) or self._in_pieces(p) for p in pieces]

    def _without_end(self, turn: Turn) -> Turn:
        stop = next((stop for stop in self._stop_texts if turn.written.endswith(stop)), "")
        return Turn(turn.prompt, turn.supplied, turn.written.removesuffix(stop), "")

    def _as_one(self, turns: Sequence[Turn]) -> Encoded | None:
        """All turns in one sample; None where a later prompt shows an earlier turn otherwise than it was written."""
        pieces: list[tuple[str, bool]] = []
        text = ""
        for turn in turns:
            if not turn.prompt.startswith(text):
                return None
            pieces += [(turn.prompt[len(text) :], False), (turn.supplied, False), (turn.written, True)]
            text = turn.prompt + turn.supplied + turn.written
        if encoded := self._at_once(pieces):
            return encoded
        encoded = self._in_pieces(pieces)
        prompt_ids = self.encode(turns[-1].prompt)
        # Tokenised in pieces, history must be what a server makes of the last prompt in one go.
        return encoded if encoded.input_ids[: len(prompt_ids)].tolist() == prompt_ids else None

    def _at_once(self, pieces: Sequence[tuple[str, bool]]) -> Encoded | None:
        """Tokenises all pieces as one text, which is what a server makes of history, and proves each masked span.

        None for slow tokenizers, which don't say where a token came from, and where a token lies across the border
        of a span; `_in_pieces` decides then. Half the work of tokenising pieces and then history to compare.
        """
        if not self._tokenizer.is_fast:
            return None
        text = "".join(piece for piece, _ in pieces)
        encoding = self._tokenizer(text, add_special_tokens=False).encodings[0]
        ids: list[int] = encoding.ids
        mask = np.zeros(len(ids), dtype=np.bool_)
        at = 0
        for piece, is_written in pieces:
            begin, at = at, at + len(piece)
            if not is_written or not piece:
                continue
            first = encoding.char_to_token(begin)
            stop = encoding.char_to_token(at) if at < len(text) else len(ids)
            if first is None or stop is None or not _borders(encoding, first, stop, begin, at):
                return None
            if self.decode(ids[first:stop]) != piece:
                return None
            mask[first:stop] = True
        return Encoded(np.array(ids, dtype=np.int32), mask)

    def _in_pieces(self, pieces: Sequence[tuple[str, bool]]) -> Encoded:
        """Tokenises pieces of (text, is written by the assistant), and proves each masked span by decoding it."""
        ids: list[int] = []
        mask: list[bool] = []
        for text, is_written in pieces:
            new = self.encode(text)
            if is_written and self.decode(new) != text:
                raise UnusableError("text that the tokenizer does not give back")
            ids += new
            mask += [is_written] * len(new)
        return Encoded(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_))


def _borders(encoding: Any, first: int, stop: int, begin: int, end: int) -> bool:
    """Whether tokens `first` to `stop - 1` are exactly the characters from `begin` to `end`."""
    if first >= stop:
        return False
    return encoding.token_to_chars(first)[0] == begin and encoding.token_to_chars(stop - 1)[1] == end


def _text(message: Message, key: str) -> str:
    return (message.get(key) or "").strip()


def _common_prefix(one: str, other: str) -> str:
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def _leading_space(before: str, content: str) -> int:
    """White space at the start of the answer that the template kept belongs to the answer."""
    space = content[: len(content) - len(content.lstrip())]
    return len(space) if space and before.endswith(space) else 0


def cut(encoded: Encoded, max_tokens: int) -> Encoded:
    return Encoded(encoded.input_ids[:max_tokens], encoded.loss_mask[:max_tokens])
