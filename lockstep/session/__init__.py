"""A configuration put together and made ready: for training, generation, evaluation and the parity check."""
