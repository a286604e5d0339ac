"""Environments of other libraries, played as our own."""
