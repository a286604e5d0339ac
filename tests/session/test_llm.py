"""`LLM` and `lockstep generate`: the same tokens whichever way, text that adds up, and the prompts of a file."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from c_library import using
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cli.main import main
from lockstep.config import GeneratorConfig
from lockstep.distributed import World
from lockstep.errors import InputError
from lockstep.generator import Engine
from lockstep.models.tokenizer import TextStream
from lockstep.ops.native import library
from lockstep.session.generate import LLM
from lockstep.session.warm_up import warn_if_library_missing
from lockstep.types import GENERATE_DOMAIN, SampleIdentity, SamplingParams

SHORT = SamplingParams(max_completion_length=12, n=2)


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, device="cpu", seed=3)


def test_stream_adds_up_to_what_generate_returns(llm: LLM) -> None:
    prompts = ["one", "another prompt", [{"role": "user", "content": "hello"}]]
    expected = llm.generate(prompts, SHORT)
    texts: dict[tuple[int, int], str] = {}
    finished = {}
    for piece in llm.stream(prompts, SHORT):
        texts[piece.prompt, piece.sample] = texts.get((piece.prompt, piece.sample), "") + piece.text
        if piece.completion is not None:
            finished[piece.prompt, piece.sample] = piece.completion
    assert finished.keys() == texts.keys() == {(p, s) for p in range(3) for s in range(2)}
    for (p, s), completion in finished.items():
        assert completion == expected[p][s] and texts[p, s] == completion.text


def test_a_cache_is_freed_before_a_larger_one_is_planned(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, alive = LLM(model, device="cpu"), []
    llm.generate("one", SHORT)
    cache = weakref.ref(llm.engine_for(1, 8).cache.k)
    planned = llm.cache_tokens
    monkeypatch.setattr(llm, "cache_tokens", lambda *room: (alive.append(cache()), planned(*room))[1])
    gc.disable()
    try:
        llm.generate("one", replace(SHORT, n=64))
    finally:
        gc.enable()
    assert alive == [None]


def test_missing_operators_are_said_by_the_first_process_of_a_machine(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm, said = LLM(model, device="cpu"), list[int]()
    for local_rank in (1, 0):
        library.warn_if_missing.cache_clear()
        monkeypatch.setattr(llm, "world", World(2 + local_rank, 4, local_rank=local_rank))
        with using(None):
            warn_if_library_missing(llm)
        said.append(sum("the C operators are missing" in message for message in caplog.messages))
    assert said == [0, 1]


def test_text_comes_before_the_end(model: Path) -> None:
    llm = LLM(model, device="cpu", config=GeneratorConfig(steps_per_sync=1))
    pieces = list(llm.stream("12 34=", SamplingParams(max_completion_length=40, ignore_eos=True)))
    assert sum(1 for piece in pieces if piece.text) > 10 and [p.completion is not None for p in pieces][-1]
    assert all(piece.completion is None for piece in pieces[:-1])


def test_token_ids_go_to_the_model_as_they_are(llm: LLM) -> None:
    ids = llm.policy.encode("one")
    assert llm.generate(ids, SHORT) == llm.generate("one", SHORT) == llm.generate([ids], SHORT)


def test_each_prompt_may_have_its_own_sampling(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_completion_length=5)
    found = llm.generate(["one", "two"], [SHORT, greedy])
    assert [found[0], found[1]] == [llm.generate(["one", "two"], SHORT)[0], llm.generate(["one", "two"], greedy)[1]]
    with pytest.raises(InputError, match="there are 2 prompts and 1 sampling parameters"):
        llm.generate(["one", "two"], [SHORT])


def test_whoever_takes_a_stream_may_take_long(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes are waited for while the engine works, and not while a piece is looked at."""
    within: list[str] = []

    @contextmanager
    def watched(world: World, doing: str) -> Iterator[Callable[[], None]]:
        within.append(doing)
        yield lambda: looks.append(len(within))
        within.pop()

    looks: list[int] = []
    monkeypatch.setattr(World, "rolling_deadline", watched)
    for _ in llm.stream("abc", SHORT):
        assert not within
    assert looks and all(looks)


def test_closing_a_stream_leaves_the_engine_free(llm: LLM) -> None:
    stream = llm.stream("abc", SHORT)
    next(stream)
    with pytest.raises(InputError, match="a stream of this model is still open"):
        llm.generate("abc", SHORT)
    stream.close()
    assert len(llm.generate("abc", SHORT)[0]) == 2


def test_seeds_key_the_tokens(model: Path, llm: LLM) -> None:
    other, again = LLM(model, device="cpu", seed=4).generate("x", SHORT), LLM(model, device="cpu", seed=3)
    assert again.generate("x", SHORT) == llm.generate("x", SHORT) != other
    assert llm.generate("x", SHORT, seed=4) == other
    streamed = [piece.completion for piece in llm.stream("x", SHORT, seed=4) if piece.completion]
    assert sorted(streamed, key=lambda completion: completion.identity.sample) == other[0]
    with pytest.raises(InputError, match="seed is -1; it must be between 0 and"):
        llm.generate("x", SHORT, seed=-1)


def test_one_engine_grows_with_what_is_asked(llm: LLM) -> None:
    first = llm.engine([[1] * 4], [SHORT])
    assert llm.engine([[1] * 4], [SHORT]) is first
    larger = llm.engine([[1] * 400], [SHORT])
    assert larger is not first and llm.engine([[1] * 200], [SHORT]) is larger


def test_a_given_cache_need_not_hold_the_next_power_of_two(model: Path) -> None:
    llm = LLM(model, device="cpu", config=GeneratorConfig(kv_cache_tokens=330))
    assert len(llm.generate([1] * 300, SHORT)[0][0].token_ids) > 0
    assert llm.engine_for(1, 320) is llm.engine_for(1, 20)
    with pytest.raises(InputError, match="the cache holds 330 tokens, one sequence may need 336"):
        llm.engine_for(1, 321)


ARRIVING = [
    ("one", SHORT, 7),
    ("another prompt, which is longer", SamplingParams(temperature=0.7, top_p=0.9, max_completion_length=20), 7),
    ([{"role": "user", "content": "hello"}], SamplingParams(temperature=0.0, max_completion_length=9), 3),
    ("one", replace(SHORT, n=3, max_completion_length=17, ignore_eos=True), 2**40),
    ("one more", SamplingParams(max_completion_length=30, stop=("e", "0")), 0),
]


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 2, 0, 3, 1)])
def test_requests_that_come_between_launches_have_the_bits_of_each_alone(model: Path, order: tuple[int, ...]) -> None:
    """Whatever the order and the company, some of which leaves before its end."""
    config = GeneratorConfig(steps_per_sync=2, max_num_seqs=4, kv_cache_tokens=320)
    llm = LLM(model, device="cpu", config=config)
    engine = llm.engine_for(4, 128, [request[1] for request in ARRIVING])
    ids: dict[int, int] = {}
    done: dict[tuple[int, int], object] = {}
    for index in order:
        prompt, sampling, seed = ARRIVING[index]
        leaving = engine.add_request([index] * 40, SamplingParams(n=2), SampleIdentity(1, GENERATE_DOMAIN, 0, 0))
        identity = SampleIdentity(seed, GENERATE_DOMAIN, 0, 0)
        ids[engine.add_request(llm.policy.encode(prompt), sampling, identity)] = index
        for _ in range(2):
            done |= finished(engine, ids)
        assert {one.finish_reason for one in engine.abort(leaving)} == {"abort"}
    while engine.scheduler.busy:
        done |= finished(engine, ids)
    assert engine.cache.num_free == engine.cache.num_pages
    for index, (prompt, sampling, seed) in enumerate(ARRIVING):
        alone = LLM(model, device="cpu", seed=seed).generate(prompt, sampling)[0]
        assert [done[index, sample] for sample in range(sampling.n)] == alone


def finished(engine: Engine, ids: dict[int, int]) -> dict[tuple[int, int], object]:
    """Completions that a launch brought, by request and sample; what has grown begins with what it had."""
    found = {}
    for grown in engine.advance():
        if grown.completion is not None:
            assert grown.token_ids == grown.completion.token_ids and grown.logprobs == grown.completion.logprobs
            if grown.request_id in ids:
                found[ids[grown.request_id], grown.identity.sample] = grown.completion
    return found


def test_one_sample_of_several_is_asked_for_by_its_number(model: Path, llm: LLM) -> None:
    expected = llm.generate("x", replace(SHORT, n=4))[0]
    engine = llm.engine_for(4, 64)
    prompt = llm.policy.encode("x")
    engine.add_request(prompt, replace(SHORT, n=1), SampleIdentity(3, GENERATE_DOMAIN, 0, 0, 3))
    engine.add_request(prompt, replace(SHORT, n=2), SampleIdentity(3, GENERATE_DOMAIN, 0, 0, 1))
    found = {}
    while engine.scheduler.busy:
        found |= {s.identity.sample: s.completion for s in engine.advance() if s.completion}
    assert [found[sample] for sample in (1, 2, 3)] == expected[1:]


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ([], SHORT, "there is no prompt"),
        ("", SHORT, "prompt 1: the prompt has no tokens"),
        (["x", ""], SHORT, "prompt 2: the prompt has no tokens"),
        (["x", "y\udcff"], SHORT, "prompt 2: the prompt is not valid Unicode"),
        (["x", 5], SHORT, "prompt 2 is 5; it must be text, chat messages, or token ids"),
        ([5, "x"], SHORT, r"prompt 1 is \[5, 'x'\]; it must be text"),
        ([[5], [512]], SHORT, "prompt 2: token id 512 is outside the model's vocabulary of 512"),
        ([[]], SHORT, r"prompt 1 is \[\]; it must be text"),
        (5, SHORT, "the prompts are of type int"),
        ([{"role": "user"}], SHORT, "prompt 1 message 0 must be an object with role and content, both texts"),
        (["x", [USER, {"role": 1, "content": "y"}]], SHORT, "prompt 2 message 1 must be an object with role and cont"),
        ([{"role": "usr", "content": "x"}], SHORT, "prompt 1 message 0 has the role 'usr'; did you mean user?"),
        ([USER, {"role": "assistant", "content": "x"}], SHORT, "prompt 1: the last message is the assistant's"),
        ("x", {"n": 1}, "sampling is of type dict; it must be SamplingParams, or a list with one for each prompt"),
        (["x", "y"], [SHORT, 3], "sampling is of type int; it must be SamplingParams"),
        (["x", "y"], [], "there are 2 prompts and 0 sampling parameters; give one each"),
        ("x", SamplingParams(top_p=0.0), "sampling.top_p is 0"),
        ("x", SamplingParams(n=0), "sampling.n is 0; it must be between 1 and 65536"),
        ("x", SamplingParams(n=1.5), "sampling.n is 1.5, a float; it must be a whole number"),  # type: ignore[arg-type]
        ("x", SamplingParams(temperature=1e-45), "sampling.temperature is 1e-45; it must be at least 1e-06, or 0"),
        ("x", SamplingParams(stop="ab"), "sampling.stop is 'ab'; it must be a list of texts"),  # type: ignore[arg-type]
        ("x", SamplingParams(stop=3), "sampling.stop is 3; it must be a list of texts"),  # type: ignore[arg-type]
        ("x", SamplingParams(stop_token_ids=3), "stop_token_ids is 3; it must be a list of"),  # type: ignore[arg-type]
        ("x", SamplingParams(stop_token_ids=(2**63,)), "stop_token_ids has 9223372036854775808, which is no token id"),
        ("x", SamplingParams(max_completion_length=10**6), "exceeds the model's context"),
    ],
)
def test_what_cannot_be_generated(llm: LLM, prompts: object, sampling: SamplingParams, message: str) -> None:
    with pytest.raises(InputError, match=message):
        llm.generate(prompts, sampling)  # type: ignore[arg-type]


def utf8(token_ids: list[int]) -> str:
    """A token is a byte."""
    return bytes(token_ids).decode("utf-8", errors="replace")


@given(st.text(max_size=12) | st.binary(max_size=24), st.integers(1, 5))
def test_pieces_add_up_for_any_bytes(content: str | bytes, size: int) -> None:
    token_ids = list(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    text, shown = TextStream(utf8), ""
    for end in range(size, len(token_ids) + size, size):
        shown += text.feed(token_ids[:end])
        assert utf8(token_ids).startswith(shown)
    assert shown + text.finish(utf8(token_ids)) == utf8(token_ids)


def test_a_character_is_held_back_until_it_is_whole() -> None:
    text, euro = TextStream(utf8), list("a€".encode())
    assert [text.feed(euro[: i + 1]) for i in range(4)] == ["a", "", "", "€"]


def generate(model: Path, *arguments: str) -> int:
    return main(["generate", "--model", str(model), "--device", "cpu", "--max-completion-length", "8", *arguments])


def test_generate_streams_what_json_reports(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(model, "--prompt", "ab", "--n", "3", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.keys() == {"model", "prompt", "completions"} and printed["prompt"] == "ab"
    assert len(printed["completions"][0]["logprobs"]) == len(printed["completions"][0]["token_ids"])
    assert list(printed["completions"][0]) == [
        *("token_ids", "logprobs", "model_logprobs", "weight_versions", "text", "finish_reason", "identity"),
        *("route_digests", "prompt_route_digests"),
    ]
    assert generate(model, "--prompt", "ab", "--n", "3") == 0
    texts = [one["text"] for one in printed["completions"]]
    assert capsys.readouterr().out == "".join(f"--- {i + 1} of 3\n{text}\n" for i, text in enumerate(texts))
    assert generate(model, "--prompt", "ab") == 0
    assert capsys.readouterr().out == texts[0] + "\n"


def test_generate_from_files(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.txt").write_text("ab\n\ncd\n")
    rows = [{"prompt": "ab", "answer": 1}, {"prompt": [{"role": "user", "content": "hi"}]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, prompts in (("p.txt", ["ab", "cd"]), ("p.jsonl", [row["prompt"] for row in rows])):
        assert generate(model, "--prompts", str(tmp_path / name), "--json") == 0
        printed = json.loads(capsys.readouterr().out)
        assert [row["prompt"] for row in printed["prompts"]] == prompts
        assert generate(model, "--prompts", str(tmp_path / name)) == 0
        texts = [row["completions"][0]["text"] for row in printed["prompts"]]
        assert capsys.readouterr().out == "".join(f"--- {i + 1} of 2\n{text}\n" for i, text in enumerate(texts))


def test_a_prompt_of_a_text_file_is_a_line_whatever_characters_it_has(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_bytes("\ufeffa\u2028b\x0c\x85c\r\nd\n".encode())
    assert generate(model, "--prompts", str(tmp_path / "p.txt"), "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["prompt"] for row in printed["prompts"]] == ["a\u2028b\x0c\x85c", "d"]


@pytest.fixture
def templated(model: Path, tmp_path: Path) -> Path:
    """The model with a chat template that shows all that it is given."""
    folder = shutil.copytree(model, tmp_path / "templated")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{{ end }}{% endfor %}")
    return folder


def test_the_system_prompt_and_the_variables_reach_the_template(
    templated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "ab"}, {"prompt": [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "p.txt").write_text("ab\ncd\n")

    def texts(*arguments: str) -> tuple[list, list[str]]:
        assert generate(templated, "--json", *arguments) == 0
        printed = json.loads(capsys.readouterr().out)
        pairs = printed.get("prompts", [printed])
        return [pair["prompt"] for pair in pairs], [pair["completions"][0]["text"] for pair in pairs]

    chat = ["--system-prompt", "be brief", "--chat-template-kwargs", 'end="!"']
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ab"}]
    expected = texts("--prompt", "be brief!ab!")[1]
    assert texts("--prompt", "ab", *chat) == ([messages], expected)
    prompts, found = texts("--prompts", str(tmp_path / "p.jsonl"), *chat)
    assert prompts == [messages, rows[1]["prompt"]] and found[:1] == expected
    prompts, again = texts("--prompts", str(tmp_path / "p.txt"), *chat)
    assert prompts[0] == messages and again[:1] == expected
    variables = ["--prompts", str(tmp_path / "p.jsonl"), "--chat-template-kwargs", 'end="!"']
    assert texts(*variables) == (["ab", rows[1]["prompt"]], [*texts("--prompt", "ab")[1], found[1]])


def weather(city: str) -> str:
    """The weather.

    Args:
        city: Where.
    """
    return city


ASKED = [{"role": "user", "content": "hello"}]
CALLED = '{"name": "weather", "arguments": {"city": "Oslo"}}'


def test_chat_shows_tools_and_reads_calls(llm: LLM) -> None:
    assert llm.chat(ASKED, SHORT) == llm.generate([ASKED], SHORT)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    talk = [*ASKED, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "rain"}]
    one, two = llm.chat([ASKED, talk], SHORT, tools=[weather], seed=4)
    assert llm.chat(ASKED, SHORT, tools=[weather], seed=4) == [one] == llm.chat(ASKED, SHORT, tools=weather, seed=4)
    shown = llm.policy.tokenizer.decode(two[0].prompt.token_ids)
    assert shown.count('"description": "The weather."') == 1 and f"<tool_call>{CALLED}</tool_call>" in shown
    segment = one[0].segments[-1]
    said = replace(one[0], segments=[replace(segment, text=f"So <tool_call>{CALLED}</tool_call>")])
    message = llm.message(said, [weather])
    assert llm.message(said, weather) == message
    assert message["content"] == "So " and message["tool_calls"][0]["function"] == json.loads(CALLED)
    assert "tool_calls" not in llm.message(said)


@pytest.mark.parametrize(
    ("messages", "more", "message"),
    [
        ("hello", {}, "messages must be a list of at least one message"),
        ([ASKED, [{"role": "user"}]], {}, r"messages\[1\]\[0\].content is missing"),
        (ASKED, {"tools": [{"name": "f"}]}, r"tools\[0\] must be"),
        (ASKED, {"tools": 3}, r"tools\[0\] must be"),
        (ASKED, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking has no ef"),
        (ASKED, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs sets tools"),
        (ASKED, {"chat_template_kwargs": [1]}, "chat_template_kwargs is of type list; it must be a dict"),
    ],
)
def test_chat_refuses_by_field(llm: LLM, messages: list, more: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        llm.chat(messages, SHORT, **more)


def test_variables_that_the_template_does_not_read_are_refused(
    model: Path, templated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LLM(templated, device="cpu", chat_template_kwargs={"end": "!"})
    with pytest.raises(InputError, match="chat_template_kwargs.end has no effect: the model's chat template does not"):
        LLM(model, device="cpu", chat_template_kwargs={"end": "!"})
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": ASKED, "answer": "#### 1"}) + "\n")
    task = ["--reward", "gsm8k", "--task.validation-prompts", "0", "--task.chat-template-kwargs", 'end="!"']
    asked = ["train", "dataset", "--model", str(model), "--data", str(tmp_path / "p.jsonl"), *task]
    assert main([*asked, "--run-dir", str(tmp_path / "run"), "--steps", "0"]) == 2
    assert "task.chat_template_kwargs.end has no effect: the model's chat template" in capsys.readouterr().err
    assert generate(model, "--prompt", "x", "--system-prompt", "s", "--chat-template-kwargs", 'end="!"') == 2
    assert "error: chat_template_kwargs.end has no effect" in capsys.readouterr().err
