"""Sessions: a model made ready from a configuration, for training, generation, evaluation or the parity check."""
