"""The assistant mask: exact, by position, for fast and slow tokenizers. Field faults, part A."""

import copy

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from common.chat import ChatEncoder, UnusableError, cut
from common.errors import PipelineError
from tests.conftest import CHATML
from tests.slow_tokenizer import SPECIAL, ByteTokenizer

# Blanks the reasoning of earlier turns, as Kimi's and Qwen3's templates do, and adds an empty pair to plain answers.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}"
    "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% else %}<think></think>{% endif %}"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def slow_encoder(template: str) -> ChatEncoder:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = template
    assert not tokenizer.is_fast
    return ChatEncoder(tokenizer, [SPECIAL["<|im_end|>"]])


@pytest.fixture(params=["fast", "slow"])
def encoder(request, smollm2_tokenizer):
    return slow_encoder(CHATML) if request.param == "slow" else ChatEncoder(smollm2_tokenizer, [2])


def chat(*texts: str):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def masked_texts(encoder, encoded):
    """The text under each run of the mask."""
    texts, run = [], []
    for token, is_written in zip(encoded.input_ids.tolist(), [*encoded.loss_mask.tolist()], strict=True):
        if is_written:
            run.append(token)
        elif run:
            texts.append(encoder.decode(run))
            run = []
    return [*texts, encoder.decode(run)] if run else texts


def test_a1_without_generation_tags_the_mask_is_the_answer_and_its_end_token(encoder):
    (encoded,) = encoder.encode_conversation(chat("Hi", "Hello there"), None, "auto")
    assert masked_texts(encoder, encoded) == ["Hello there<|im_end|>"]


@pytest.mark.parametrize("tag", ["{% generation %}", "{%- generation -%}"])
@pytest.mark.parametrize("kind", ["fast", "slow"])
def test_a5_a_template_with_generation_tags_gives_the_same_mask(kind, tag, smollm2_tokenizer):
    end = tag.replace("generation", "endgeneration")
    tagged = CHATML.replace(
        "{{ m.content }}<|im_end|>",
        "{% if m.role == 'assistant' %}"
        + tag
        + "{{ m.content }}<|im_end|>"
        + end
        + "{% else %}{{ m.content }}<|im_end|>{% endif %}",
    ).replace("\n{% endfor", "{{ '\n' }}{% endfor")
    tokenizer = ByteTokenizer() if kind == "slow" else copy.deepcopy(smollm2_tokenizer)
    assert tokenizer.is_fast == (kind == "fast")
    stop = SPECIAL["<|im_end|>"] if kind == "slow" else 2
    results = []
    for template in (CHATML, tagged):
        tokenizer.chat_template = template
        results += ChatEncoder(tokenizer, [stop]).encode_conversation(chat("Hi", "one", "and", "two"), None, "auto")
    plain, with_tags = results
    assert with_tags.input_ids.tolist() == plain.input_ids.tolist()
    assert with_tags.loss_mask.tolist() == plain.loss_mask.tolist()


def test_a2_a_long_question_carries_no_loss(encoder):
    (encoded,) = encoder.encode_conversation(chat("word " * 200, "yes it is"), None, "auto")
    assert masked_texts(encoder, encoded) == ["yes it is<|im_end|>"]


def test_a6_a_user_turn_between_two_answers_carries_no_loss(encoder):
    (encoded,) = encoder.encode_conversation(chat("a", "one", "assistant one", "two"), None, "auto")
    assert masked_texts(encoder, encoded) == ["one<|im_end|>", "two<|im_end|>"]


def test_repeated_text_is_masked_where_it_was_written(encoder):
    (encoded,) = encoder.encode_conversation(chat("same", "same", "same", "same"), None, "auto")
    assert masked_texts(encoder, encoded) == ["same<|im_end|>"] * 2
    assert encoded.loss_mask.tolist().index(True) > 5


def test_ids_are_those_that_a_server_is_shown(encoder):
    messages = chat("What is 2+2?", "4", "And 3+3?", "6")
    (encoded,) = encoder.encode_conversation(messages, None, "auto")
    shown = encoder.prompt_ids(messages[:3])
    assert encoded.input_ids[: len(shown)].tolist() == shown


def test_c5_an_answer_that_starts_with_a_line_break_is_kept_whole(encoder):
    (encoded,) = encoder.encode_conversation(chat("Hi", "\nHello"), None, "auto")
    assert "".join(masked_texts(encoder, encoded)).endswith("Hello<|im_end|>")


def test_a_single_token_answer_is_supervised(encoder):
    (encoded,) = encoder.encode_conversation(chat("Yes or no?", "a"), None, "auto")
    assert int(encoded.loss_mask.sum()) == 2


def test_c5_an_empty_answer_is_refused_with_its_reason(encoder):
    with pytest.raises(UnusableError, match="an empty assistant turn"):
        encoder.encode_conversation(chat("Hi", "  "), None, "auto")


def test_a8_a_template_that_rewrites_history_gives_one_sample_a_turn():
    encoder = slow_encoder(THINKING)
    messages = chat("a", "one", "b", "two")
    messages[1]["reasoning_content"], messages[3]["reasoning_content"] = "first", "second"
    encoded = encoder.encode_conversation(messages, None, "auto")
    assert [masked_texts(encoder, e) for e in encoded] == [
        ["<think>first</think>one<|im_end|>"],
        ["<think>second</think>two<|im_end|>"],
    ]
    shown = encoder.prompt_ids(messages[:3])
    assert encoded[1].input_ids[: len(shown)].tolist() == shown
    assert "first" not in encoder.decode(encoded[1].input_ids.tolist())


def test_one_sample_of_a_rewriting_template_is_refused():
    messages = chat("a", "one", "b", "two")
    messages[1]["reasoning_content"] = "first"
    with pytest.raises(PipelineError, match="chat template: rewrites earlier turns"):
        slow_encoder(THINKING).encode_conversation(messages, None, "conversation")


def test_a11_an_empty_think_pair_that_the_template_supplies_carries_no_loss():
    encoder = slow_encoder(THINKING)
    (encoded,) = encoder.encode_conversation(chat("Hi", "Hello"), None, "auto")
    assert masked_texts(encoder, encoded) == ["Hello<|im_end|>"]
    assert "<think></think>" in encoder.decode(encoded.input_ids.tolist())


@pytest.mark.parametrize("answer", ["think", "<", "/think", "</think>"])
def test_an_answer_that_looks_like_what_the_template_supplies_is_found_where_it_stands(answer):
    encoder = slow_encoder(THINKING)
    (encoded,) = encoder.encode_conversation(chat("Hi", answer), None, "auto")
    assert masked_texts(encoder, encoded) == [f"{answer}<|im_end|>"]


def test_what_a_template_adds_after_the_end_token_carries_no_loss():
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = CHATML.replace("<|im_end|>\n", "<|im_end|>\n<think>")
    encoder = ChatEncoder(tokenizer, [SPECIAL["<|im_end|>"], SPECIAL["<think>"]])
    (encoded,) = encoder.encode_conversation(chat("Hi", "Hello"), None, "auto")
    assert masked_texts(encoder, encoded) == ["Hello<|im_end|>"]


def test_a_turn_that_ends_in_no_stop_token_is_masked_to_the_end_of_its_text():
    encoder = slow_encoder(CHATML.replace("<|im_end|>", "##"))
    (encoded,) = encoder.encode_conversation(chat("Hi", "Hello"), None, "auto")
    assert masked_texts(encoder, encoded) == ["Hello"]


def test_a_template_whose_turns_end_in_no_stop_token_is_named_before_any_row():
    with pytest.raises(PipelineError, match="ends an assistant's turn in none of the verifier's stop tokens"):
        slow_encoder(CHATML.replace("<|im_end|>", "##")).check_template()


def test_a_conversation_that_the_template_refuses_is_unusable():
    refusing = "{% if messages | length > 2 %}{{ raise_exception('only one turn') }}{% endif %}" + CHATML
    encoder = slow_encoder(refusing)
    encoder.check_template()
    with pytest.raises(UnusableError, match="the chat template refuses it: only one turn"):
        encoder.encode_conversation(chat("a", "one", "b", "two"), None, "auto")


def test_d1_an_answer_that_a_limit_cut_gets_no_end_token(encoder):
    (encoded,) = encoder.encode_conversation(chat("Hi", "Hello"), None, "auto", is_cut=True)
    assert masked_texts(encoder, encoded) == ["Hello"]
    assert encoder.decode(encoded.input_ids.tolist()).endswith("Hello")


def test_a13_reasoning_is_supervised():
    encoder = slow_encoder(THINKING)
    messages = chat("Hi", "Hello")
    messages[1]["reasoning_content"] = "greet"
    (encoded,) = encoder.encode_conversation(messages, None, "auto")
    assert masked_texts(encoder, encoded) == ["<think>greet</think>Hello<|im_end|>"]


def test_a11_the_empty_pair_can_be_supervised():
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = THINKING
    encoder = ChatEncoder(tokenizer, [SPECIAL["<|im_end|>"]], supervise_empty_think=True)
    (encoded,) = encoder.encode_conversation(chat("Hi", "Hello"), None, "auto")
    assert masked_texts(encoder, encoded) == ["<think></think>Hello<|im_end|>"]


def test_a13_ids_with_reasoning_are_those_of_the_template():
    encoder = slow_encoder(THINKING)
    messages = chat("Hi", "Hello")
    messages[1]["reasoning_content"] = "greet"
    (encoded,) = encoder.encode_conversation(messages, None, "auto")
    whole = encoder.render(messages, None, generate=False)
    assert encoder.decode(encoded.input_ids.tolist()) == whole.removesuffix("\n")


def test_a_template_whose_turn_does_not_follow_its_prompt_is_named():
    wrong = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>model\n{% endif %}")
    with pytest.raises(PipelineError, match="an assistant turn does not begin where its generation prompt ends"):
        slow_encoder(wrong).encode_conversation(chat("Hi", "Hello"), None, "auto")


def test_a_template_that_hides_the_answer_is_named():
    wrong = CHATML.replace("{{ m.content }}", "{{ m.content if m.role == 'user' else '...' }}")
    with pytest.raises(PipelineError, match="does not show the assistant's text 'Hello'"):
        slow_encoder(wrong).encode_conversation(chat("Hi", "Hello"), None, "auto")


def test_a17_cutting_can_leave_nothing_supervised(encoder):
    (encoded,) = encoder.encode_conversation(chat("word " * 200, "yes it is"), None, "auto")
    assert int(cut(encoded, 64).loss_mask.sum()) == 0


def test_the_prefix_of_a_users_text_ends_where_the_text_begins(encoder):
    prefix = encoder.decode(encoder.user_prefix_ids())
    assert prefix.endswith("<|im_start|>user\n")


plain_text = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="<|>"), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(plain_text.filter(lambda t: t.strip()), min_size=2, max_size=6))
def test_what_is_supervised_is_what_the_assistant_wrote(encoder, texts):
    assume(all(encoder.decode(encoder.encode(text)) == text for text in texts))  # SmolLM2's BPE lacks some bytes
    messages = chat(*texts[: len(texts) // 2 * 2])
    encoded = encoder.encode_conversation(messages, None, "auto")
    found = [text for e in encoded for text in masked_texts(encoder, e)]
    written = [m["content"].strip() for m in messages if m["role"] == "assistant"]
    assert [text.removesuffix("<|im_end|>").strip() for text in found] == written


def test_an_answer_that_the_tokenizer_changes_is_refused(smollm2_tokenizer):
    """The mask is proven: what is under it is decoded and must be the answer."""
    from tokenizers import normalizers

    tokenizer = copy.deepcopy(smollm2_tokenizer)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    encoder = ChatEncoder(tokenizer, [2])
    with pytest.raises(UnusableError, match="text that the tokenizer does not give back"):
        encoder.encode_conversation(chat("Hi", "Hello"), None, "auto")
