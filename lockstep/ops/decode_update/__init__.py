"""Updates of the running batch before and after a decode step."""
