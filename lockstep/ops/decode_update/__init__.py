"""The running batch before and after a decode step."""
