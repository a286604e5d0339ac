"""Flags of other trainers that have another name here; `docs/porting.md` has all of them."""

NAMES = {
    "adam-beta1": "--optimizer.beta1",
    "adam-beta2": "--optimizer.beta2",
    "bf16": "--dtype",
    "dataset-name": "--data",
    "eval-steps": "--task.validation-interval",
    "gradient-accumulation-steps": "--trainer.prompts-per-step",
    "gradient-checkpointing": "--compile.recompute",
    "lr": "--optimizer.learning-rate",
    "lr-scheduler-type": "--optimizer.lr-scheduler",
    "model-name-or-path": "--model",
    "num-train-epochs": "--steps",
    "output-dir": "--run-dir",
    "per-device-train-batch-size": "--trainer.prompts-per-step",
    "report-to": "--metrics.trackers",
    "resume-from-checkpoint": "--resume",
    "reward-funcs": "--reward",
    "save-steps": "--checkpoint.interval",
    "save-total-limit": "--checkpoint.keep-last",
    "warmup-ratio": "--optimizer.warmup-steps",
}
