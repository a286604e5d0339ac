"""What several ranks do with the samples of a step."""
