"""These tests need the extra `serve`, and OpenAI's client."""

from __future__ import annotations

from importlib.util import find_spec

if any(find_spec(package) is None for package in ("fastapi", "uvicorn", "orjson", "prometheus_client", "openai")):
    collect_ignore_glob = ["test_*.py"]
