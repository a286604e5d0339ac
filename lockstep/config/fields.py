"""The configuration dataclasses. Names are the field's own (TRL, vLLM, Hugging Face); all are frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LossType = Literal["grpo", "dr_grpo", "dapo", "sft"]
Attention = Literal["native", "flex"]


@dataclass(frozen=True)
class TaskConfig:
    """Where prompts and rewards come from."""

    name: Literal["sum-digits", "word-arithmetic", "gsm8k", "dataset"] = "sum-digits"
    """Prompt source. `dataset` reads --data and needs at least one --reward."""
    data: str | None = None
    """JSON lines, parquet, a Hugging Face dataset folder or hub id."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    prompt_column: str = "prompt"
    """Column that holds the prompt: a text or chat messages."""
    system_prompt: str | None = None
    """System message for prompts without one; it makes a text prompt a chat of one user message."""
    chat_template_kwargs: tuple[str, ...] = ()
    """Variables of the model's chat template as NAME=VALUE, the value in JSON: enable_thinking=false."""
    shuffle: bool = True
    """Visit the data in a new seeded order every epoch; off: in its own order."""
    max_prompt_length: int = 0
    """Tokens a prompt may have; 0 allows what the model's context leaves beside max_completion_length."""
    filter_overlong_prompts: bool = False
    """Leave out rows whose prompt is longer than that, and say how many; otherwise they are refused."""
    reward: tuple[str, ...] = ()
    """Reward functions as module:function or path.py:function, or the ready ones math and gsm8k; empty for the task's
    own."""
    reward_weights: tuple[float, ...] = ()
    """One weight a reward function; empty for all ones."""
    reward_on_error: Literal["raise", "zero", "skip"] = "raise"
    """What a reward that raises, crashes, takes too long or returns no finite number does. raise: end the run. zero:
    count as 0. skip: count as None; a group with a completion that has no reward is left out of the step."""
    reward_workers: int = 0
    """Processes that call the rewards, a prompt's completions at a time; 0 calls them in this one, the whole batch."""
    reward_timeout: float = 0.0
    """Seconds a call may take (needs reward_workers); 0 is no limit."""
    easy: bool = False
    """sum-digits only: a short prompt with two numbers, for a tiny model."""
    seed: int = 42
    """Seed of the training problems or of the data's order."""
    validation_seed: int = 99
    """Seed of the validation problems (sum-digits, word-arithmetic)."""
    validation_data: str | None = None
    """Validation rows; without it a dataset's last `validation_prompts` rows are held out."""
    validation_prompts: int = 20
    """Prompts a validation generates greedily; 0 turns validation off."""
    validation_interval: int = 0
    """Validate every this many steps as well as before and after; 0 for only those two."""


@dataclass(frozen=True)
class SamplingConfig:
    """How completions are sampled."""

    num_generations: int = 8
    """Samples a prompt (the group size)."""
    temperature: float = 1.0
    """Softmax temperature; 0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 is off."""
    top_p: float = 1.0
    """Keep the most likely tokens up to this mass; 1 is off."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the most likely; 0 is off."""
    max_completion_length: int = 100
    """New tokens a sample, at most."""
    stop: tuple[str, ...] = ()
    """Stop strings."""
    ignore_eos: bool = False
    """Always generate max_completion_length tokens (benchmarks)."""


@dataclass(frozen=True)
class GeneratorConfig:
    """The generation engine."""

    page_size: int = 16
    """Tokens a KV-cache page; flex attention rounds it up to whole key tiles of 64."""
    kv_cache_tokens: int = 0
    """Capacity of the KV cache in tokens; 0 plans it from the workload and the memory at hand."""
    max_num_seqs: int = 256
    """Sequences running at once."""
    max_num_batched_tokens: int = 8192
    """Prefill tokens a forward pass; longer prompts are prefilled in chunks."""
    prefix_caching: bool = True
    """Reuse pages of equal prefixes computed with equal weights."""
    steps_per_sync: int = 8
    """Decode steps between two looks of the host at the results."""


@dataclass(frozen=True)
class TrainerConfig:
    """The training step."""

    prompts_per_step: int = 5
    """Groups a step."""
    num_iterations: int = 1
    """Optimizer updates on each rollout."""
    mode: Literal["packed", "per_sample"] = "packed"
    """packed: prompts once, many samples a micro-batch. per_sample: one sample's forward, then its backward."""
    max_tokens_per_micro_batch: int = 16384
    """Packed tokens a micro-batch; a step with more accumulates gradients over several."""
    skip_zero_variance: bool = True
    """Leave out groups whose advantages are all zero."""
    max_idle_steps: int = 10
    """Stop after this many steps in a row with nothing to train on."""
    warmup_steps: int = 0
    """Supervised steps on worked examples before reinforcement learning (tasks that have them)."""
    warmup_learning_rate: float = 1e-3
    """Learning rate of the first supervised step; it falls linearly to 0 over them."""
    warmup_loss: float = 0.0
    """End the supervised steps early, once the mean loss of the last ten is below this (nats a token)."""
    warmup_reward: float = 0.0
    """End the supervised steps early, once greedy answers to held-out problems have this mean reward; 0 is off. They
    are as many as validation's and none of those. The loss alone says little about how many problems a model solves."""
    warmup_interval: int = 50
    """Supervised steps between two looks at warmup_reward."""
    warmup_batch_size: int = 64
    """Worked examples a supervised step."""


@dataclass(frozen=True)
class LossConfig:
    """The policy loss and the advantage estimate."""

    loss_type: LossType = "grpo"
    """grpo: mean over each sequence, then over sequences. dr_grpo: sum over max_completion_length. dapo: mean over
    all tokens with an asymmetric clip."""
    epsilon: float = 0.2
    """Clip range below (and above unless epsilon_high is given)."""
    epsilon_high: float | None = None
    """Clip range above; 0.28 by default for dapo."""
    beta: float = 0.0
    """Weight of the KL divergence from the frozen initial model, of both at temperature 1 and without filters."""
    use_bias_correction_kl: bool = True
    """Weigh each token's KL estimate by its probability in the model over that in the distribution it was sampled from:
    unbiased at every temperature, its gradient too; what filters (top_k, top_p, min_p) left out is missing. Off: the
    estimate is biased at a temperature other than 1 and under filters, and its gradient always."""
    scale_rewards: Literal["none", "group", "batch"] = "none"
    """Divide advantages by the standard deviation of the group's or the batch's rewards. TRL's default is group; none,
    as in Dr. GRPO, weighs easy, middling and hard prompts alike."""
    overlong_buffer: int = 0
    """dapo: the last this many tokens before max_completion_length cost a linear penalty; 0 is off."""
    overlong_penalty: float = 1.0
    """dapo: the penalty at max_completion_length."""
    router_aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of a mixture of experts, of the tokens that an update trains on; 0 is off."""
    mask_truncated_completions: bool = False
    """Leave completions that did not finish out of the loss. As in TRL the means of grpo and dr_grpo still count them
    among the sequences, and that of dapo leaves out their tokens."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW on fp32 masters."""

    learning_rate: float = 1e-6
    """Largest learning rate: after warm-up, before decay."""
    beta1: float = 0.9
    """Decay of the mean of the gradients."""
    beta2: float = 0.95
    """Decay of the mean of their squares."""
    epsilon: float = 1e-8
    """Added to the root of the mean square."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices, not of norm weights."""
    max_grad_norm: float = 1.0
    """Clip by global norm; 0 is off."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Decay over the run after warm-up."""
    router_bias_rate: float = 0.0
    """Balance experts that are chosen with a bias (DeepSeek-V3): with each update an expert's bias goes up by this when
    it had fewer tokens than the mean, and down when it had more; 0 leaves the biases as they are."""


@dataclass(frozen=True)
class CompileConfig:
    """Captured graphs, in both roles. They compute the same bits as without; only backend inductor changes some."""

    capture: Literal["none", "step", "joint", "layer"] | None = None
    """step: trace forward_backward, optim_step and decode into graphs. joint: the same, with forward and backward pass
    cut by the min-cut partitioner. layer: compile the model's layers one by one. none: call the model. Left out: step
    on a GPU, none on a CPU."""
    cudagraph_mode: Literal["none", "piecewise", "full", "full_and_piecewise"] | None = None
    """Record captured graphs as CUDA graphs and replay them (GPU only). full: each whole. piecewise: in pieces around
    attention, which runs between them. full_and_piecewise: whole for the shapes of the warm-up, in pieces for others.
    Left out: full on a GPU where anything is captured."""
    canonicalize: bool = True
    """Drop what nothing depends on from captured graphs."""
    recompute: tuple[str, ...] = ()
    """What the backward pass computes again instead of keeping: `full`, module paths such as `layers.*`, or operators
    such as `silu_mul`."""
    activation_memory_gib: float = 0.0
    """Memory that the forward pass may keep for the backward pass: as many layers as it takes are computed again; 0 is
    no limit."""
    verify: Literal["strict", "warn", "off"] = "strict"
    """Before the first step every graph must give eager's bits, as captured and as replayed. strict: a difference ends
    the run. warn: the function runs one level further down: in pieces, without a CUDA graph, eagerly. off: no check."""
    backend: Literal["auto", "none", "eager", "inductor"] = "auto"
    """What runs captured graphs. eager: their operators, as captured. inductor: the regions that `inductor` chooses are
    compiled. none: nothing, the model is called. auto: eager where anything is captured."""
    inductor: tuple[str, ...] = ("backward",)
    """What backend inductor compiles: `backward` (the backward pass), module paths such as `layers.*` (their forward
    pass, where the generator and the trainer share it), or `all`."""
    dump: str | None = None
    """Folder to write every captured graph to, with what each pass changed."""
    reshard_after_forward: bool = True
    """Several processes: gather weights again in the backward pass instead of keeping them."""
    bucket_collectives: bool = True
    """Several processes: gather a layer's weights, and exchange its gradients, in one collective each."""
    reorder_collectives: bool = True
    """Several processes: start a layer's collectives one layer before their results are needed."""


@dataclass(frozen=True)
class ParallelConfig:
    """Several processes, started with torchrun: each trains on its share of a step with a shard of the weights."""

    fsdp: int = 0
    """Processes that weights, gradients and moments are sharded over; 0 for all that torchrun started."""
    batch_shards: int = 0
    """Parts that a step's prompts are dealt into, each packed by itself; 0 is one a process. Bits depend on this number
    and not on that of the processes, which must divide it."""
    timeout: float = 300.0
    """Seconds a process waits for the others before it ends the run."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints for resuming (the final model is always exported)."""

    interval: int = 0
    """Save every this many steps and at the end; 0 is off, and the run cannot be resumed."""
    keep_last: int = 2
    """Checkpoints kept."""


@dataclass(frozen=True)
class MetricsConfig:
    """What a run writes and shows."""

    progress: bool = True
    """Show the live display (plain lines where standard error is no terminal)."""
    rollouts: bool = True
    """Write rollouts.jsonl."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Trackers that get every step's metrics too; each is an extra to install. None by default: nothing phones home."""
    project: str = "lockstep"
    """Weights & Biases project (wandb)."""


@dataclass(frozen=True)
class RunConfig:
    """A resolved run: what config.yaml holds and `--config` replays."""

    recipe: str = "sum-digits"
    """Name of the recipe this came from."""
    model: str | None = None
    """Hugging Face folder or hub id; without it a tiny random model is made."""
    arch: str = "tiny"
    """Architecture of the random model when `model` is not given."""
    steps: int = 10
    """Reinforcement-learning steps."""
    seed: int = 0
    """Seed of sampling and of a random model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes the GPU when there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; auto is bfloat16 on a GPU (the only one there) and float32 on a CPU."""
    parity: Literal["strict", "warn", "off"] = "strict"
    """What a difference between generator and trainer does."""
    attention: Attention = "native"
    """Of both roles. native: a token attends to all before it. flex: FlexAttention, for models with sliding windows and
    for attention_mask."""
    attention_mask: str | None = None
    """flex only: which keys a query attends to, of those up to its own, as module:function or path.py:function of the
    positions of both."""
    task: TaskConfig = field(default_factory=TaskConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
