"""Stores captured graphs as files."""
