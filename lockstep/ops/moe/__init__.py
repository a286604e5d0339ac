"""Mixture of experts: routing, grouped products, statistics."""
