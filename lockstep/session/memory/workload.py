"""What is planned for: a model, a run's configuration, the number of processes, and the longest prompt."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch

from ...algorithms import make_algorithm
from ...config import RunConfig
from ...distributed import World
from ...distributed.cells import Cells
from ...distributed.mesh import Axis, Mesh
from ...models import Decoder, ModelConfig, num_parameters
from ...models.checks import is_divisible
from ...trainer import frozen_parameters
from ...trainer.parameters import Layout
from ...trainer.shapes import BatchShape, planned_tokens, train_shapes


@dataclass(frozen=True)
class Workload:
    """One process of a training run.

    Attributes:
        config: of the run, resolved for `ranks` processes. dtype: the compute dtype.
        longest_prompt: tokens of the longest prompt inspected. prompt_limit: the most tokens of any prompt.
        frozen: models that are only read: the reference or the teacher.
    """

    model: ModelConfig
    config: RunConfig
    ranks: int
    dtype: torch.dtype
    longest_prompt: int = 1
    prompt_limit: int = 1 << 30
    frozen: Sequence[ModelConfig] = ()
    on_gpu: bool = True

    def with_settings(self, section: str, **settings: Any) -> Workload:
        """The workload with other settings in a section of the configuration."""
        changed = replace(getattr(self.config, section), **settings)
        return replace(self, config=replace(self.config, **{section: changed}))

    @cached_property
    def title(self) -> str:
        """A line for users: what is trained, how, and with how many processes."""
        c, s = self.config, self.config.sampling
        model, task = c.model or f"{c.arch}, random weights", c.task.data or c.task.name
        turns = f", of {c.task.turns} turns" if c.task.turns > 1 else ""
        return (
            f"{model} ({num_parameters(self.model) / 1e6:,.1f} million parameters), {task}, {c.loss.algorithm}: "
            f"{c.trainer.prompts_per_step} prompts x {s.num_generations} completions of at most "
            f"{s.max_completion_length:,} tokens a step{turns}" + (f"; {self.ranks} processes" if self.sharded else "")
        )

    @cached_property
    def shape(self) -> BatchShape:
        """The shape of the largest micro-batch."""
        return train_shapes(self.config, self.longest_prompt, self.prompt_limit)[0]

    @property
    def sequences(self) -> int:
        """The most completions that this process's group generates at once, for training or validation."""
        task = self.config.task
        validated = -(-task.validation_prompts // self.generator_groups) * task.validation_samples
        return max(self.trained_sequences, validated)

    @property
    def trained_sequences(self) -> int:
        """The completions that this process's group generates for a step."""
        c = self.config
        return -(-c.trainer.prompts_per_step // self.generator_groups) * c.sampling.num_generations

    @property
    def generator_groups(self) -> int:
        """The number of groups of processes that generate together, to which prompts are dealt."""
        return self.ranks // self.config.parallel.generator_tp or 1

    @property
    def groups(self) -> int:
        """The number of groups of processes with micro-batches of their own (the size of `fsdp`)."""
        return self.ranks // self.config.parallel.tp

    @property
    def sequence_tokens(self) -> int:
        """The tokens of a prompt with its completion that the cache is planned for."""
        return planned_tokens(self.config, self.longest_prompt, self.prompt_limit)

    @property
    def sharded(self) -> bool:
        """Whether the training state is sharded over several processes."""
        return self.ranks > 1

    @property
    def zero_stage(self) -> int:
        """What processes shard. 2: gradients and optimizer state, as the generator's whole weights are trained on.
        3: the weights too."""
        return self.config.parallel.zero_stage or (2 if self.holds_whole_weights else 3)

    @property
    def holds_whole_weights(self) -> bool:
        """Whether a rank holds the weights whole, and generates with and trains on the same ones."""
        return self.config.parallel.tp == self.config.parallel.generator_tp == 1

    @property
    def axes(self) -> Sequence[Axis]:
        """The axes that graphs have collectives along."""
        generator_tp, lanes = self.config.parallel.generator_tp, self.cells.ranks_per_cell
        return World(size=self.ranks, tp=self.tp, generator_tp=generator_tp, ranks_per_cell=lanes).axes

    @property
    def cells(self) -> Cells:
        """How the gradients of a step's shards are summed."""
        parallel = self.config.parallel
        return Cells(parallel.batch_shards or self.groups, parallel.cell, self.groups)

    @property
    def offloads(self) -> bool:
        return self.config.optimizer.offload

    @property
    def tp(self) -> int:
        return self.config.parallel.tp

    @property
    def b(self) -> int:
        return self.dtype.itemsize

    @cached_property
    def decoder(self) -> Decoder:
        """The trained model, without memory, with the value head of a critic."""
        return _decoder(self.model, self.dtype, make_algorithm(self.config.loss).has_critic)

    @property
    def layer_parameters(self) -> Sequence[Mapping[str, int]]:
        """For each layer, the sizes of its own parameters (not those of its modules), by name."""
        return _layer_parameters(self.decoder)

    @property
    def layer_kinds(self) -> Sequence[int]:
        """For each layer, the first layer of its class with parameters of the same sizes, whose terms are the same."""
        return _layer_kinds(self.decoder)

    @property
    def largest_parameter(self) -> int:
        """The number of elements of the largest parameter."""
        return _largest_parameter(self.decoder)

    @property
    def trainer_mesh(self) -> Mesh:
        """The mesh that the trained model is sharded over (`fsdp` aside)."""
        return Mesh(tp=Axis("tp", self.tp))

    @property
    def generator_mesh(self) -> Mesh:
        """The mesh that the generator's model is sharded over."""
        return Mesh(tp=Axis("tp", self.config.parallel.generator_tp))

    @cached_property
    def frozen_parameters(self) -> int:
        """The number of parameters, padded, that this rank has of the models that are only read."""
        if not self.sharded:
            return sum(map(num_parameters, self.frozen))
        count = 0
        for model in self.frozen:
            mesh = self.trainer_mesh if is_divisible(model, self.tp) else Mesh()  # replicated over `tp`
            count += self._layout_of(_decoder(model, self.dtype), mesh).size
        return count

    @cached_property
    def layout(self) -> Layout:
        """The layout of the trained parameters in a rank's flat buffer."""
        return self._layout_of(
            self.decoder, self.trainer_mesh, without=frozen_parameters(self.decoder, self.config.optimizer)
        )

    def _layout_of(self, decoder: Decoder, mesh: Mesh, without: Collection[str] = ()) -> Layout:
        shapes = [
            decoder.placements[name].part_shape(mesh, tuple(parameter.shape))
            for name, parameter in decoder.named_parameters()
            if name not in without
        ]
        return Layout.of(shapes, self.groups)


@cache
def _decoder(config: ModelConfig, dtype: torch.dtype, has_critic: bool = False) -> Decoder:
    decoder = Decoder(config, dtype, "meta")
    if has_critic:
        decoder.add_value_head()
    return decoder


@cache
def _layer_parameters(decoder: Decoder) -> Sequence[Mapping[str, int]]:
    return [{name: p.numel() for name, p in layer.named_parameters(recurse=False)} for layer in decoder.layers]


@cache
def _layer_kinds(decoder: Decoder) -> Sequence[int]:
    first: dict[Any, int] = {}
    kinds = [(type(layer), *((name, p.shape) for name, p in layer.named_parameters())) for layer in decoder.layers]
    return [first.setdefault(kind, index) for index, kind in enumerate(kinds)]


@cache
def _largest_parameter(decoder: Decoder) -> int:
    return max(parameter.numel() for parameter in decoder.parameters())
