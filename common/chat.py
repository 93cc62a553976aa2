"""From a conversation to token ids and an exact assistant mask, for fast and slow tokenizers alike.

No generation tags, offsets or regular expressions: the template is rendered up to each assistant turn, with and
without it, and what the second text adds is that turn. Prompt and turn are tokenised apart, as a server does (it
never merges a token across the two). A template that can't be split so is refused by name.

    rendered up to the turn    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n          mask 0
    the turn                                                                     Hello<|im_end|>  mask 1
    what the template adds                                                                      \\n  mask 0
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.corpus import Message
from common.errors import PipelineError, Problem

SENTINEL = "\u2063sentinel\u2063"


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

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int], template_kwargs: dict[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._stop_texts = [tokenizer.decode([i], skip_special_tokens=False) for i in stop_ids]
        self._template_kwargs = template_kwargs or {}

    def render(self, messages: Sequence[Message], tools: list[Any] | None, *, generate: bool) -> str:
        """Raises: PipelineError when the verifier has no template."""
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=generate, **self._template_kwargs
            )
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
            turn is empty.
        """
        prompt = self.render(messages[:index], tools, generate=True)
        whole = self.render(messages[: index + 1], tools, generate=False)
        if not whole.startswith(prompt):
            common = len(_common_prefix(prompt, whole))
            what = "an assistant turn does not begin where its generation prompt ends: after "
            what += f"{prompt[:common][-40:]!r} it has {whole[common:][:20]!r}, the prompt {prompt[common:][:20]!r}"
            raise PipelineError(Problem("chat template", what, "set prepare.template_kwargs, or mend the template"))
        supplied, written, trailing = self._split(whole[len(prompt) :], messages[index])
        return Turn(prompt, supplied, written, trailing)

    def _split(self, added: str, message: Message) -> tuple[str, str, str]:
        """Divides what a turn adds into what the template supplies, what the verifier writes, and what follows."""
        content, reasoning = message.get("content") or "", message.get("reasoning_content") or ""
        if not (content.strip() or reasoning.strip() or message.get("tool_calls")):
            raise UnusableError("an empty assistant turn")
        start = 0
        if not reasoning and content.strip():
            start = added.find(content.strip())
            if start < 0:
                what = f"does not show the assistant's text {content.strip()[:40]!r}"
                raise PipelineError(Problem("chat template", what, "use the template the verifier was published with"))
            start -= _leading_space(added[:start], content)
        elif reasoning and added.find(reasoning.strip()) < 0:
            raise UnusableError("reasoning that the template leaves out")
        end = max((added.rfind(stop) + len(stop) for stop in self._stop_texts if stop in added), default=len(added))
        return added[:start], added[start:end], added[end:]

    def encode_conversation(self, messages: Sequence[Message], tools: list[Any] | None, turns: str) -> list[Encoded]:
        """The samples of one conversation.

        turns: "conversation": one sample with all its assistant turns; "turn": one sample each; "auto": one for the
            conversation where the template and the tokenizer leave history as it was, else one each.

        Raises: UnusableError when there is no assistant turn, or one is empty; PipelineError as `turn`.
        """
        indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not indices:
            raise UnusableError("no assistant turn")
        found = [self.turn(messages, i, tools) for i in indices]
        if turns != "turn":
            whole = self._as_one(found)
            if whole is not None:
                return [whole]
            if turns == "conversation":
                what = "rewrites earlier turns, so one sample can't hold what a server would have shown"
                raise PipelineError(Problem("chat template", what, "set prepare.turns: turn, or auto"))
        return [self._proven([(t.prompt, False), (t.supplied, False), (t.written, True)]) for t in found]

    def _as_one(self, turns: Sequence[Turn]) -> Encoded | None:
        """All turns in one sample; None where a later prompt shows an earlier turn otherwise than it was written."""
        pieces: list[tuple[str, bool]] = []
        text = ""
        for turn in turns:
            if not turn.prompt.startswith(text):
                return None
            pieces += [(turn.prompt[len(text) :], False), (turn.supplied, False), (turn.written, True)]
            text = turn.prompt + turn.supplied + turn.written
        shown = turns[-1].prompt
        encoded = self._proven(pieces)
        prompt_ids = self.encode(shown)
        # Tokenised in pieces, history must be what a server makes of the last prompt in one go.
        return encoded if encoded.input_ids[: len(prompt_ids)].tolist() == prompt_ids else None

    def _proven(self, pieces: Sequence[tuple[str, bool]]) -> Encoded:
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


def _common_prefix(one: str, other: str) -> str:
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def _leading_space(before: str, content: str) -> int:
    """White space at the start of the answer that the template kept belongs to the answer."""
    space = content[: len(content) - len(content.lstrip())]
    return len(space) if space and before.endswith(space) else 0


def cut(encoded: Encoded, max_tokens: int) -> Encoded:
    return Encoded(encoded.input_ids[:max_tokens], encoded.loss_mask[:max_tokens])
