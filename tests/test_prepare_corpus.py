"""Rows of any format; what can't be used is skipped with its reason. Field faults, part C."""

import json

import datasets
import pytest

from common import cleaning
from common.config import SourceSection
from common.corpus import Conversation, Skipped, check_source, prompt_of, read_source, to_conversation, unit_hash
from common.errors import PipelineError


def read(path, **settings):
    return list(read_source(SourceSection(path=str(path), **settings)))


def roles(row):
    return [m["role"] for m in to_conversation(row, "row", source="s").messages]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no messages"),
        ([{"role": "system", "content": "x"}], "only a system message"),
        ([{"role": "assistant", "content": "x"}], "starts with assistant"),
        ([{"role": "user", "content": "x"}] * 2, "two user turns in a row"),
        ([{"role": "user", "content": " "}], "an empty user turn"),
        ([{"role": "robot", "content": "x"}], "an unknown role"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "content that is not text"),
        (["x"], "an unknown role"),
        ([{"role": "user", "content": 7}], "a message of another form than OpenAI's"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": ["f"]}],
            "a message of another form than OpenAI's",
        ),
    ],
)
def test_c1_a_row_that_no_template_takes_is_skipped(messages, reason):
    found = to_conversation({"messages": messages}, "row 1", source="s")
    assert isinstance(found, Skipped)
    assert found.reason == reason


def test_c2_tool_turns_and_null_content_are_kept():
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    row = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "content": "r"},
            {"role": "assistant", "content": "a"},
        ]
    }
    assert roles(row) == ["system", "user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize("arguments", ['{"city": "Rome"}', {"city": "Rome"}])
def test_arguments_of_a_call_are_an_object_as_a_server_makes_them(arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    row = {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": [call]}]}
    (made,) = to_conversation(row, "row", source="s").messages[1]["tool_calls"]
    assert made["function"]["arguments"] == {"city": "Rome"}


def test_reasoning_has_two_names():
    row = {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a", "reasoning": "r"}]}
    assert to_conversation(row, "row", source="s").messages[1]["reasoning_content"] == "r"


def test_tools_that_are_no_list_skip_their_row():
    row = {"messages": [{"role": "user", "content": "u"}], "tools": "not [json"}
    assert to_conversation(row, "row", source="s").reason == "tools that are not a list"


@pytest.mark.parametrize("kind", ["parquet", "directory"])
def test_keys_that_only_other_rows_fill_are_not_there(tmp_path, kind):
    def row(**arguments):
        calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
        return {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": calls}]}

    path = tmp_path / f"rows.{kind}"
    made = datasets.Dataset.from_list([row(city="Rome"), row(day=3)])
    made.to_parquet(path) if kind == "parquet" else made.save_to_disk(str(path))
    found = [c.messages[1]["tool_calls"][0]["function"]["arguments"] for c in read(path)]
    assert found == [{"city": "Rome"}, {"day": 3}]


def test_c4_a_broken_file_is_read_line_by_line(tmp_path):
    path = tmp_path / "rows.txt"
    path.write_bytes('\ufeff{"prompt": "one"}\r\n\r\n{"prompt": "two"}\n{"prompt": "thr'.encode())
    found = read(path)
    assert [c.messages[0]["content"] for c in found if isinstance(c, Conversation)] == ["one", "two"]
    assert [(s.where, s.reason) for s in found if isinstance(s, Skipped)] == [("rows.txt line 4", "not JSON")]


def test_c4_an_empty_file_is_refused(tmp_path):
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(PipelineError, match=r"a\.jsonl is empty"):
        check_source(str(tmp_path / "a.jsonl"))


def test_an_absent_file_is_refused():
    with pytest.raises(PipelineError, match="does not exist"):
        check_source("./absent.jsonl")


def test_c5_text_parts_are_joined():
    row = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}
    assert to_conversation(row, "row", source="s").messages[0]["content"] == "ab"


def test_sharegpt_rows_are_understood():
    assert roles({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}) == [
        "user",
        "assistant",
    ]


@pytest.mark.parametrize("kind", ["json", "parquet", "directory"])
def test_other_formats_give_the_same_conversations(tmp_path, kind):
    rows = [{"prompt": f"question {i}"} for i in range(5)]
    path = tmp_path / f"rows.{kind}"
    if kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    assert [c.messages[0]["content"] for c in read(path)] == [row["prompt"] for row in rows]


def test_max_rows_ends_a_source_early():
    assert len(read("embedded:mt_bench", max_rows=7)) == 7


def test_a_weight_keeps_about_that_share_of_the_rows():
    assert 30 <= len(read("embedded:human_eval", weight=0.3)) <= 70


def test_a_hash_in_the_unit_interval_depends_on_the_text_alone():
    assert unit_hash("a") == unit_hash("a") != unit_hash("b")
    assert 0 <= unit_hash("a") < 1


def test_the_prompt_ends_before_the_first_answer():
    row = {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}
    assert [m["role"] for m in prompt_of(to_conversation(row, "row", source="s"))] == ["user"]


def test_a_held_out_prompt_is_recognised_inside_a_longer_text():
    held_out = cleaning.HeldOut(c.messages[0]["content"] for c in read("embedded:mt_bench"))
    question = read("embedded:mt_bench")[0].messages[0]["content"]
    assert held_out.contains(question)
    assert held_out.contains(f"Please: {question.upper()} Thanks.")
    assert not held_out.contains("Write a blog post about a trip.")


def test_equal_and_nearly_equal_prompts_count_once():
    seen = cleaning.Duplicates(0.8)
    text = "please tell me in a few words how a rainbow comes about after the rain has stopped and the sun is out"
    assert [seen.seen_before(t) for t in (text, text.upper() + "!", text + " again", "another question")] == [
        False,
        True,
        True,
        False,
    ]


def test_a_threshold_of_one_finds_equal_prompts_only():
    seen = cleaning.Duplicates(1.0)
    text = "please tell me in a few words how a rainbow comes about after the rain has stopped"
    assert [seen.seen_before(t) for t in (text, text + " again", text)] == [False, False, True]


def test_a_looping_answer_is_found_and_a_plain_one_is_not():
    assert cleaning.is_looping([1, 2, 3] + [7, 8, 9] * 30)
    assert not cleaning.is_looping(list(range(100)))
    assert not cleaning.is_looping([7, 8, 9] * 10)
