"""The section of docs/gpu.md on real runs, and their curves, from what the case `learning` has measured.

Every figure comes from the files: `python benchmarks/learning_page.py benchmarks/results/learning_*-h200.json`.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
BEGIN, END = "<!-- measured runs: begin -->", "<!-- measured runs: end -->"
SOLVED, REWARD = "validation/rewards/correct/mean", "validation/reward/mean"
SMOOTHED = 10  # steps under a point of the drawn curve


def held_out(figures: dict[str, Any], name: str) -> tuple[list[int], list[float]]:
    """The steps after which the held-out problems were answered, and a measure then."""
    steps = sorted(figures["validation"], key=int)
    return [int(step) for step in steps], [figures["validation"][step][name] for step in steps]


def smoothed(values: list[float]) -> list[float]:
    """The mean of each value and of those up to `SMOOTHED` - 1 before it."""
    windows = [values[max(0, i + 1 - SMOOTHED) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def plot(figures: dict[str, Any], path: Path) -> None:
    """Mean reward of every step, faint under its moving average, and the held-out problems solved."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rewards = figures["curve"]["reward/mean"]
    steps = range(1, len(rewards) + 1)
    figure, axis = pyplot.subplots(figsize=(7, 3.6), constrained_layout=True)
    axis.plot(steps, rewards, color="#3b6ea5", alpha=0.25)
    axis.plot(steps, smoothed(rewards), color="#3b6ea5", label="mean reward of the samples")
    axis.plot(*held_out(figures, SOLVED), "o-", color="#b5532d", markersize=4, label="held-out problems solved, greedy")
    axis.set_xlabel("steps of reinforcement learning")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, loc="best")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def section(name: str, figures: dict[str, Any]) -> str:
    """One run in Markdown: its command, what came of it, the curve, and a sample before and after."""
    summary, certificate, warmup = figures["summary"], figures["certificate"], figures["summary"]["warmup"]
    (_, solved), (_, reward) = held_out(figures, SOLVED), held_out(figures, REWARD)
    text = (
        f"On one {figures['device']}, {figures['date']}, torch {figures['torch']}: {warmup['steps']} supervised steps "
        f"in {summary['warmup_s']:.0f} s, {figures['steps_done']} of reinforcement learning, "
        f"{summary['total_s']:.0f} s in all. Of the held-out problems {solved[0]:.1%} were solved before and "
        f"{solved[-1]:.1%} after; their mean reward went from {reward[0]:.3f} to {reward[-1]:.3f}, that of the samples "
        f"from {summary['reward_first_10']:.3f} to {summary['reward_last_10']:.3f} (first and last ten steps). Parity: "
        f"{certificate['tokens_checked']:,} tokens checked, {certificate['tokens_different']:,} different."
    )
    lines = [f"### {name}", "", "<!-- not run: needs a GPU -->", "```sh"]
    lines += [" ".join(["lockstep train", *figures["flags"]]), "```", "", *textwrap.wrap(text, 120), ""]
    lines += [f"![Reward and held-out problems solved, {name}](images/{image(name)})", ""]
    return "\n".join([*lines, *sample(figures, "first"), *sample(figures, "last")])


def sample(figures: dict[str, Any], when: str) -> list[str]:
    """The first problem of the first or last step with its first completion, in Markdown."""
    group = figures["rollouts"][when][0]
    completion = group["samples"][0]
    prompt = group["prompt"].rstrip("\n").split("\n\n")[-1]  # without instructions that all prompts share
    text = f"{prompt}\n{completion['text']}"
    return [f"A sample of the {when} step, reward {completion['reward']:g}:", "", f"```text\n{text}\n```", ""]


def image(name: str) -> str:
    return f"learning-{name}.png"


def name_of(path: Path) -> str:
    """`words` of `learning_words-h200.json`."""
    return path.stem.removeprefix("learning").strip("_-").partition("-")[0]


def filled(page: str, sections: list[str]) -> str:
    """`page` with these between the two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"the page has no {BEGIN} and {END}")
    return "\n\n".join([before + begin, *(text.strip() for text in sections), end + after])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="JSON", help="what the case learning wrote")
    parser.add_argument("--docs", type=Path, default=DOCS, metavar="FOLDER", help="with gpu.md and images")
    args = parser.parse_args()
    runs = {name_of(path): json.loads(path.read_text(encoding="utf-8")) for path in args.files}
    for name, figures in runs.items():
        plot(figures, args.docs / "images" / image(name))
    page = args.docs / "gpu.md"
    sections = [section(name, figures) for name, figures in runs.items()]
    page.write_text(filled(page.read_text(encoding="utf-8"), sections), encoding="utf-8")


if __name__ == "__main__":
    main()
