"""Reading rows: every format, GSM8K's and verl's columns, and errors that name the line."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import pytest

from lockstep.config import TaskConfig
from lockstep.environments.base import PromptLimit
from lockstep.environments.data import rows
from lockstep.environments.data.rows import Problems
from lockstep.environments.data.sources import has_splits
from lockstep.errors import InputError, PromptTooLong
from lockstep.models.tokenizer import byte_tokenizer, max_token_bytes, require_prompt_fits
from lockstep.session.text.messages import normalize_chat

MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
ROWS: list[dict[str, Any]] = [
    {"prompt": MESSAGES, "data_source": "d", "reward_model": {"style": "rule", "ground_truth": "7"}},
    {"prompt": MESSAGES, "data_source": "e", "reward_model": {"style": "rule", "ground_truth": "8"}},
]


def read_problems(data: str, split: str = "train", **fields: Any) -> Problems:
    return rows.read_problems(data, TaskConfig(name="dataset", split=split, **fields))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_json_lines(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", [{"prompt": "é", "a": 1}, {"prompt": MESSAGES, "b": [2]}])
    first, second = read_problems(data)
    assert (first.prompt, first.columns, first.origin) == ("é", {"a": 1, "b": None}, f"{data} line 1")
    assert (second.prompt, second.columns, second.origin) == (MESSAGES, {"a": None, "b": [2]}, f"{data} line 2")


def test_blank_lines_a_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b\\u2028c"}')
    problems = read_problems(str(path))
    assert [(p.prompt, p.origin) for p in problems] == [("a", f"{path} line 1"), ("b\u2028c", f"{path} line 3")]


def test_parquet_and_saved_folders_and_folders_of_files(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(tmp_path / "splits")
    (tmp_path / "files").mkdir()
    write(tmp_path / "files" / "train.jsonl", ROWS)
    for name in ("rows.parquet", "saved", "splits", "files"):
        problems = read_problems(str(tmp_path / name))
        assert [{"prompt": p.prompt, **p.columns} for p in problems] == ROWS
        assert problems[1].origin == f"{tmp_path / name} row 1"
    (only,) = read_problems(str(tmp_path / "splits"), "test")
    assert only.columns["reward_model"]["ground_truth"] == "8"


def test_gsm8k_columns_ask_the_question(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = write(tmp_path / "g.jsonl", [{"question": "How many?", "answer": "#### 3"}])
    (problem,) = read_problems(data)
    (said,) = caplog.messages
    assert said.startswith(f"task.data {data} has question and answer, which are asked as in GSM8K: 'Reason step")
    rows.read_problems(data, TaskConfig(name="gsm8k"))
    assert len(caplog.messages) == 1
    assert isinstance(problem.prompt, list)
    (message,) = problem.prompt
    assert message["role"] == "user" and message["content"].startswith("How many?\n\n") and "####" in message["content"]
    assert problem.columns == {"question": "How many?", "answer": "#### 3"}


def test_a_prompt_column_comes_before_question_and_answer(tmp_path: Path) -> None:
    row = {"prompt": "p", "question": "q", "answer": "a"}
    (problem,) = read_problems(write(tmp_path / "g.jsonl", [row]))
    assert (problem.prompt, problem.columns) == ("p", {"question": "q", "answer": "a"})


def test_an_answer_of_the_past_may_have_calls_alone_or_nothing(tmp_path: Path) -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    said = [{"role": "assistant", "tool_calls": calls, **content} for content in ({}, {"content": None})]
    prompt = [*said, {"role": "assistant", "content": ""}, {"role": "tool", "content": "1"}]
    (problem,) = read_problems(write(tmp_path / "rows.jsonl", [{"prompt": prompt}]))
    assert problem.prompt == [{"role": "assistant", "tool_calls": calls, "content": ""}] * 2 + prompt[2:]


def test_messages_of_the_past_are_normalized_as_those_of_the_api(tmp_path: Path) -> None:
    """Templates leave out a developer, and show arguments that are a text of JSON as a text."""
    calls = [{"type": "function", "function": {"name": "add", "arguments": text}} for text in ('{"a": null}', "")]
    prompt = [{"role": "developer", "content": "d"}, {"role": "user", "content": "u", "tool_calls": [], "name": None}]
    prompt += [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "1"}]
    data = write(tmp_path / "rows.jsonl", [{"prompt": prompt}])
    (problem,) = read_problems(data, system_prompt="never shown")
    developer, user, answer, tool = problem.prompt
    assert (developer, user) == ({"role": "system", "content": "d"}, {"role": "user", "content": "u"})
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == [{"a": None}, {}] and tool == prompt[3]
    assert normalize_chat(prompt) == problem.prompt
    calls[1]["function"] = {"name": "add", "arguments": "1"}
    with pytest.raises(
        InputError, match=r"line 1: prompt message 2 tool_calls\[1\].function.arguments must be an object"
    ):
        read_problems(write(tmp_path / "rows.jsonl", [{"prompt": prompt}]))


def test_tables_add_nothing_to_messages(tmp_path: Path) -> None:
    """A table gives every message and every call the fields of all, as None."""
    given: list[dict[str, Any]] = [{"x": 1}, {"city": "Rome", "near": {"km": 2}}, {"near": {"of": ["a"]}}]
    calls = [[{"type": "function", "function": {"name": "f", "arguments": arguments}}] for arguments in given]
    asked, said = {"role": "user", "content": "u"}, {"role": "tool", "content": "1"}
    prompts = [[asked, {"role": "assistant", "tool_calls": of_one, "content": ""}, said] for of_one in calls]
    table = datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    for name in ("rows.parquet", "saved"):
        assert [problem.prompt for problem in read_problems(str(tmp_path / name))] == prompts


GOOD = '{"prompt": "p"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON: Expecting .*; each line must be one JSON object"),
        ("prompt", "line 2 is not JSON"),
        ("[1, 2]", "line 2 is of type list; each line must be a JSON object"),
        ("3", "line 2 is of type int; each line must be a JSON object"),
        ("[" * 100_000, "line 2 is not JSON"),
        ("{}", "line 2 has no columns; it needs prompt, or question and answer"),
        ('{"question": "q"}', "line 2 has question; it needs prompt, or question and answer"),
        ('{"question": 3, "answer": "a"}', "line 2: question must be a text"),
        ('{"question": "q", "answer": "a"}', "line 2 has question and answer and the first row prompt; all rows must"),
        ('{"prompt": 3}', "line 2: prompt is of type int; it must be a text or a list of chat messages"),
        ('{"prompt": null}', "line 2: prompt is of type NoneType"),
        ('{"prompt": ""}', "line 2: prompt is empty"),
        ('{"prompt": []}', "line 2: prompt is empty"),
        ('{"prompt": "\\ud800"}', "line 2: prompt is half a surrogate pair"),
        ('{"prompt": ["hi"]}', "line 2: prompt message 0 must be an object with role and content"),
        (
            '{"prompt": [{"role": "usr", "content": "a"}]}',
            "line 2: prompt message 0 has the role 'usr'; did you mean user?",
        ),
        ('{"prompt": [{"role": "assistant"}]}', "line 2: prompt message 0 must be an object with role and content"),
        ('{"prompt": [{"role": "user", "content": ""}]}', "line 2: prompt message 0 must be an object with role"),
        ('{"prompt": [{"role": "user"}]}', "line 2: prompt message 0 must be an object with role and content"),
        ('{"prompt": [{"role": "assistant", "content": "a"}]}', "line 2: prompt: the last message .*, so remove it"),
        ('{"prompt": "p", "a": {"b": 1, "c": 2, "b": 3}}', "line 2 has the key 'b' twice"),
        (
            '{"messages": [], "id": 1}',
            "line 2 has messages, id; it needs prompt, .*perhaps messages, with task.prompt_co",
        ),
        ('{"prompt": "p", "completions": 1}', "line 2: column 'completions' has the name of a reward argument"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{GOOD}\n{line}\n{GOOD}\n")
    with pytest.raises(InputError, match=f"^{path} {message}"):
        read_problems(str(path))


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"prompt": "\xff"}\n')
    with pytest.raises(InputError, match=f"{path} line 2 is not UTF-8"):
        read_problems(str(path))


def test_malformed_rows_of_other_formats_are_named_by_row(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"prompt": "p"}, {"prompt": ""}]).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(InputError, match="rows.parquet row 1: prompt is empty"):
        read_problems(str(tmp_path / "rows.parquet"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "none.jsonl cannot be read: No such file"),
        ("none.parquet", None, "none.parquet does not exist"),
        ("none/folder/", None, "does not exist"),
        (f"{'a' * 300}.parquet", None, "does not exist"),
        ("empty.jsonl", "", "empty.jsonl has no rows"),
        ("blank.jsonl", "\n \n", "blank.jsonl has no rows"),
        ("rows.tsv", "prompt\np\n", "rows.tsv must end in .jsonl, .json, .ndjson, .csv or .parquet, or be a folder"),
        ("bad.parquet", "no parquet", r"bad.parquet \(split train\) cannot be loaded"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        read_problems(f"{tmp_path}/{name}")


def test_the_home_of_nobody_has_no_data() -> None:
    with pytest.raises(InputError, match="~nobody_of_this_name/x.csv does not exist"):
        read_problems("~nobody_of_this_name/x.csv")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows"])
def test_a_pipe_or_a_device_is_refused_at_once(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for make in (lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero")):
        make()
        with pytest.raises(InputError, match=f"task.data {path} is not a regular file"):
            read_problems(str(path))
        path.unlink()


def test_a_parquet_file_without_rows_is_named(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"prompt": []}).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(InputError, match=r"task.data .*rows.parquet has no rows"):
        read_problems(str(tmp_path / "rows.parquet"))


def test_splits_of_what_was_saved_and_their_parts(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list([{"prompt": f"p{i}"} for i in range(10)])
    saved = str(tmp_path / "splits")
    datasets.DatasetDict({"train": table, "more": table.select([7])}).save_to_disk(saved)
    for split, kept in (("train[:30%]", [0, 1, 2]), ("train[-1:]+more", [9, 7]), ("more", [7])):
        assert [problem.prompt for problem in read_problems(saved, split)] == [f"p{i}" for i in kept]
    for unknown in ("test", "train+test[:5%]"):
        with pytest.raises(InputError, match="splits has no split 'test'; it has train, more"):
            read_problems(saved, unknown)


def test_another_column_can_be_the_prompt(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", [{"input": "p", "prompt": "not this", "label": 1}])
    (problem,) = read_problems(data, prompt_column="input")
    assert (problem.prompt, problem.columns) == ("p", {"input": "p", "prompt": "not this", "label": 1})
    with pytest.raises(InputError, match="line 1 has input, prompt, label; it needs text, or question and answer"):
        read_problems(data, prompt_column="text")


def test_a_system_prompt_goes_before_prompts_that_have_none(tmp_path: Path) -> None:
    user = [{"role": "user", "content": "u"}]
    data = [{"prompt": "u"}, {"prompt": user}, {"prompt": MESSAGES}]
    problems = list(read_problems(write(tmp_path / "rows.jsonl", data), system_prompt="Be brief."))
    asking = write(tmp_path / "asking.jsonl", [{"question": "q", "answer": "a"}])
    problems += read_problems(asking, system_prompt="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert [p.prompt for p in problems[:3]] == [[system, *user], [system, *user], MESSAGES]
    assert problems[3].prompt[0] == system and problems[3].prompt[1]["content"].startswith("q\n\n")


def test_rows_are_read_when_asked_for(tmp_path: Path) -> None:
    """Opening keeps two numbers a row: 40 MB of rows leave less than 1 MB behind."""
    path = tmp_path / "rows.jsonl"
    line = json.dumps({"prompt": "p" * 20_000, "n": 1})
    path.write_text(f"{line}\n" * 2000)
    tracemalloc.start()
    try:
        problems = read_problems(str(path))
        size, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 1 << 20 and peak < 4 << 20
    assert problems[1999].origin == f"{path} line 2000" and problems[1999].columns == {"n": 1}


def encode(prompt: Any) -> list[int]:
    return list(prompt.encode())


LIMIT = PromptLimit(10, "task.max_prompt_length")


def long_rows(folder: Path) -> str:
    return write(folder / "rows.jsonl", [{"prompt": "p" * length, "n": length} for length in (3, 11, 10, 400, 1, 12)])


def test_overlong_prompts_are_refused_by_name(tmp_path: Path) -> None:
    data = long_rows(tmp_path)
    message = (
        f"3 of 6 training prompts of task.data {data} have more than 10 tokens .task.max_prompt_length.: "
        f"{data} line 2 .11 tokens., {data} line 4 .400 tokens., {data} line 6 .12 tokens.; shorten them, or leave "
        "them out with task.filter_overlong_prompts"
    )
    with pytest.raises(InputError, match=message):
        read_problems(data).filter_overlong(encode, LIMIT, leave_out=False)


def test_overlong_prompts_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = long_rows(tmp_path)
    kept = read_problems(data).filter_overlong(encode, LIMIT, leave_out=True)
    assert [(p.columns["n"], p.origin) for p in kept] == [
        (n, f"{data} line {line}") for n, line in ((3, 1), (10, 3), (1, 5))
    ]
    assert [p.columns["n"] for p in kept[1:]] == [10, 1]
    assert "left out: 3 of 6 training prompts" in caplog.text
    with pytest.raises(InputError, match="6 of 6 training prompts .*; none is left"):
        read_problems(data).filter_overlong(encode, PromptLimit(0, "a test"), leave_out=True)


def test_prompts_far_below_the_limit_are_not_encoded(tmp_path: Path) -> None:
    problems = read_problems(long_rows(tmp_path))
    encoded = []

    def counting(prompt: Any) -> list[int]:
        encoded.append(prompt)
        return encode(prompt)

    assert problems.filter_overlong(counting, PromptLimit(1000, "the context"), leave_out=False) is problems
    assert encoded == ["", "p" * 400]  # what the tools take, and what may be too long


def test_chats_are_measured_by_all_that_a_template_shows(tmp_path: Path) -> None:
    """Not by the contents of their messages alone: by calls of tools, and what stands around each message and all."""
    calls = [{"type": "function", "function": {"name": "write", "arguments": {"text": "x" * 1000}}}]
    asked, said = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
    called = [asked, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "ok"}]
    data = write(tmp_path / "rows.jsonl", [{"prompt": p} for p in (called, [asked, said] * 40 + [asked], [asked], "?")])

    def kept(around: int, limit: int) -> list[str]:
        def encode(prompt: Any) -> list[int]:
            return [0] * (len(json.dumps(prompt)) + around * isinstance(prompt, list))

        left = read_problems(data).filter_overlong(encode, PromptLimit(limit, "a test"), leave_out=True)
        return [problem.origin.rpartition(" ")[2] for problem in left]

    assert (kept(0, 700), kept(600, 600)) == (["3", "4"], ["4"])


def test_a_prompt_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    def refuse(prompt: Any) -> list[int]:
        raise InputError("no template")

    data = long_rows(tmp_path)
    with pytest.raises(InputError, match=f"^{data} line 1: no template"):
        read_problems(data).filter_overlong(refuse, LIMIT, leave_out=True)


@pytest.mark.parametrize("name", ["", "nothing", "deep"])
def test_a_folder_without_data_files_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "nothing").mkdir()
    (tmp_path / "deep" / "a" / "b").mkdir(parents=True)
    (tmp_path / "notes.md").write_text("no data")
    with pytest.raises(InputError, match=f"task.data {tmp_path}/{name} is a folder without data files"):
        read_problems(f"{tmp_path}/{name}")


# Other files, and prompts beyond every limit.


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", 'prompt,answer\nhello,1\n"a, ""quoted""\nline",2\n'),
        ("rows.json", '[{"prompt": "hello", "answer": 1},\n {"prompt": "a, \\"quoted\\"\\nline", "answer": 2}]'),
        (
            "rows.json",
            '\n\n  [\n{"prompt": "hello", "answer": 1},{"prompt": "a, \\"quoted\\"\\nline", "answer": 2}\n]\n',
        ),
    ],
)
def test_csv_and_json_arrays(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    data = str(tmp_path / name)
    problems = read_problems(data)
    assert [problem.prompt for problem in problems] == ["hello", 'a, "quoted"\nline']
    assert [problem.columns for problem in problems] == [{"answer": 1}, {"answer": 2}]
    assert [problem.origin for problem in problems] == [f"{data} row 0", f"{data} row 1"]
    assert not has_splits(data)


def test_a_csv_column_whose_numbers_begin_with_zeros_or_plus_is_text(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(
        "prompt,code,share,n,x,tel\na,007,0.5,10,1e999,+49151\nb,42,0,,1,+1\nc,,1e2,0,2,\n"
    )
    found = [problem.columns for problem in read_problems(str(tmp_path / "rows.csv"))]
    assert [row["code"] for row in found] == ["007", "42", None]
    assert [row["tel"] for row in found] == ["+49151", "+1", None]
    assert [row["share"] for row in found] == [0.5, 0.0, 100.0] and found[0]["x"] == "1e999"
    assert repr([row["n"] for row in found]) == "[10, None, 0]", "an empty field makes no floats of whole numbers"


def test_a_csv_field_is_what_is_written_in_a_folder_too(tmp_path: Path) -> None:
    """Words that stand for a missing value elsewhere, and numbers of more digits than a float has."""
    header, folder = "prompt,word,number,truth\n", tmp_path / "a.folder"
    folder.mkdir()
    (folder / "a.csv").write_text(f"{header}NA,None,9007199254740993,True\n")
    (folder / "b.csv").write_text(f"{header}n/a,null,7,False\nc,nan,8,True\n")
    rows = read_problems(str(folder))
    assert [problem.prompt for problem in rows] == ["NA", "n/a", "c"]
    assert [problem.columns["word"] for problem in rows] == ["None", "null", "nan"]
    assert [problem.columns["number"] for problem in rows] == ["9007199254740993", "7", "8"]
    assert [problem.columns["truth"] for problem in rows] == ["True", "False", "True"]
    (folder / "b.csv").write_text(f"{header}c,d\n")
    with pytest.raises(InputError, match="b.csv line 2 has 2 fields for 4 columns"):
        read_problems(str(folder))


def test_json_values_are_as_written_in_arrays_and_folders(tmp_path: Path) -> None:
    """Texts that look like dates or numbers, beside others, and whole numbers of any size."""
    rows = [
        {"prompt": "a", "x": "1969-07-20", "y": "02139", "z": ["007", 2]},
        {"prompt": "b", "x": "t", "y": 1, "z": 2**70},
    ]
    (tmp_path / "array.json").write_text(json.dumps(rows))
    (tmp_path / "folder").mkdir()
    for name, row in zip("ab", rows, strict=True):
        write(tmp_path / "folder" / f"{name}.jsonl", [row])
    (tmp_path / "folder").rename(tmp_path / "a.folder")  # as a file's name may end
    for data in ("array.json", "a.folder"):
        found = read_problems(str(tmp_path / data))
        assert [{"prompt": problem.prompt, **problem.columns} for problem in found] == rows
    assert [problem.origin for problem in found] == [f"{tmp_path}/a.folder/{name}.jsonl line 1" for name in "ab"]


def test_a_folder_of_several_formats_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"prompt": "a"}])
    (tmp_path / "b.csv").write_text("prompt\nb\n")
    with pytest.raises(InputError, match="has files of several formats: a.jsonl and b.csv; name one of them"):
        read_problems(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", "", "task.data .*rows.csv has no rows"),
        ("rows.csv", "prompt,answer\n", "task.data .*rows.csv has no rows"),
        ("rows.csv", "prompt\n,\n", "rows.csv line 2 has 2 fields for 1 columns"),
        ("rows.csv", "prompt\n3\n", "rows.csv row 0: prompt is of type int"),
        ("rows.csv", "prompt,n\na,1\nb,2,3\n", "rows.csv line 3 has 3 fields for 2 columns"),
        ("rows.csv", "prompt,n\na\n", "rows.csv line 2 has 1 fields for 2 columns"),
        ("rows.csv", "prompt,n,n\na,1,2\n", "rows.csv line 1 names the column 'n' twice"),
        ("rows.json", "[]", "task.data .*rows.json has no rows"),
        ("rows.json", "[1, 2]", "rows.json row 0 is of type int; it must be an object"),
        ("rows.json", '[{"prompt": "a"}', "task.data .*rows.json is not JSON: Expecting"),
        ("rows.json", '[{"prompt": "a"}, {"prompt": 3}]', "rows.json"),
    ],
)
def test_a_damaged_csv_or_json_array(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        read_problems(str(tmp_path / name))


@pytest.mark.parametrize("data", ["data/train.csv", "data/train.txt", "data/train.jsonl.gz", "train.tsv"])
def test_a_missing_file_is_not_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch, data: str) -> None:
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(InputError, match=f"task.data {data} does not exist"):
        read_problems(data)


def test_a_prompt_of_megabytes_is_refused_without_its_tokens(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", [{"prompt": "a" * 4_000_000}, {"prompt": "b"}])

    def encode(prompt: str | list[dict[str, str]]) -> list[int]:
        require_prompt_fits(prompt, context=100, longest=20)
        return [1]

    problems = read_problems(data)
    message = "1 of 2 training prompts of .* have more than 90 tokens .*rows.jsonl line 1 \\(4,000,000 bytes\\)"
    with pytest.raises(InputError, match=message):
        problems.filter_overlong(encode, PromptLimit(90, "a test"), leave_out=False)
    kept = problems.filter_overlong(encode, PromptLimit(90, "a test"), leave_out=True)
    assert [problem.prompt for problem in kept] == ["b"]


def test_the_bound_on_a_prompts_size_is_of_characters_that_the_context_cannot_hold() -> None:
    tokenizer = byte_tokenizer()
    longest = max_token_bytes(tokenizer)
    assert longest == len("<|endoftext|>")
    require_prompt_fits("x" * (2 * 10 * longest), 10, longest)
    with pytest.raises(PromptTooLong, match="the prompt has 261 bytes, which is more than the model's context of 10"):
        require_prompt_fits([{"role": "user", "content": "x" * 260}, {"role": "user", "content": "y"}], 10, longest)
