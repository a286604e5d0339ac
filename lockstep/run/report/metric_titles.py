"""The section and the title of each of a step's metrics in a report."""

from __future__ import annotations

# Every metric of a step by section, with its title. `<fn>` stands for the name of a reward or graph function.
LEARNING, PHASES, PARITY = "Learning", "Where a step's seconds go", "Parity"
SECTIONS: dict[str, dict[str, str]] = {
    LEARNING: {
        "reward/mean": "Reward",
        "reward/std": "Spread of the reward within a prompt",
        "rewards/<fn>/mean": "Reward function <fn>",
        "rewards/<fn>/std": "Spread of <fn> over the responses",
        "epoch": "Times that all rows were used",
        "logged/<fn>": "<fn>, as a reward function logged it",
    },
    "Policy and responses": {
        "entropy": "Entropy, nats a token",
        "kl": "KL from the reference, nats a token",
        "clip_ratio": "Tokens clipped, share",
        "grad_norm": "Gradient norm before clipping",
        "loss": "Loss",
        "lr": "Learning rate",
        "frac_reward_zero_std": "Groups without a difference, share",
        "groups_without_reward": "Groups without a reward",
        "reward_errors/<fn>": "Completions that <fn> failed on",
        "updates": "Updates of the weights",
        "policy_age": "Policy age, updates",
        "response_length/mean": "Response length, tokens",
        "response_length/max": "Longest response, tokens",
        "response_length/clip_ratio": "Responses cut at the limit, share",
    },
    "Environment": {
        "environment/turns": "Turns a trajectory",
        "environment/sampled_tokens": "Sampled tokens a trajectory",
        "environment/given_tokens": "Given tokens a trajectory, the prompt's aside",
        "environment/wait_s": "Waited for answers, seconds a trajectory",
        "environment/branches": "Begun anew in a trajectory, as its past was shown in another way",
        "environment/truncated": "Ended by a limit, share",
        "environment/errors": "Trajectories left out, as their environment failed",
        "environment/<fn>/trajectories": "Trajectories of <fn>",
        "environment/<fn>/reward/mean": "Reward in <fn>",
        "environment/<fn>/turns": "Turns a trajectory of <fn>",
        "environment/<fn>/sampled_tokens": "Sampled tokens a trajectory of <fn>",
        "environment/<fn>/given_tokens": "Given tokens a trajectory of <fn>",
        "environment/<fn>/wait_s": "Waited for answers of <fn>, seconds a trajectory",
        "environment/<fn>/branches": "Begun anew in a trajectory of <fn>",
        "environment/<fn>/truncated": "Of <fn> ended by a limit, share",
        "environment/<fn>/errors": "Trajectories of <fn> left out",
    },
    "Critic": {
        "critic/value/mean": "What the critic expects",
        "critic/return/mean": "What it is to expect",
        "critic/explained_variance": "Variance of the returns that it explains, share",
    },
    "Experts": {
        "moe/load_imbalance": "Busiest expert over the mean",
        "moe/expert_tokens/min": "Tokens of the least busy expert",
        "moe/expert_tokens/max": "Tokens of the busiest expert",
        "moe/aux_loss": "Load-balancing loss",
    },
    PHASES: {
        "time/generate": "Generation",
        "time/critic": "Critic's values",
        "time/forward_backward": "Forward and backward pass",
        "time/optim_step": "Optimizer step",
        "time/sync": "Weight sync",
    },
    "Speed and memory": {
        "time/step": "Step time, seconds",
        "time/environment": "Waiting for environments, seconds of the generation",
        "time/rewards": "Rewards, seconds of the generation",
        "perf/tokens_per_s_per_gpu": "Tokens a second and device",
        "memory/peak_gib": "Peak memory, GiB",
        "padding_waste": "Padding, share of packed tokens",
        "recompiles": "Captures after warm-up",
        "graph_replays": "Graph replays",
        "graph_replays/<fn>": "Graph replays of <fn>",
    },
    PARITY: {
        "logprob_diff/max": "Largest difference of log-probabilities",
        "parity/tokens_checked": "Tokens checked",
        "parity/tokens_different": "Tokens that differ",
        "parity/tokens_not_covered": "Sampled tokens that were not compared",
        "parity/tokens_routed_differently": "Tokens with other experts",
        "parity/prompt_tokens_routed_differently": "Prompt tokens with other experts",
    },
}
_TITLES: dict[str, str] = {name: title for metrics in SECTIONS.values() for name, title in metrics.items()}
_PATTERNS = [name.split("<fn>") for name in _TITLES if "<fn>" in name]


def catalogued_name(name: str) -> str | None:
    """The name in `SECTIONS` of a recorded metric; None if it is not listed there."""
    if name in _TITLES:
        return name
    for before, after in _PATTERNS:
        if name.startswith(before) and name.endswith(after):
            return f"{before}<fn>{after}"
    return None


def title_of(name: str) -> str:
    known = catalogued_name(name)
    if known is None:
        return name
    before, _, after = known.partition("<fn>")
    return _TITLES[known].replace("<fn>", name.removeprefix(before).removesuffix(after))
