"""Parameters, gradients and optimizer state sharded over ranks."""
