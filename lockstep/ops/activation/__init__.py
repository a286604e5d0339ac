"""The SiLU-gated product."""
