"""The run folder: what a run writes to it, how a run is resumed from it, and its report."""
