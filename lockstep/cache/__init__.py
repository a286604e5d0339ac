"""Caches that outlive a process, and the fingerprint that they depend on."""
