"""What a server is told beside its model."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import GeneratorConfig
from ..config.sections.section import Section, between
from ..errors import refuse

USUAL_CONTEXT = 8192  # tokens a request, where the model allows more and nobody asks for it: block tables are that wide
STEPS_PER_SYNC = 4  # tokens that a stream shows together, and that pass before a new request or a cancellation is seen


@dataclass(frozen=True, kw_only=True)
class Settings(Section):
    """Where a server listens, whom it answers, and what it takes on."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every one of this machine's."""
    port: int = between(0, 65535, default=8000)
    """Port to listen on; 0 takes a free one."""
    api_key: str | None = None
    """Key that clients must send; LOCKSTEP_API_KEY in the environment sets it unseen by other users."""
    served_model_name: str | None = None
    """What clients call the model."""
    max_model_len: int = between(0, 1 << 31, default=0)
    """Tokens that a prompt and its completion may have together; 0 is the model's context, 8192 at most."""
    max_num_seqs: int = between(1, 1 << 16, default=256)
    """Samples that run at once."""
    kv_cache_tokens: int = between(0, 1 << 40, default=0)
    """Tokens that the KV cache holds; 0 plans it from the two above and the memory at hand."""
    max_waiting: int = between(0, 1 << 20, default=1024)
    """Samples that may wait beside those that run; one more is refused with status 429."""
    max_body_mib: int = between(1, 1 << 10, default=16)
    """Size of a request's body in MiB, above which it is refused with status 413."""
    shutdown_seconds: float = between(0, 86400, default=30.0)
    """Time that requests have to finish after SIGTERM or Ctrl-C."""

    def path(self, name: str) -> str:
        return f"--{name.replace('_', '-')}"

    def check(self) -> None:
        refuse(self.api_key == "", "the API key is empty; give a text, or leave it out")
        refuse(not self.served_model_name, "--served-model-name is empty; give a text, or leave it out")

    @property
    def name(self) -> str:
        """Of the model, for clients."""
        return self.served_model_name or ""

    @property
    def generator(self) -> GeneratorConfig:
        return GeneratorConfig(
            max_num_seqs=self.max_num_seqs, kv_cache_tokens=self.kv_cache_tokens, steps_per_sync=STEPS_PER_SYNC
        )

    @property
    def remark(self) -> str:
        """A warning, where others than this machine's users are answered without a key."""
        alone = self.host in ("localhost", "::1") or self.host.startswith("127.")
        return "" if alone or self.api_key else " (without a key: whoever reaches this address is answered)"

    def context(self, of_model: int) -> int:
        """`max_model_len` with a model of this context. Raises `InputError` when it or the cache has less than that."""
        refuse(
            self.max_model_len > of_model,
            f"--max-model-len is {self.max_model_len}; the model's context has {of_model} tokens",
        )
        found = self.max_model_len or min(of_model, USUAL_CONTEXT)
        refuse(
            0 < self.kv_cache_tokens < found,
            f"--kv-cache-tokens is {self.kv_cache_tokens}, and a request may have {found} tokens; raise it, or lower "
            "--max-model-len",
        )
        return found
