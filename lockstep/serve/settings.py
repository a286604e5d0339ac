"""A server's settings, in addition to its model."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import GeneratorConfig
from ..config.sections.section import Section, between
from ..errors import refuse

DEFAULT_MAX_CONTEXT = 8192  # tokens per request, for models that allow more: block tables are that wide
STEPS_PER_SYNC = 4  # decode steps between updates of streams, and until new requests and cancellations are seen


@dataclass(frozen=True, kw_only=True)
class Settings(Section):
    """A server's address, API key and limits."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is all of this machine's."""
    port: int = between(0, 65535, default=8000)
    """Port to listen on; 0 takes a free one."""
    api_key: str | None = None
    """Key that clients must send; LOCKSTEP_API_KEY in the environment sets it hidden from other users."""
    served_model_name: str | None = None
    """What clients call the model."""
    max_model_len: int = between(0, 1 << 31, default=0)
    """Most tokens of a prompt and its completion together; 0 is the model's context, but at most 8192."""
    max_num_seqs: int = between(1, 1 << 16, default=256)
    """Samples that run at once."""
    kv_cache_tokens: int = between(0, 1 << 40, default=0)
    """Tokens that the KV cache holds; 0 plans it from the two above and the available memory."""
    max_waiting: int = between(0, 1 << 20, default=1024)
    """Samples that may wait in addition to those that run; further ones are refused with status 429."""
    max_body_mib: int = between(1, 1 << 10, default=16)
    """Largest request body in MiB; larger ones are refused with status 413."""
    shutdown_seconds: float = between(0, 86400, default=30.0)
    """Seconds that requests have to finish after SIGTERM or Ctrl-C."""

    def path(self, name: str) -> str:
        return f"--{name.replace('_', '-')}"

    def check(self) -> None:
        refuse(self.api_key == "", "the API key is empty; give a text, or leave it out")
        refuse(not self.served_model_name, "--served-model-name is empty; give a text, or leave it out")

    @property
    def name(self) -> str:
        """The model's name for clients."""
        return self.served_model_name or ""

    @property
    def generator(self) -> GeneratorConfig:
        return GeneratorConfig(
            max_num_seqs=self.max_num_seqs, kv_cache_tokens=self.kv_cache_tokens, steps_per_sync=STEPS_PER_SYNC
        )

    @property
    def warning(self) -> str:
        """A warning, if clients on other machines are answered without a key."""
        is_local = self.host in ("localhost", "::1") or self.host.startswith("127.")
        return "" if is_local or self.api_key else " (without a key: whoever reaches this address is answered)"

    def context(self, model_context: int) -> int:
        """The limit of tokens per request. `InputError`: the model's context or the cache has fewer."""
        refuse(
            self.max_model_len > model_context,
            f"--max-model-len is {self.max_model_len}; the model's context has {model_context} tokens",
        )
        limit = self.max_model_len or min(model_context, DEFAULT_MAX_CONTEXT)
        page_size = self.generator.page_size
        refuse(
            0 < self.kv_cache_tokens < -(-limit // page_size) * page_size,
            f"--kv-cache-tokens is {self.kv_cache_tokens} in pages of {page_size}, and a request may have {limit} "
            "tokens; raise it, or lower --max-model-len",
        )
        return limit
