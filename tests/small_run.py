"""A run of a second, for scripts that are started: a module that imports nothing else."""

import lockstep

SMALL = lockstep.RunConfig(
    steps=2,
    device="cpu",
    task=lockstep.TaskConfig(easy=True, validation_prompts=0),
    sampling=lockstep.SamplingConfig(num_generations=2, max_completion_length=6),
    trainer=lockstep.TrainerConfig(prompts_per_step=2),
    checkpoint=lockstep.CheckpointConfig(interval=1),
)
