"""report.html: whole, self-contained, escaped, and drawn from what the run recorded."""

from __future__ import annotations

import html
import json
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from processes import finished
from report_cases import HOSTILE, Outline, make_run, read

from lockstep.config import RunConfig
from lockstep.config.recipes import RECIPES
from lockstep.run.metrics import SUMMARY_FILE, MetricsWriter, write_json
from lockstep.run.report import write_comparison, write_report
from lockstep.run.report.curves import CHARTED
from lockstep.run.report.metric_titles import SECTIONS
from lockstep.run.report.record import read_record
from lockstep.run.report.timeline import NAMES
from lockstep.run.timeline import Timeline
from lockstep.timings import Span


def test_a_run_is_shown_in_full(tmp_path: Path) -> None:
    outline = read(make_run(tmp_path))
    text = outline.text
    charted = [title.replace("<fn>", "exact") for section in CHARTED for title in SECTIONS[section].values()]
    titles = ("Held-out problems, greedy", "Each reward function", "my/metric", "Where a step's seconds go")
    for title in (*charted, *titles, "Configuration", "Environment", "Parity", "Compiled graphs"):
        assert title in text, title
    assert {"exact", "format"} <= set(text) and not any("<fn>" in part for part in text)
    assert any("my/constant 7" in part for part in text)
    assert "parity: bitwise identical" in text and "500 tokens checked, none different" in text
    assert "0.5 → 0.5" in text and "0 → 0.5" in text  # reward by tens, validation
    assert {"tracing graphs", "4.25 s", "70.8%", "12.5 s", "9.9"} <= set(text)  # start-up, total, environment
    assert {"4,321", "optim_step", "canonicalize: 698 -> 670 nodes; recompute: 3 layers"} <= set(text)
    assert "None" not in text and "null" not in text


def test_what_is_no_reward_of_held_out_problems_has_a_scale_of_its_own(tmp_path: Path) -> None:
    metrics, counts = make_run(tmp_path) / "metrics.jsonl", {"groups_without_reward": 9, "logged/characters": 900.0}
    more = "".join(f'"validation/{name}": {value}, ' for name, value in counts.items())
    metrics.write_text(metrics.read_text().replace('"validation/', f'{more}"validation/'))
    text = read(tmp_path).text
    titles = ", greedy", ": Groups without a reward", ": characters, as a reward function logged it"
    begins = [text.index(f"Held-out problems{title}") for title in titles]
    charts = [text[begin:end] for begin, end in pairwise([*begins, len(text)])]
    named = [[f"validation/{name}" in chart for chart in charts] for name in counts]
    assert named == [[False, True, False], [False, False, True]]
    assert not any(name in part for name in counts for part in charts[0])


def lanes(page: Outline) -> list[tuple[str, str]]:
    """What the bars of the typical step say and where they are."""
    return [(str(a["title"]), str(a["style"])) for tag, a in page.tags if tag == "div" and "title" in a]


def test_a_typical_step_is_drawn(tmp_path: Path) -> None:
    make_run(tmp_path)
    timeline = Timeline(tmp_path / "timeline.json", HOSTILE, 0.0)
    for i, seconds in enumerate((9.0, 4.0, 1.0)):
        began = 20.0 * i
        on_device = [
            Span("generate", began, seconds / 2, True),
            Span("decode", began + seconds / 4, seconds / 4, True, {"steps": 8}),
            Span("step", began, seconds * 1.01, True, {"step": i}),
        ]
        on_host = [
            Span("decode", began + 0.1, 0.1),
            Span("generate", began, seconds / 2),
            Span(HOSTILE, began + seconds / 2, seconds / 2),
            Span("step", began, seconds, facts={"step": i}),
            Span("log", began + seconds + 1, 1.0),
        ]
        timeline.write([*on_host, *on_device])
    timeline.close()
    outline = read(tmp_path)
    assert "Step 2, of median length among 3 recorded: 4 s" in outline.text
    assert lanes(outline) == [
        ("generation: 2 s", "left:0.000%;width:50.000%"),
        (f"{HOSTILE}: 2 s", "left:50.000%;width:50.000%"),
        ("decode: 0.1 s", "left:2.500%;width:2.500%"),
        ("decode, 8 steps: 1 s", "left:25.000%;width:25.000%"),
    ]
    assert {"generation 2 s", "decode 1 s", "0 s", "4 s", "timeline.json"} <= set(outline.text)
    with (tmp_path / "timeline.json").open("ab") as file:
        file.write(b'{"ph": "X", "name": "step", "dur": "NaN"}\n\xff\n[]\n{"ph": "X", "ts": 1e999, "dur": 1')
    assert lanes(read(tmp_path)) == lanes(outline)
    (tmp_path / "timeline.json").unlink()
    assert "A typical step" not in read(tmp_path).text


def test_start_up_is_split(tmp_path: Path) -> None:
    seconds = {"import": 2.0, "trace": 5.0, "gate": 0.001, "other": 1.0, "of another version": 1.999}
    make_run(tmp_path)
    write_json(tmp_path / SUMMARY_FILE, {f"startup/{phase}": value for phase, value in seconds.items()})
    text = read(tmp_path).text
    at = text.index("tracing graphs")
    assert text[at : at + 12 : 3] == ["tracing graphs", "imports", "of another version", "the rest"]
    assert text[at + 1 : at + 12 : 3] == ["5 s", "2 s", "2 s", "1 s"]


def test_rollouts_are_the_best_the_worst_and_the_longest(tmp_path: Path) -> None:
    text = read(make_run(tmp_path)).text
    order = [part for part in text if part in ("Best", "Worst", "Longest", "Step 5", "Step 1")]
    assert order == ["Step 5", "Best", "Worst", "Longest", "Step 1", "Best", "Worst", "Longest"]
    shown = [part.split()[:2] for part in text if part.startswith(("good", "bad", "middling", "long"))]
    assert shown == [["good", "4"], ["bad", "4"], ["long", "4"], ["good", "0"], ["bad", "0"], ["long", "0"]]
    assert f"user: {HOSTILE}" in text  # a conversation reads as one


def test_several_turns_are_shown_apart(tmp_path: Path) -> None:
    make_run(tmp_path)
    segments = [
        {"kind": "given", "tokens": 2},
        {"kind": "sampled", "tokens": 3, "text": "<call>1+1</call>"},
        {"kind": "given", "tokens": 1, "text": "it is 2", "token_ids": [5]},
        {"kind": "sampled", "tokens": 4, "text": "the answer"},
        {"kind": "given", "tokens": 9, "text": "all of it", "token_ids": [5] * 9, "anew": True},
        {"kind": "sampled", "tokens": 2, "text": "more"},
    ]
    with MetricsWriter(tmp_path / "rollouts.jsonl") as rollouts:
        rollouts.write({"step": 0, "group": 0, "prompt": "p", "samples": [{"text": "all", "segments": segments}]})
    text = read(tmp_path).text
    at = text.index("sampled, 3 tokens")
    shown = ["sampled, 3 tokens", "<call>1+1</call>", "given, 1 tokens", "it is 2", "sampled, 4 tokens", "the answer"]
    shown += ["given anew, a branch, 9 tokens", "all of it", "sampled, 2 tokens", "more"]
    assert text[at : at + 10] == shown


def test_damaged_rollouts_are_left_out(tmp_path: Path) -> None:
    path = make_run(tmp_path) / "rollouts.jsonl"
    path.write_bytes(b"nonsense\n" + path.read_bytes() + b'{"step": 4, "samples": nonsense}\n{"step": 9, "gro')
    assert [part for part in read(tmp_path).text if re.fullmatch(r"Step \d+", part)] == ["Step 5", "Step 1"]


def test_one_sample_is_shown_once(tmp_path: Path) -> None:
    make_run(tmp_path)
    with MetricsWriter(tmp_path / "rollouts.jsonl") as rollouts:
        rollouts.write({"step": 0, "group": 0, "prompt": "p", "samples": [{"text": "alone"}]})
        rollouts.write({"step": 0, "group": 1, "replaced": True, "prompt": "p", "samples": [{"text": "untrained"}]})
    text = read(tmp_path).text
    assert text.count("alone") == 1 and "untrained" not in text


def test_nothing_executes_and_nothing_is_fetched(tmp_path: Path) -> None:
    write_comparison([make_run(tmp_path), make_run(tmp_path / HOSTILE.replace("/", "|"))], tmp_path / "runs.html")
    write_report(tmp_path)
    for name in ("report.html", "runs.html"):
        page = (tmp_path / name).read_text()
        outline = Outline(page)
        assert {tag for tag, _ in outline.tags}.isdisjoint({"script", "img", "link", "iframe", "object", "a", "base"})
        for _, attributes in outline.tags:
            assert not [key for key in attributes if key.startswith("on") or key in ("src", "href")]
        assert "url(" not in page and "@import" not in page and "//" not in page.replace("://", "")
        assert "http:" not in page and "https:" not in page
        assert """content="default-src 'none'; style-src 'unsafe-inline'\"""" in page


def test_broken_parity_is_loud(tmp_path: Path) -> None:
    text = read(make_run(tmp_path, different=2)).text
    assert "parity: BROKEN" in text and "10 of 500 tokens differ" in text


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    write_json(make_run(tmp_path) / "failure.json", {"error": f"step 3: loss is nan {HOSTILE}", "step": 3})
    assert {"The run failed", f"step 3: loss is nan {HOSTILE}"} <= set(read(tmp_path).text)


def test_a_certificate_that_says_no_outweighs_silent_metrics(tmp_path: Path) -> None:
    write_json(tmp_path / "parity.json", {"identical": False})
    assert "parity: BROKEN" in read(tmp_path).text


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ({"tokens_checked": 520, "tokens_different": 3}, "3 of 520 tokens differ"),
        ({"tokens_checked": 510, "tokens_not_covered": 10}, "10 sampled tokens were not compared"),
        ({"tokens_checked": 520, "prompt_tokens_routed_differently": 4}, "4 prompt tokens went to other experts"),
    ],
)
def test_what_differed_in_the_step_that_ended_a_run_is_counted(
    tmp_path: Path, counts: dict[str, int], says: str
) -> None:
    write_json(make_run(tmp_path) / "parity.json", {"identical": False, **counts})  # the metrics lack that step
    assert says in read(tmp_path).text


def test_of_a_summary_that_an_earlier_process_wrote_only_what_still_holds_is_shown(tmp_path: Path) -> None:
    earlier = {"0": {"validation/reward/mean": 0.25}, "2": {"validation/reward/mean": 0.125}}
    stale = {"steps_done": 2, "total_s": 3.0, "startup_s": 2.0, "validation": earlier}  # five steps are recorded
    write_json(make_run(tmp_path) / "summary.json", stale)
    points = [(0.0, 0.25), (1.0, 0.0), (2.0, 0.125), (3.0, 0.25), (4.0, 0.375), (5.0, 0.5)]
    assert read_record(tmp_path).validations == {"validation/reward/mean": points}
    text = read(tmp_path).text
    assert "in total" not in text and "Start-up" not in text and "0.25 → 0.5" in text


def test_ten_thousand_steps_are_no_larger_than_they_look(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path, steps=10_000)).read_text()
    assert len(page) < 1_000_000
    assert max(len(points.split()) for points in re.findall(r'points="([^"]*)"', page)) <= 2 * 240
    assert "10,000 steps recorded" in page and "step 10" in page


def test_configuration_shows_what_is_not_default(tmp_path: Path) -> None:
    recipe = RECIPES["dataset"]("m")
    config = replace(recipe, optimizer=replace(recipe.optimizer, learning_rate=3e-5))
    text = read(make_run(tmp_path, config=config)).text
    at = text.index("default of dataset")
    assert text[at + 1 : at + 7] == ["model", "m", "Qwen/Qwen3-0.6B", "optimizer.learning_rate", "3e-05", "1e-06"]
    assert "steps" not in text  # the recipe's 100, which is not RunConfig's
    text = read(make_run(tmp_path, config=RunConfig(recipe="of my own"))).text
    assert "Everything has its default." in text


def test_runs_are_compared(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one")
    two = make_run(tmp_path / "two", steps=3, different=1, config=RunConfig(seed=7))
    page = write_comparison([one, two], tmp_path / "runs.html").read_text()
    text = Outline(page).text
    assert text.count("one") >= 5 and text.count("two") >= 5  # headers and legends
    assert text[text.index("steps") :][:3] == ["steps", "5", "3"]
    assert text[text.index("seed") :][:3] == ["seed", "0", "7"]
    assert text[text.index("parity") :][:3] == ["parity", "identical", "BROKEN"]
    assert "optimizer.beta1" not in text and "my/constant" not in text  # no difference, nothing to see
    overlaid = re.findall(r"<h3>Reward</h3>.*?</svg>", page)[0]
    assert overlaid.count("<polyline") == 2 and 'class="l1 dashed"' in overlaid  # "one" shows under "two"
    assert "Generation, seconds" in text and "time/generate" in text  # a title, and the metric's own name


def test_runs_whose_folders_have_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    runs = [make_run(tmp_path / name / "run") for name in ("a", "b")]
    text = Outline(write_comparison(runs, tmp_path / "runs.html").read_text()).text
    at = text.index("steps")
    assert text[at - 2 : at] == ["a/run", "b/run"] and "2 runs: a/run, b/run" in text


def test_equal_runs_do_not_hide_each_other(tmp_path: Path) -> None:
    page = write_comparison([make_run(tmp_path / name) for name in ("one", "two", "three")], tmp_path / "r.html")
    overlaid = re.findall(r"<h3>Reward</h3>.*?</div></div>", page.read_text())[0]
    assert [style in overlaid for style in ('"l0"', '"l1 dashed"', '"l2 dashed"')] == [True] * 3
    assert "two (equal to one)" in overlaid and "three (equal to one)" in overlaid


def test_what_never_changes_within_a_run_is_a_row(tmp_path: Path) -> None:
    for name, updates in (("one", 1), ("two", 2)):
        make_run(tmp_path / name, steps=0)
        with MetricsWriter(tmp_path / name / "metrics.jsonl") as metrics:
            for step in range(3):
                metrics.write({"step": step, "updates": updates, "loss": 1.5, "entropy": float(step * updates)})
    text = Outline(write_comparison([tmp_path / "one", tmp_path / "two"], tmp_path / "r.html").read_text()).text
    assert text[text.index("Updates of the weights") :][:3] == ["Updates of the weights", "1", "2"]
    assert "Loss" not in text and "Entropy, nats a token" in text


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# The page in a frame of each width, measured by the page around it, which then holds the measurements alone.
MEASURE = """<!doctype html><body><script>
const page = PAGE, widths = [1280, 390], result = {};
function next() {
  const width = widths.shift();
  if (!width) { document.body.textContent = JSON.stringify(result); return; }
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:900px;border:0`;
  frame.onload = () => {
    const d = frame.contentDocument, all = (s) => [...d.querySelectorAll(s)];
    const box = (e) => e.getBoundingClientRect();
    result[width] = {
      overflow: d.documentElement.scrollWidth - width,
      spills: all(".card").filter((e) => e.scrollWidth > e.clientWidth + 1).length,
      charts: all("svg").filter((e) => box(e).height > 80 && box(e).width > 200).length,
      lanes: all(".lane > div").map((e) => [box(e).height, box(e).width]),
      outside: all(".lane > div > *").filter((e) => box(e).right > box(e.parentElement).right + 1).length,
      text: Math.min(...all("svg > text").map((e) => box(e).height)),
      columns: new Set(all(".grid .card").map((e) => Math.round(box(e).left))).size,
      ran: d.defaultView.hostile === 1,
    };
    frame.remove(); next();
  };
  frame.srcdoc = page; document.body.append(frame);
}
next();
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome to open the page with")
def test_a_browser_shows_the_page_on_a_desktop_and_a_phone(tmp_path: Path) -> None:
    run = make_run(tmp_path / ("a-run-with-a-long-name-" * 4), steps=40)
    timeline = Timeline(run / "timeline.json", "run", 0.0)
    names = [*NAMES, "a_phase_with_a_long_name"]
    parts = [Span(name, 0.01 * i, 0.01) for i, name in enumerate(names)]
    timeline.write(
        [*parts, Span("step", 0.0, 0.13), *(Span(name, 0.001 * i, 0.001, True) for i, name in enumerate(names))]
    )
    page = write_report(run).read_text()
    planted = page.replace("</main>", "<script>window.hostile = 1</script></main>")
    quoted = json.dumps(planted).replace("</script", "<\\/script").replace("<!--", "<\\!--")
    (tmp_path / "measure.html").write_text(MEASURE.replace("PAGE", quoted))
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    command = [BROWSER, *flags, f"--user-data-dir={tmp_path}/profile", f"file://{tmp_path}/measure.html"]
    done = finished(command)
    found = json.loads(html.unescape(re.findall(r"<body>(.*)</body>", done.stdout, re.DOTALL)[0]))
    for width, columns in (("1280", 3), ("390", 1)):
        measured = found[width]
        assert measured["overflow"] <= 0 and measured["spills"] == 0, measured
        assert measured["charts"] == page.count("<svg") and measured["text"] >= 9, measured
        assert measured["columns"] == columns, measured
        assert len(measured["lanes"]) == 3 and measured["outside"] == 0, measured  # host, device and the axis
        assert all(tall >= 20 and wide > 300 for tall, wide in measured["lanes"]), measured
        assert measured["ran"] is False  # a script that got into the page would not run
