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

from ..algorithms import SUPERVISED, supervised_algorithm
from ..algorithms.host_calls import call_method
from ..algorithms.policy_terms import KL_ESTIMATORS
from ..config import RunConfig
from ..environments import Collector, Failures, Limits, worked_trajectories
from ..environments.collect import Collected
from ..environments.ranks.rollouts import RolloutHolders
from ..errors import LockstepError
from ..session.build import TrainingSession
from ..session.certificate import Certificate
from ..session.signals import EndRequest, EndRequested, SignalDelay
from ..timings import Span
from ..trainer import Packing, PendingResult, StepResult, average_results, learning_rate, pack_shards
from ..trainer.programs import add_loss_tensors
from ..types import TRAIN_DOMAIN, VALIDATION_DOMAIN, PackedBatch, RolloutGroup, SamplingParams, Trajectory
from .batching import assign_to_shards, split_mini_batches
from .dynamic_sampling import collect_with_signal
from .step_checks import check_step_result, require_finite
from .step_metrics import pass_metrics, reward_metrics, step_metrics
from .token_advantages import append_token_values, estimate_token_advantages


class Loop:
    """On-policy reinforcement learning with one model in both roles."""

    def __init__(self, config: RunConfig, run: TrainingSession) -> None:
        self.config = config
        self.run = run
        self.world = run.world
        self.algorithm = run.trainer.algorithm
        self.shards = range(config.parallel.batch_shards or run.world.mesh.fsdp.size)
        self.own_shards = run.world.mesh.fsdp.local_items(self.shards)
        self.device = run.policy.model.embed.device
        self.certificate = Certificate(config.parity, settings=run.trainer.numerics())
        self.idle_steps = 0
        self.prompts_used = 0  # prompts of the task so far; saved in checkpoints
        self.spans: list[Span] = []  # of the latest step
        self.excluded_groups: list[RolloutGroup] = []  # of the latest step: replaced (dynamic sampling), or no reward
        self._whole_sequences = self.algorithm.indexes_sequences
        self.limits = Limits(
            run.prompt_limit.tokens,
            config.max_response_length,
            config.task.turns,
            config.task.environment_timeout,
            run.prompt_limit.reason,
            packed_tokens=config.trainer.max_tokens_per_micro_batch if self._whole_sequences else None,
        )
        self.failures = Failures(config.task.max_environment_failures - 1)
        collector = Collector(
            run.policy.tokens,
            lambda *_: run.engine,
            run.task.rewards,
            config.seed,
            run.environment,
            self.limits,
            self.failures,
            run.timings,
            run.world,
            needs_rewards=config.loss.needs_rewards,
        )
        self._collect_problems = collector.collect
        self._max_sampled_length = config.max_sampled_length
        self._holders = RolloutHolders(self.world)  # of the latest step's groups
        self.ending = EndRequest()  # the signals received by any rank until the end of the latest step
        self._latest: tuple[list[RolloutGroup], StepResult | None] = ([], None)  # the latest step's rollouts and result

    def step(self, step: int, lr: float | None = None) -> tuple[dict[str, Any], list[RolloutGroup]]:
        """Run one step. Returns its metrics, the same on every rank, and its rollouts, complete on the first rank only.

        Args:
            lr: the learning rate, by default that of the schedule.

        Raises:
            ParityError: strict parity, and a log-probability or a choice of experts differs; the weights are unchanged.
            NonFiniteError: the loss, gradient norm or entropy is not finite; earlier updates of the step remain.
            LockstepError: `max_idle_steps` steps in a row had nothing to train on.
            EndRequested: a signal came during generation or scoring; the state is that from before the step.
        """
        config, trainer, timings = self.config, self.run.trainer, self.run.timings
        weights_version, began, prompts_used = trainer.weights_version, time.perf_counter(), self.prompts_used
        lr = learning_rate(config.optimizer, step, config.steps) if lr is None else lr
        with timings.measure("step", on_device=True, step=step):  # until all that it launched has finished
            with timings.measure("generate", on_device=True):
                groups, without_reward, counts, _ = self._collect(step)
                if self.run.delay is not None:
                    self._raise_if_asked_to_end(self.run.delay, prompts_used)
            generated, self._holders = groups + without_reward, RolloutHolders(self.world)
            self._latest = (generated, None)
            tokens = sum(r.length for g in generated for r in g.rollouts)
            tokens_to_compare = 0 if config.parity == "off" else tokens
            kl: dict[str, list[float]] = {}
            if self.algorithm.kl_in_reward:
                with self.world.deadline(f"the reference in step {step + 1}"):
                    kl = self._estimate_kl(groups)
            with timings.measure("advantages"):
                self._set_advantages(groups, kl)
            with timings.measure("pack"):
                *mini_batches, check_only = self._pack(groups, without_reward)
                batches = list(chain.from_iterable(mini_batches))
                wait_for_rollouts = self._holders.send_to_first(generated)
            critic_metrics: dict[str, Any] = {}
            if self.algorithm.has_token_advantages:
                phase = "critic" if self.algorithm.has_critic else "advantages"
                with self.world.deadline(f"the {phase} in step {step + 1}"), timings.measure(phase, on_device=True):
                    rollouts = [r for g in groups for r in g.rollouts]
                    for rollout in rollouts:
                        rollout.advantage = 0.0  # of those that the loss masks
                    unmasked = self._unmasked(rollouts)
                    critic_metrics = estimate_token_advantages(trainer, config.loss, batches, unmasked, kl)
            with self.world.deadline(f"training in step {step + 1}"):
                with timings.measure("forward_backward", on_device=True):
                    self._check_untrained(check_only, mini_batches[1:])
                results = self._run_updates(mini_batches, lr, tokens_to_compare)
                result = results[0] if results else trainer.finish_check(tokens_to_compare)
            wait_for_rollouts()
            self._latest = (generated, result)
            check_step_result(config.parity, self.certificate, step, result, tokens_to_compare)
            updates = config.trainer.num_iterations * len(mini_batches)
            for i, later in enumerate(results[1:], start=2):
                self._latest = (generated, later)
                require_finite(f"step {step + 1}, update {i} of {updates}", later)
            self._count_idle_steps(step, trained=bool(batches))
        counts |= {"updates": sum(r.applied for r in results), "lr": lr}
        if self.run.task.rows:
            counts["epoch"] = self.prompts_used / self.run.task.rows
        if config.loss.importance_sampling_mode is not None:
            counts["importance_sampling/clip_ratio"] = mean([r.clip_ratio for r in results[1:]] or [0.0])
        self.spans = [span for span in timings.take_spans() if span.began >= began]
        if len(results) > 1:
            first_iteration = results[: len(mini_batches)]
            clips_ratio = config.loss.importance_sampling_mode is None  # rarely in a first iteration
            result = average_results(first_iteration, results if clips_ratio else first_iteration)
        metrics = step_metrics(self.run, groups, result, [*batches, *check_only], weights_version, self.spans)
        self.ending = metrics.pop("ending")
        if kl:
            metrics["kl"] = math.fsum(chain.from_iterable(kl.values())) / sum(map(len, kl.values()))
        self.excluded_groups = without_reward
        return metrics | counts | critic_metrics, groups  # an environment's replace none of these

    def _raise_if_asked_to_end(self, delay: SignalDelay, prompts_used: int) -> None:
        """Raise `EndRequested` after a signal, which processes started by rewards or environments may have got too."""
        ending = max(self.world.gather(delay.poll(rewards_given=True)))
        if ending.number:
            self.prompts_used = prompts_used
            raise EndRequested(ending)

    def _collect(self, step: int) -> Collected:
        prompts = self.config.trainer.prompts_per_step
        if not self.config.loss.dynamic_sampling:
            self.prompts_used = (step + 1) * prompts
            problems = [(g, self.run.task.train_problem(step, g)) for g in range(prompts)]
            return self._collect_problems(problems, self.run.sampling, TRAIN_DOMAIN, step)

        def sample(wanted: list[tuple[int, int]]) -> Collected:
            problems = []
            for number, i in wanted:
                place = divmod(self.prompts_used + i, prompts)
                problems.append((number, self.run.task.train_problem(*place)))
            is_full_round = len(problems) == prompts
            return self._collect_problems(problems, self.run.sampling, TRAIN_DOMAIN, step, required=is_full_round)

        def has_signal(group: RolloutGroup) -> bool:
            rewards = [r.reward for r in self._unmasked(group.rollouts)]
            return bool(rewards) and call_method(self.config.loss, self.algorithm.keep, rewards)

        max_prompts = self.config.loss.max_num_gen_batches * prompts
        collected, used = collect_with_signal(prompts, max_prompts, sample, has_signal)
        self.prompts_used += used
        return collected

    def _unmasked(self, rollouts: Iterable[Trajectory]) -> list[Trajectory]:
        """The rollouts that the loss does not mask."""
        masks = self.config.loss.mask_truncated_completions
        return [rollout for rollout in rollouts if not (masks and rollout.cut_off)]

    def _set_advantages(self, groups: list[RolloutGroup], kl: dict[str, list[float]]) -> None:
        """Add the algorithm's penalties to the rewards, and set the advantages of the rewards less `beta` times the sum
        of each rollout's KL estimates in `kl`, if any."""
        loss = self.config.loss
        for group in groups:
            for r in group.rollouts:
                about = loss, r.length, self._max_sampled_length
                r.reward += float(call_method(loss, self.algorithm.penalty, *about))
        rewards = [[r.reward - loss.beta * math.fsum(kl.get(r.name, ())) for r in group.rollouts] for group in groups]
        lengths = [len(group) for group in rewards]
        found = call_method(loss, self.algorithm.advantages, loss, rewards, shape=lengths)
        for group, advantages in zip(groups, found, strict=True):
            for r, advantage in zip(group.rollouts, advantages, strict=True):
                r.advantage = advantage

    def _estimate_kl(self, groups: list[RolloutGroup]) -> dict[str, list[float]]:
        """By rollout name, the estimated KL divergence from the reference at each sampled token; for all ranks."""
        estimator = KL_ESTIMATORS[self.config.loss.kl_estimator]
        kl: dict[str, list[float]] = {}
        for batch in self._pack_groups(groups, {}):
            self.run.trainer.reference_logprobs(batch)
            kl_C = estimator(batch.old_model_logprob_C, batch.ref_logprob_C)[batch.valid_C]
            append_token_values(kl, kl_C.tolist(), batch)
        for kl_of_rank in self.world.gather(kl):
            kl |= kl_of_rank
        return kl

    def _pack(self, groups: list[RolloutGroup], without_reward: list[RolloutGroup]) -> list[list[PackedBatch]]:
        """The micro-batches of each mini-batch that has any, and finally those of skipped groups, which are only
        checked for parity.

        Skipped are groups whose completions are all masked (`mask_truncated_completions`), whose advantages are all 0
        (`skip_zero_variance`), or that have no reward.
        """
        config, weights = self.config, dict[int, float]()
        skip = config.trainer.skip_zero_variance and not config.loss.kl_in_loss
        to_pack: list[list[RolloutGroup]] = []
        skipped: list[RolloutGroup] = []
        for mini_batch in split_mini_batches(groups, config.trainer.num_mini_batches):
            weights |= self._loss_weights(mini_batch)
            trained: list[RolloutGroup] = []
            for g in mini_batch:
                counts = any(id(r) in weights and (r.advantage != 0 or not skip) for r in g.rollouts)
                (trained if counts else skipped).append(g)
            if trained:
                to_pack.append(trained)
        check_only = sorted(skipped + without_reward, key=lambda g: g.group) if config.parity != "off" else []
        return [self._pack_groups(part, weights) for part in (*to_pack, check_only)]

    def _loss_weights(self, groups: list[RolloutGroup]) -> dict[int, float]:
        """The per-token weight of each rollout in the policy loss, by `id`, normalized over a mini-batch. Skipped
        groups count, since their policy loss has no gradient, and masked completions count as sequences. The
        load-balancing loss is not affected: it has a total weight of 1 over what is trained on."""
        rollouts = [r for g in groups for r in g.rollouts]
        unmasked = self._unmasked(rollouts)
        lengths = [r.length for r in unmasked]
        about = [*lengths], len(rollouts), self._max_sampled_length
        weights = call_method(self.config.loss, self.algorithm.weights, *about, shape=len(lengths))
        return {id(r): w for r, w in zip(unmasked, weights, strict=True)}

    def _pack_groups(self, groups: list[RolloutGroup], weights: dict[int, float]) -> list[PackedBatch]:
        """This rank's micro-batches of these groups, whose rollouts get their loss weights; 0 if they have none."""
        if not groups:
            return []
        for r in (r for g in groups for r in g.rollouts):
            r.loss_weight = weights.get(id(r), 0.0)
        t = self.config.trainer
        packing = Packing(
            t.max_tokens_per_micro_batch, t.mode, shapes=self.run.shapes, whole_sequences=self._whole_sequences
        )
        return self._pack_on_shards(groups, packing, check_parity=self.config.parity != "off")

    def _pack_on_shards(
        self, groups: Sequence[RolloutGroup], packing: Packing, check_parity: bool
    ) -> list[PackedBatch]:
        """Distribute groups to shards and pack this rank's micro-batches, equally many on every rank."""
        shards = assign_to_shards(groups, len(self.shards), self.config.parallel.balance_batch)
        ranks = self.world.ranks_of_shard
        self._holders.send_missing((group, ranks(i)) for i, of_shard in enumerate(shards) for group in of_shard)
        packed = pack_shards(shards, self.own_shards, packing, check_parity)
        for i, batch in enumerate(packed):  # the first of each own shard, then the second of each, ...
            add_loss_tensors(batch, self.algorithm)
            batch.ends_cell = self.run.trainer.cells.ends_cell(i % len(self.own_shards))
        return [batch.to(self.device) for batch in packed]

    def _check_untrained(self, check_only: list[PackedBatch], later: list[list[PackedBatch]]) -> None:
        """Compare log-probabilities of what the step's first update does not train on: skipped groups, and `later`
        mini-batches, which are trained on with changed weights and so also keep the sampled support."""
        for batch in check_only:
            self.run.trainer.check(batch)
        for batch in chain.from_iterable(later):
            if batch.check_parity or batch.truncated:
                self.run.trainer.check(batch, keep_support=True)
            batch.check_parity = False

    def _run_updates(self, mini_batches: list[list[PackedBatch]], lr: float, sampled: int) -> list[StepResult]:
        """Run a step's updates, one per iteration and mini-batch, stopping after the first that is not applied. The
        first is applied only if `sampled` tokens are identical."""
        count, results = self.config.trainer.num_iterations, list[StepResult]()
        for i, batches in product(range(count), mini_batches):
            pending = self._launch_update(batches, lr, 0 if results else sampled, first=i == 0, last=i == count - 1)
            results.append(pending.get())  # the host waits here
            if not results[-1].applied:
                break
        return results

    def _launch_update(
        self, batches: list[PackedBatch], lr: float, sampled: int, first: bool, last: bool
    ) -> PendingResult:
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

    def _count_idle_steps(self, step: int, trained: bool) -> None:
        self.idle_steps = 0 if trained else self.idle_steps + 1
        if self.idle_steps >= self.config.trainer.max_idle_steps:
            error = LockstepError(
                f"step {step + 1}: for {self.idle_steps} steps every group's rewards were all equal, or its "
                "completions were cut off and masked, so there was nothing to learn from; use easier or harder "
                "prompts, more samples a prompt, a finer reward, or longer completions (trainer.max_idle_steps sets "
                "the patience)"
            )
            raise self.world.report_on_first(error)

    def warmup_step(self, step: int) -> StepResult:
        """Run one supervised step on worked examples, in the same packed trainer."""
        t, policy, trainer = self.config.trainer, self.run.policy, self.run.trainer
        problems = [self.run.task.warmup_problem(step, i) for i in range(t.warmup_batch_size)]
        known = self.run.environment, problems, policy.tokens, policy.encode_completion, self.limits
        examples = self.world.broadcast_from_first(lambda: worked_trajectories(*known))  # environments may vary
        lengths = [example.length for example in examples]
        weights = supervised_algorithm(self.config.loss).weights(lengths, len(examples), 0)
        for example, weight in zip(examples, weights, strict=True):
            example.loss_weight = weight
        groups = [RolloutGroup([example], SamplingParams(), i) for i, example in enumerate(examples)]
        with self.world.deadline(f"warm-up step {step + 1}"):
            for batch in self._pack_on_shards(groups, Packing(t.max_tokens_per_micro_batch), check_parity=False):
                trainer.forward_backward(batch, loss_type=SUPERVISED)
            result = trainer.optim_step(t.warmup_learning_rate * (1 - step / t.warmup_steps), sampled=0)
        self._latest = (self._latest[0], result)
        require_finite(f"warm-up step {step + 1}", result)
        return result

    def validate(self, selection: bool = False) -> dict[str, float]:
        """Complete the validation problems, or with `selection`, greedily, those that end a warm-up. Returns the mean
        reward, the mean of each reward function, with several samples a problem pass@n, and counts that are not 0."""
        task = self.run.task
        if not task.rewards.rewards and self.config.task.environment is None:
            return {}  # nothing would score them
        problems = list(enumerate(task.selection_problems() if selection else task.validation_problems()))
        if not problems:
            return {}
        sampling = self.run.selection_sampling if selection else self.run.validation_sampling
        groups, _, counts, _ = self._collect_problems(problems, sampling, VALIDATION_DOMAIN, 0)
        metrics = {k: v for k, v in counts.items() if v} | reward_metrics(groups)
        metrics |= pass_metrics(groups, sampling.n) if sampling.n > 1 else {}
        return {f"validation/{name}": value for name, value in metrics.items() if not name.endswith("/std")}
