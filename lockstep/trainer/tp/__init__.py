"""The trainer where neighbouring processes share its products (tensor parallelism)."""
