"""What other trainers' flags and keys are called here, as flags; `docs/porting.md` has all of them."""

NAMES: dict[str, str] = {
    "adam-beta1": "--optimizer.beta1",
    "adam-beta2": "--optimizer.beta2",
    "batch-size": "--trainer.prompts-per-step",
    "bf16": "--dtype",
    "dataset-name": "--data",
    "eval-steps": "--task.validation-interval",
    "gradient-accumulation-steps": "--trainer.prompts-per-step",
    "gradient-checkpointing": "--compile.recompute",
    "kl-coef": "--loss.beta",
    "kl-loss-coef": "--loss.beta",
    "lr": "--optimizer.learning-rate",
    "lr-scheduler-type": "--optimizer.lr-scheduler",
    "max-new-tokens": "--sampling.max-completion-length",
    "max-response-length": "--sampling.max-completion-length",
    "max-tokens": "--sampling.max-completion-length",
    "max-tool-calling-iterations": "--task.max-turns",
    "model-name-or-path": "--model",
    "num-train-epochs": "--steps",
    "output-dir": "--run-dir",
    "per-device-train-batch-size": "--trainer.prompts-per-step",
    "ppo-epochs": "--trainer.num-iterations",
    "ppo-mini-batch-size": "--trainer.num-mini-batches",
    "report-to": "--metrics.trackers",
    "resume-from-checkpoint": "--resume",
    "reward-funcs": "--reward",
    "save-freq": "--checkpoint.interval",
    "save-steps": "--checkpoint.interval",
    "save-total-limit": "--checkpoint.keep-last",
    "steps-per-generation": "--trainer.num-mini-batches",
    "tensor-parallel-size": "--parallel.generator-tp",
    "train-batch-size": "--trainer.prompts-per-step",
    "warmup-ratio": "--optimizer.warmup-steps",
}

# What others have a flag for, and nothing here has.
ABSENT = {
    **dict.fromkeys(("lora-r", "lora-alpha", "use-peft"), "there is no LoRA here: all weights are trained"),
    **dict.fromkeys(("push-to-hub", "hub-model-id"), "nothing is uploaded: the run's model/ is a Hugging Face folder"),
    "repetition-penalty": "there is none here: tokens are drawn from the model's own distribution, which trains",
    **dict.fromkeys(("use-vllm", "vllm-mode"), "the engine is in the same process, and always used"),
}
