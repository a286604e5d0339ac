"""Captured graphs as files."""
