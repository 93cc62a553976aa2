"""The mask under a tokenizer and a template that behave as Kimi-K2.5's (KIMI_K25.md). Field faults A8, A11, A13, B4."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.chat import ChatEncoder, UnusableError
from common.config import VerifierSection
from common.errors import PipelineError
from common.verifier import check_special_tokens, load_tokenizer, open_verifier
from tests.kimi_tokenizer import SPECIAL, VOCAB, write_kimi_like
from tests.test_prepare_chat import chat, masked_texts

STOP = "<|im_end|>"


@pytest.fixture(scope="session")
def kimi(smollm2, tmp_path_factory):
    path = write_kimi_like(tmp_path_factory.mktemp("kimi") / "verifier", smollm2)
    return open_verifier(VerifierSection(path=str(path), trust_remote_code=True))


@pytest.fixture(scope="session")
def tokenizer(kimi):
    return load_tokenizer(kimi)


@pytest.fixture(scope="session")
def encoder(kimi, tokenizer):
    made = ChatEncoder(tokenizer, kimi.stop_token_ids)
    made.check_template()
    return made


def reasoned(*turns: tuple[str, str, str]):
    """(question, reasoning, answer) in OpenAI's form."""
    messages = []
    for question, reasoning, content in turns:
        messages += chat(question, content)
        if reasoning:
            messages[-1]["reasoning_content"] = reasoning
    return messages


def call(name: str, **arguments):
    return {"type": "function", "id": name, "function": {"name": name, "arguments": arguments}}


def calls_text(name: str, arguments: str) -> str:
    return (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )


def test_the_tokenizer_is_slow_and_keeps_the_holes(kimi, tokenizer):
    assert not tokenizer.is_fast
    check_special_tokens(kimi, tokenizer, SPECIAL)


def test_a_loader_that_closes_the_holes_is_named_by_the_first_token_that_moved(kimi, tokenizer, monkeypatch):
    closed = {token: 163584 + i for i, token in enumerate(SPECIAL)}
    monkeypatch.setattr(type(tokenizer), "_convert_token_to_id", lambda self, token: closed.get(token, 163838))
    with pytest.raises(PipelineError, match=r"<\|im_system\|> should be 163594, the loaded tokenizer gives 163589"):
        check_special_tokens(kimi, tokenizer, {})


def test_b4_the_vocabulary_is_the_configurations_and_not_the_tokenizers(kimi, tokenizer):
    assert len(tokenizer) != VOCAB
    assert kimi.vocab_size == VOCAB


def test_a8_every_turn_of_three_is_a_sample_in_the_context_that_a_server_shows(encoder):
    messages = reasoned(("a", "R one", "one"), ("b", "R two", "two"), ("c", "R three", "three"))
    encoded = encoder.encode_conversation(messages, None, "auto")
    assert [masked_texts(encoder, e) for e in encoded] == [
        [f"R {name}</think>{name}{STOP}"] for name in ("one", "two", "three")
    ]
    for e, index in zip(encoded, (1, 3, 5), strict=True):
        shown = encoder.prompt_ids(messages[:index])
        assert e.input_ids[: len(shown)].tolist() == shown
        assert not e.loss_mask[: len(shown)].any()


def test_a11_the_pair_that_the_serving_prompt_holds_carries_no_loss(kimi, tokenizer):
    encoder = ChatEncoder(tokenizer, kimi.stop_token_ids, {"thinking": False})
    messages = chat("Hi", "Hello")
    (encoded,) = encoder.encode_conversation(messages, None, "auto")
    assert masked_texts(encoder, encoded) == [f"Hello{STOP}"]
    shown = encoder.prompt_ids(messages[:1])
    assert shown[-2:] == [SPECIAL["<think>"], SPECIAL["</think>"]]
    assert encoded.input_ids[: len(shown)].tolist() == shown


@pytest.mark.parametrize("is_supervised", [False, True])
def test_a11_the_close_of_an_empty_pair_carries_loss_only_where_asked(kimi, tokenizer, is_supervised):
    encoder = ChatEncoder(tokenizer, kimi.stop_token_ids, supervise_empty_think=is_supervised)
    (encoded,) = encoder.encode_conversation(chat("Hi", "Hello"), None, "auto")
    assert masked_texts(encoder, encoded) == [("</think>" if is_supervised else "") + f"Hello{STOP}"]


@pytest.mark.parametrize("reasoning", ["because", "think", "<", "</thin"])
def test_a13_reasoning_is_in_the_ids_and_carries_loss(encoder, reasoning):
    (encoded,) = encoder.encode_conversation(reasoned(("Hi", reasoning, "Hello")), None, "auto")
    assert masked_texts(encoder, encoded) == [f"{reasoning}</think>Hello{STOP}"]


def test_without_thinking_a_row_that_has_reasoning_is_counted(kimi, tokenizer):
    encoder = ChatEncoder(tokenizer, kimi.stop_token_ids, {"thinking": False})
    with pytest.raises(UnusableError, match="reasoning that the template leaves out"):
        encoder.encode_conversation(reasoned(("Hi", "because", "Hello")), None, "auto")


def test_c2_a_tool_chain_keeps_its_reasoning_until_it_is_answered(encoder):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Rome?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "ask",
            "tool_calls": [call("weather", city="Rome")],
        },
        {"role": "tool", "content": "sunny <|im_end|>?"},
        {"role": "assistant", "content": "Sunny.", "reasoning_content": "it said sunny"},
        {"role": "user", "content": "And tomorrow?"},
        {"role": "assistant", "content": "No idea."},
    ]
    encoded = encoder.encode_conversation(messages, [{"type": "function", "function": {"name": "weather"}}], "auto")
    called = calls_text("weather", '{"city": "Rome"}')
    assert [masked_texts(encoder, e) for e in encoded] == [
        [f"ask</think>{called}{STOP}"],
        [f"it said sunny</think>Sunny.{STOP}"],
        [f"No idea.{STOP}"],
    ]
    texts = [encoder.decode(e.input_ids.tolist()) for e in encoded]
    assert f"<think>ask</think>{called}" in texts[1] and "sunny <|im_end|>?" in texts[1]
    assert f"<think></think>{called}" in texts[2] and "it said" not in texts[2]


def test_a_call_without_reasoning_carries_loss_from_its_first_token(encoder):
    messages = [*chat("Hi"), {"role": "assistant", "content": "", "tool_calls": [call("f", a=1)]}]
    (encoded,) = encoder.encode_conversation(messages, None, "auto")
    assert masked_texts(encoder, encoded) == [calls_text("f", '{"a": 1}') + STOP]


words = st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=30).filter(lambda t: t.strip())
answers = st.tuples(words, st.one_of(st.just(""), words), words)
free = st.fixed_dictionaries({"turns": st.lists(answers, min_size=1, max_size=4), "chain": st.integers(0, 2)})


@settings(max_examples=150, deadline=None)
@given(made=free)
def test_what_is_supervised_is_what_the_assistant_wrote_in_order(encoder, made):
    """Over reasoning, tool chains and any text, `<think>` and repetitions among it; nobody else's token carries loss."""
    messages, written = [], []
    for question, reasoning, content in made["turns"]:
        messages.append({"role": "user", "content": question})
        for _ in range(made["chain"]):
            messages.append({"role": "assistant", "content": None, "tool_calls": [call("f", q=question)]})
            messages.append({"role": "tool", "content": content})
            written.append(calls_text("f", json.dumps({"q": question}, ensure_ascii=False)) + STOP)
        messages += reasoned((question, reasoning, content))[1:]
        written.append((f"{reasoning.strip()}</think>" if reasoning else "") + content.strip() + STOP)
    encoded = encoder.encode_conversation(messages, None, "auto")
    found = ["".join(masked_texts(encoder, e)) for e in encoded]
    if len(found) == 1:  # history was left as it was
        written = ["".join(written)]
    assert [squeezed(text) for text in found] == [squeezed(text) for text in written]


def squeezed(text: str) -> str:
    """White space at the ends of an answer is the template's choice."""
    return "".join(text.split())
