"""Backward operators fused with their neighbours."""
