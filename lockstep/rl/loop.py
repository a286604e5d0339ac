"""The training loop: sample, score, advantage, pack, forward_backward, optim_step. The generator sees updates at once.

Start reading at `Loop.step`, which the rest of the file serves. Each of several ranks generates, scores and trains on
its share of a step; in between, every rank has an outline of all groups, so that all make the same decisions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import chain, product
from statistics import mean
from typing import Any

from ..algorithms import SUPERVISED, supervised
from ..algorithms.policy_terms import KL_ESTIMATORS
from ..config import RunConfig
from ..environments import Collector, Failures, Limits, worked_trajectories
from ..environments.collect import Collected
from ..environments.ranks.rollouts import Holders
from ..errors import LockstepError
from ..session.build import TrainingSession
from ..session.certificate import Certificate
from ..session.signals import EndRequest, EndRequested, SignalDelay
from ..timings import Span
from ..trainer import Packing, PendingResult, StepResult, average_results, learning_rate, pack_shards
from ..trainer.programs import add_loss_tensors
from ..types import TRAIN_DOMAIN, VALIDATION_DOMAIN, PackedBatch, RolloutGroup, SamplingParams, Trajectory
from .dealing import dealt, mini_batches
from .dynamic_sampling import collect_with_signal
from .step_checks import require_finite, verify
from .step_metrics import reward_metrics, step_metrics
from .token_advantages import add_values, estimate


class Loop:
    """On-policy reinforcement learning with one model in both roles."""

    def __init__(self, config: RunConfig, run: TrainingSession) -> None:
        self.config = config
        self.run = run
        self.world = run.world
        self.algorithm = run.trainer.algorithm
        shards = config.parallel.batch_shards or run.world.mesh.fsdp.size
        self.shards = range(shards)
        self.own_shards = run.world.mesh.fsdp.local_items(self.shards)
        self.device = run.policy.model.embed.device
        self.certificate = Certificate(config.parity, settings=run.trainer.numerics())
        self.idle_steps = 0
        self.prompts_used = 0  # prompts of the task so far; saved in checkpoints
        self.spans: list[Span] = []  # of the latest step
        self.left_out: list[RolloutGroup] = []  # in the latest step: replaced by dynamic sampling, or without reward
        task = config.task
        response = config.max_response_length, task.turns, task.environment_timeout
        self._whole_sequences = self.algorithm.indexes_sequences
        packed = config.trainer.max_tokens_per_micro_batch if self._whole_sequences else None
        self.limits = Limits(run.prompt_limit.tokens, *response, run.prompt_limit.reason, packed)
        self.failures = Failures()
        how = run.policy.tokens, lambda *_: run.engine, run.task.rewards, config.seed, run.environment, self.limits
        self._collect_from = Collector(
            *how, self.failures, run.timings, run.world, needs_rewards=config.loss.needs_rewards
        ).collect
        self._most_sampled = config.max_sampled_length
        self._holders = Holders(self.world)  # of the latest step's groups
        self.ending = EndRequest()  # the signals received by any rank until the end of the latest step
        self._latest: tuple[list[RolloutGroup], StepResult | None] = ([], None)  # the latest step's rollouts and result

    def step(self, step: int) -> tuple[dict[str, Any], list[RolloutGroup]]:
        """Run one step. Returns its metrics, the same on every rank, and its rollouts, complete on the first rank only.

        Raises:
            ParityError: strict parity, and a log-probability or a choice of experts differs; the weights are unchanged.
            NonFiniteError: the loss, gradient norm or entropy is not finite; earlier updates of the step remain.
            LockstepError: `max_idle_steps` steps in a row had nothing to train on.
            EndRequested: a signal came during generation or scoring; the state is that from before the step.
        """
        config, trainer, timings = self.config, self.run.trainer, self.run.timings
        version, began, used = trainer.weights_version, time.perf_counter(), self.prompts_used
        lr = learning_rate(config.optimizer, step, config.steps)
        with timings.measure("step", on_device=True, step=step):  # until all that it launched has finished
            with timings.measure("generate", on_device=True):
                groups, without_reward, counts = self._collect(step)
                if self.run.delay is not None:
                    self._give_up_if_asked(self.run.delay, used)
            generated, self._holders = groups + without_reward, Holders(self.world)
            self._latest = (generated, None)
            tokens = sum(r.length for g in generated for r in g.rollouts)
            sampled = 0 if config.parity == "off" else tokens  # tokens to compare
            kl: dict[str, list[float]] = {}
            if self.algorithm.kl_in_reward:
                with self.world.deadline(f"the reference in step {step + 1}"):
                    kl = self._kl_of(groups)
            with timings.measure("advantages"):
                self._advantages(groups, kl)
            with timings.measure("pack"):
                *parts, checks = self._pack(groups, without_reward)
                batches = list(chain.from_iterable(parts))
                arrived = self._holders.bring_to_first(generated)
            critic: dict[str, Any] = {}
            if self.algorithm.of_tokens:
                with self.world.deadline(f"the critic in step {step + 1}"), timings.measure("critic", on_device=True):
                    counted = self._counted(r for g in groups for r in g.rollouts)
                    critic = estimate(trainer, config.loss, batches, counted, kl)
            with self.world.deadline(f"training in step {step + 1}"):
                with timings.measure("forward_backward", on_device=True):
                    self._check(checks, parts[1:])
                results = self._updates(parts, lr, sampled)
                result = results[0] if results else trainer.finish_check(sampled)
            arrived()
            self._latest = (generated, result)
            verify(config.parity, self.certificate, step, result, sampled)
            updates = config.trainer.num_iterations * len(parts)
            for i, later in enumerate(results[1:]):
                self._latest = (generated, later)
                require_finite(f"step {step + 1}, update {i + 2} of {updates}", later)
            self._count_idle(step, trained=bool(batches))
        counts |= {"updates": sum(r.applied for r in results), "lr": lr}
        if self.run.task.rows:
            counts["epoch"] = self.prompts_used / self.run.task.rows
        if config.loss.importance_sampling_mode is not None:
            counts["importance_sampling/clip_ratio"] = mean([r.clip_ratio for r in results[1:]] or [0.0])
        self.spans = [span for span in timings.take_spans() if span.began >= began]
        if len(results) > 1:
            own = config.loss.importance_sampling_mode is None  # the loss's clip, rare in a first iteration
            result = average_results(results[: len(parts)], results if own else results[: len(parts)])
        found = step_metrics(self.run, groups, result, [*batches, *checks], version, self.spans)
        self.ending = found.pop("ending")
        if kl:
            found["kl"] = math.fsum(chain.from_iterable(kl.values())) / sum(map(len, kl.values()))
        self.left_out = without_reward
        return counts | found | critic, groups

    def _give_up_if_asked(self, delay: SignalDelay, prompts_used: int) -> None:
        """Raise `EndRequested` after a signal, which processes started by rewards or environments may have got too."""
        if (ending := max(self.world.gather(delay.poll(rewards_given=True)))).number:
            self.prompts_used = prompts_used
            raise EndRequested(ending)

    def _collect(self, step: int) -> Collected:
        prompts = self.config.trainer.prompts_per_step
        if not self.config.loss.dynamic_sampling:
            self.prompts_used = (step + 1) * prompts
            problems = [(g, self.run.task.train_problem(step, g)) for g in range(prompts)]
            return self._collect_from(problems, self.run.sampling, TRAIN_DOMAIN, step)

        def sample(wanted: list[tuple[int, int]]) -> Collected:
            places = [(number, divmod(self.prompts_used + i, prompts)) for number, i in wanted]
            problems = [(number, self.run.task.train_problem(*place)) for number, place in places]
            sampling, whole = self.run.sampling, len(problems) == prompts
            return self._collect_from(problems, sampling, TRAIN_DOMAIN, step, required=whole)

        def has_signal(group: RolloutGroup) -> bool:
            rewards = [r.reward for r in self._counted(group.rollouts)]
            return bool(rewards) and self.algorithm.keep(rewards)

        most = self.config.loss.max_num_gen_batches * prompts
        found, used = collect_with_signal(prompts, most, sample, has_signal)
        self.prompts_used += used
        return found

    def _counted(self, rollouts: Iterable[Trajectory]) -> list[Trajectory]:
        """The rollouts that the loss does not mask."""
        masks = self.config.loss.mask_truncated_completions
        return [rollout for rollout in rollouts if not (masks and rollout.cut_off)]

    def _advantages(self, groups: list[RolloutGroup], kl: dict[str, list[float]]) -> None:
        """Add the algorithm's penalties to the rewards, and set the advantages of the rewards less `beta` times the sum
        of each rollout's KL estimates in `kl`, if any."""
        loss = self.config.loss
        for group in groups:
            for r in group.rollouts:
                r.reward += self.algorithm.penalty(loss, r.length, self._most_sampled)
        rewards = [[r.reward - loss.beta * math.fsum(kl.get(r.name, ())) for r in group.rollouts] for group in groups]
        for group, advantages in zip(groups, self.algorithm.advantages(loss, rewards), strict=True):
            for r, advantage in zip(group.rollouts, advantages, strict=True):
                r.advantage = advantage

    def _kl_of(self, groups: list[RolloutGroup]) -> dict[str, list[float]]:
        """By rollout name, the estimated KL divergence from the reference at each sampled token; for all ranks."""
        found: dict[str, list[float]] = {}
        for batch in self._batches(groups, {}):
            self.run.trainer.reference_logprobs(batch)
            estimate = KL_ESTIMATORS[self.config.loss.kl_estimator]
            kl_C = estimate(batch.old_model_logprob_C, batch.ref_logprob_C)[batch.valid_C]
            add_values(found, kl_C.tolist(), batch)
        for of_rank in self.world.gather(found):
            found |= of_rank
        return found

    def _pack(self, groups: list[RolloutGroup], without_reward: list[RolloutGroup]) -> list[list[PackedBatch]]:
        """The micro-batches of each mini-batch that has any, and finally those of skipped groups, which are only
        checked for parity.

        Skipped are groups whose completions are all masked (`mask_truncated_completions`), whose advantages are all 0
        (`skip_zero_variance`), or that have no reward.
        """
        config, weights = self.config, dict[int, float]()
        skip = config.trainer.skip_zero_variance and not config.loss.kl_in_loss
        parts: list[list[RolloutGroup]] = []
        skipped: list[RolloutGroup] = []
        for part in mini_batches(groups, config.trainer.num_mini_batches):
            weights |= self._weights(part)
            trained: list[RolloutGroup] = []
            for g in part:
                counts = any(id(r) in weights and (r.advantage != 0 or not skip) for r in g.rollouts)
                (trained if counts else skipped).append(g)
            if trained:
                parts.append(trained)
        checked = sorted(skipped + without_reward, key=lambda g: g.group) if config.parity != "off" else []
        return [self._batches(of_one, weights) for of_one in (*parts, checked)]

    def _weights(self, groups: list[RolloutGroup]) -> dict[int, float]:
        """The per-token weight of each rollout in the policy loss, by `id`, normalized over a mini-batch. Skipped
        groups count, since their policy loss has no gradient, and masked completions count as sequences. The
        load-balancing loss is not affected: it has a total weight of 1 over what is trained on."""
        rollouts = [r for g in groups for r in g.rollouts]
        kept = self._counted(rollouts)
        lengths = [r.length for r in kept]
        weights = self.algorithm.weights(lengths, len(rollouts), self._most_sampled)
        return {id(r): w for r, w in zip(kept, weights, strict=True)}

    def _batches(self, groups: list[RolloutGroup], weights: dict[int, float]) -> list[PackedBatch]:
        if not groups:
            return []
        for r in (r for g in groups for r in g.rollouts):
            r.loss_weight = weights.get(id(r), 0.0)
        t, check = self.config.trainer, self.config.parity != "off"
        how = Packing(t.max_tokens_per_micro_batch, t.mode, True, self.run.shapes, self._whole_sequences)
        return self._packed(groups, how, check)

    def _packed(self, groups: Sequence[RolloutGroup], how: Packing, check_parity: bool) -> list[PackedBatch]:
        """Distribute groups to shards and pack this rank's micro-batches, equally many on every rank."""
        shards = dealt(groups, len(self.shards), self.config.parallel.balance_batch)
        self._holders.bring((g, self.world.ranks_of_shard(shard)) for shard, of in enumerate(shards) for g in of)
        packed = pack_shards(shards, self.own_shards, how, check_parity)
        for i, batch in enumerate(packed):  # the first of each own shard, then the second of each, ...
            add_loss_tensors(batch, self.algorithm)
            batch.ends_cell = self.run.trainer.cells.ends_cell(i % len(self.own_shards))
        return [batch.to(self.device) for batch in packed]

    def _check(self, skipped: list[PackedBatch], later: list[list[PackedBatch]]) -> None:
        """Compare log-probabilities of what the step's first update does not train on: skipped groups, and `later`
        mini-batches, which are trained on with changed weights and so also keep the sampled support."""
        for batch in skipped:
            self.run.trainer.check(batch)
        for batch in chain.from_iterable(later):
            if batch.check_parity or batch.truncated:
                self.run.trainer.check(batch, keep_support=True)
            batch.check_parity = False

    def _updates(self, parts: list[list[PackedBatch]], lr: float, sampled: int) -> list[StepResult]:
        """Run a step's updates, one per iteration and mini-batch, stopping after the first that is not applied. The
        first is applied only if `sampled` tokens are identical."""
        count, results = self.config.trainer.num_iterations, list[StepResult]()
        for i, batches in product(range(count), parts):
            update = self._update(batches, lr, 0 if results else sampled, first=i == 0, last=i == count - 1)
            results.append(update.get())  # the host waits here
            if not results[-1].applied:
                break
        return results

    def _update(self, batches: list[PackedBatch], lr: float, sampled: int, first: bool, last: bool) -> PendingResult:
        """Launch one optimizer update on a mini-batch. Parity is checked in a step's first update alone. `first`,
        `last`: whether this is the first or last iteration."""
        trainer = self.run.trainer
        with self.run.timings.measure("forward_backward", on_device=True):
            for batch in batches:
                if first and self.algorithm.reads_reference:
                    trainer.reference_logprobs(batch)
                trainer.forward_backward(batch, keep_support=first and not last)
                batch.check_parity = False
        return trainer.launch_optim_step(lr, sampled)

    def evidence(self) -> dict[str, Any]:
        """The latest step's result and rollouts, for investigating a failure."""
        groups, result = self._latest
        return {
            "result": result and asdict(result),
            "weights_version": self.run.trainer.weights_version,
            "groups": [asdict(group) for group in groups],
        }

    def _count_idle(self, step: int, trained: bool) -> None:
        self.idle_steps = 0 if trained else self.idle_steps + 1
        if self.idle_steps >= self.config.trainer.max_idle_steps:
            idle = LockstepError(
                f"step {step + 1}: for {self.idle_steps} steps every group's rewards were all equal, or its "
                "completions were cut off and masked, so there was nothing to learn from; use easier or harder "
                "prompts, more samples a prompt, a finer reward, or longer completions (trainer.max_idle_steps sets "
                "the patience)"
            )
            raise self.world.report_on_first(idle)

    def warmup_step(self, step: int) -> StepResult:
        """Run one supervised step on worked examples, in the same packed trainer."""
        t, policy, trainer = self.config.trainer, self.run.policy, self.run.trainer
        problems = [self.run.task.warmup_problem(step, i) for i in range(t.warmup_batch_size)]
        encode = policy.tokens, policy.encode_completion
        examples = worked_trajectories(self.run.environment, problems, *encode, self.limits)
        lengths = [example.length for example in examples]
        weights = supervised(self.config.loss).weights(lengths, len(examples), 0)
        for example, weight in zip(examples, weights, strict=True):
            example.loss_weight = weight
        groups = [RolloutGroup([example], SamplingParams(), i) for i, example in enumerate(examples)]
        with self.world.deadline(f"warm-up step {step + 1}"):
            for batch in self._packed(groups, Packing(t.max_tokens_per_micro_batch), False):
                trainer.forward_backward(batch, loss_type=SUPERVISED)
            result = trainer.optim_step(t.warmup_learning_rate * (1 - step / t.warmup_steps), sampled=0)
        self._latest = (self._latest[0], result)
        require_finite(f"warm-up step {step + 1}", result)
        return result

    def validate(self, selection: bool = False) -> dict[str, float]:
        """Complete the validation problems greedily, or with `selection` those that end a warm-up. Returns the mean
        reward, the mean of each reward function, and counts that are not 0."""
        task = self.run.task
        if not task.rewards.rewards and self.config.task.environment is None:
            return {}  # nothing would score them
        problems = list(enumerate(task.selection_problems() if selection else task.validation_problems()))
        if not problems:
            return {}
        groups, _, counts = self._collect_from(problems, self.run.validation_sampling, VALIDATION_DOMAIN, 0)
        metrics = {k: v for k, v in counts.items() if v} | reward_metrics(groups)
        return {f"validation/{name}": value for name, value in metrics.items() if not name.endswith("/std")}
