"""Files are whole or absent."""

import json

import pytest

from common.errors import PipelineError, Problems, some
from common.files import format_bytes, format_duration, read_json, replacing, sha256_json, write_json


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"v": 1})
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert json.loads(path.read_text()) == {"v": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_written_file_is_readable_by_others(tmp_path):
    write_json(tmp_path / "a.json", {})
    assert (tmp_path / "a.json").stat().st_mode & 0o444 == 0o444


def test_broken_json_is_named(tmp_path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(PipelineError, match=r"a\.json: is not JSON"):
        read_json(tmp_path / "a.json")


def test_key_order_does_not_change_a_json_hash():
    assert sha256_json({"a": 1, "b": 2}) == sha256_json({"b": 2, "a": 1})
    assert sha256_json({"a": 1, "b": 2}) != sha256_json({"a": 2, "b": 1})


def test_problems_are_gathered_and_reported_once():
    problems = Problems()
    problems.add("a", "is wrong", "mend it")
    with problems.collect():
        raise PipelineError(*Problems_of("b"))
    problems.add("a", "is wrong", "mend it")
    with pytest.raises(PipelineError) as error:
        problems.raise_if_any()
    assert [p.where for p in error.value.problems] == ["a", "b"]
    assert str(error.value) == "a: is wrong\n  fix: mend it\nb: is missing"


def Problems_of(where):  # noqa: N802
    problems = Problems()
    problems.add(where, "is missing")
    return list(problems)


def test_some_names_three_and_counts_the_rest():
    assert some([17, 402, 977, *range(16)]) == "17, 402, 977 and 16 more"
    assert some([1, 2]) == "1, 2"


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (594e6, "594 MB"), (11.7e12, "11.7 TB"), (999.7e6, "1 GB")])
def test_bytes_are_written_in_decimal_units(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(3.21, "3.2 s"), (185, "3 min 5 s"), (26000, "7 h 13 min")])
def test_durations(seconds, text):
    assert format_duration(seconds) == text
