"""A run folder: what is written to it, what a run is resumed from, and its report."""
