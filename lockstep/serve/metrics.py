"""Metrics for Prometheus, at `/metrics`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..generator import Engine

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ServerMetrics:
    """The metrics of one server, in a separate registry."""

    def __init__(self, engine: Engine) -> None:
        self._registry = registry = CollectorRegistry()
        count, seconds = partial(Counter, registry=registry), partial(Histogram, registry=registry, buckets=_SECONDS)
        self.requests = count("lockstep_requests", "Requests answered, by route and status", ["route", "status"])
        self.prompt_tokens = count("lockstep_prompt_tokens", "Tokens of prompts")
        self.sampled_tokens = count("lockstep_sampled_tokens", "Tokens of finished samples")
        self.left = count("lockstep_clients_left", "Requests whose client left before the answer")
        about = "Turns of conversations that came back with their token ids: kept, or encoded again"
        self.turns = count("lockstep_sampled_turns", about, ["as"])
        self.first_token = seconds("lockstep_first_token_seconds", "Until a streamed answer begins")
        self.seconds = seconds("lockstep_request_seconds", "Until an answer is complete")
        scheduler, cache = engine.scheduler, engine.cache
        self._gauge("lockstep_running_samples", "Samples that are decoded now", lambda: len(scheduler.running))
        self._gauge("lockstep_waiting_prompts", "Prompts that wait for slots or pages", lambda: len(scheduler.waiting))
        self._gauge("lockstep_preemptions", "Samples that gave up their pages", lambda: scheduler.preemptions)
        about = "Tokens of prompts, and of preempted samples, that were in the cache"
        self._gauge("lockstep_cached_tokens", about, lambda: scheduler.cached_tokens)
        self._gauge("lockstep_kv_pages", "Pages of the KV cache", lambda: cache.num_pages)
        self._gauge("lockstep_kv_pages_free", "Pages that no running sample holds", lambda: cache.num_free)

    def _gauge(self, name: str, about: str, value: Callable[[], float]) -> None:
        Gauge(name, about, registry=self._registry).set_function(value)

    def render(self) -> tuple[bytes, str]:
        """The text that Prometheus reads, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
