"""What a plan is of: a model, a run's configuration, how many processes, and the longest prompt."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch

from ...config import RunConfig
from ...distributed import World
from ...distributed.cells import Cells
from ...distributed.mesh import Axis, Mesh
from ...models import Decoder, ModelConfig, num_parameters
from ...models.checks import divides
from ...trainer import frozen_parameters
from ...trainer.parameters import Layout
from ...trainer.shapes import BatchShape, planned_tokens, train_shapes


@dataclass(frozen=True)
class Workload:
    """One process of a training run, whose `config` is resolved for so many `ranks`. `longest_prompt`: tokens of the
    longest prompt that was looked at; `prompt_limit`: of any. `frozen`: the reference or the teacher."""

    model: ModelConfig
    config: RunConfig
    ranks: int
    dtype: torch.dtype
    longest_prompt: int = 1
    prompt_limit: int = 1 << 30
    frozen: Sequence[ModelConfig] = ()
    on_gpu: bool = True

    def having(self, section: str, **settings: Any) -> Workload:
        """The same with other settings in a section of the configuration."""
        changed = replace(getattr(self.config, section), **settings)
        return replace(self, config=replace(self.config, **{section: changed}))

    @cached_property
    def title(self) -> str:
        """What is trained, how, in how many processes: a line for readers."""
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
        """Of the largest micro-batch."""
        return train_shapes(self.config, self.longest_prompt, self.prompt_limit)[0]

    @property
    def sequences(self) -> int:
        """Completions that this process makes at once, at most."""
        return max(self.trained_sequences, -(-self.config.task.validation_prompts // self.generating_groups))

    @property
    def trained_sequences(self) -> int:
        """Those of them that are trained on: of a step."""
        c = self.config
        return -(-c.trainer.prompts_per_step // self.generating_groups) * c.sampling.num_generations

    @property
    def generating_groups(self) -> int:
        """Groups of processes that generate together, to which prompts are dealt."""
        return self.ranks // self.config.parallel.generator_tp or 1

    @property
    def groups(self) -> int:
        """Groups of processes that have micro-batches of their own."""
        return self.ranks // self.config.parallel.tp

    @property
    def sequence_tokens(self) -> int:
        """Tokens of a prompt with its completion that the cache is planned for."""
        return planned_tokens(self.config, self.longest_prompt, self.prompt_limit)

    @property
    def sharded(self) -> bool:
        """Whether the state is cut among several processes."""
        return self.ranks > 1

    @property
    def zero_stage(self) -> int:
        """What the processes shard: 2, gradients and the state, as the generator's whole weights are read; 3, weights
        too, where parts of them are trained on."""
        return self.config.parallel.zero_stage or (2 if self.reads_own else 3)

    @property
    def reads_own(self) -> bool:
        """Whether the weights that a rank generates with are those that it trains on, whole."""
        return self.config.parallel.tp == self.config.parallel.generator_tp == 1

    @property
    def axes(self) -> Sequence[Axis]:
        """Those that graphs have collectives along."""
        together, lanes = self.config.parallel.generator_tp, self.cells.lanes
        return World(size=self.ranks, tp=self.tp, generator_tp=together, lanes=lanes).axes

    @property
    def cells(self) -> Cells:
        """How the gradients of a step's shards are added up."""
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

    @property
    def decoder(self) -> Decoder:
        return _decoder(self.model, self.dtype)

    @cached_property
    def vectors(self) -> Sequence[Mapping[str, int]]:
        """By layer: elements of the parameters that it has beside its modules', by name."""
        return [{name: p.numel() for name, p in layer.named_parameters(recurse=False)} for layer in self.decoder.layers]

    @cached_property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(parameter.numel() for parameter in self.decoder.parameters())

    @property
    def training(self) -> Mesh:
        """What cuts the model that is trained."""
        return Mesh(tp=Axis("tp", self.tp))

    @property
    def generating(self) -> Mesh:
        """What cuts a model that ranks generate with together."""
        return Mesh(tp=Axis("tp", self.config.parallel.generator_tp))

    @cached_property
    def frozen_parameters(self) -> int:
        """Of the models that are only read, what this rank has: of several its part, padded."""
        if not self.sharded:
            return sum(map(num_parameters, self.frozen))
        alone = [not divides(model, self.tp) for model in self.frozen]  # then the ranks of `tp` have the same parts
        meshes = [Mesh() if whole else self.training for whole in alone]
        decoders = [_decoder(model, self.dtype) for model in self.frozen]
        return sum(self._laid_out(decoder, on=mesh).size for decoder, mesh in zip(decoders, meshes, strict=True))

    @cached_property
    def layout(self) -> Layout:
        """Where the trained parameters lie, padded and cut."""
        return self._laid_out(self.decoder, frozen_parameters(self.decoder, self.config.optimizer))

    def _laid_out(self, decoder: Decoder, without: Collection[str] = (), on: Mesh | None = None) -> Layout:
        named = [(name, tuple(p.shape)) for name, p in decoder.named_parameters() if name not in without]
        placed, mesh = decoder.placements, on or self.training
        return Layout.of([placed[name].shape_on(mesh, shape) for name, shape in named], self.groups)


@cache
def _decoder(config: ModelConfig, dtype: torch.dtype) -> Decoder:
    return Decoder(config, dtype, "meta")
