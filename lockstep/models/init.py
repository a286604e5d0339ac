"""Random-weight models of named architectures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..config.random_weights import MARK
from ..errors import InputError, did_you_mean_note, refuse
from .checks import require_memory
from .config import ModelConfig
from .decoder import Decoder, num_parameters
from .families import FAMILIES
from .hf.export import empty_on_error, save_model
from .hf.weight_map import require_all_stored
from .parts import Ranges, TensorRange, ranges_of, tensors_of

INITIALIZER_RANGE = 0.02


def _architectures() -> dict[str, ModelConfig]:
    """Those of all families, of which some may have been added since the import; tiny ones first."""
    found = {name: config for family in FAMILIES.values() for name, config in family.architectures.items()}
    return dict(sorted(found.items(), key=lambda item: not item[0].startswith("tiny")))


ARCHITECTURES = _architectures()  # the shipped ones


def architecture(name: str) -> ModelConfig:
    """The configuration of this name; `InputError` lists the names if it is unknown."""
    known = _architectures() | ARCHITECTURES
    if name not in known:
        note = did_you_mean_note(name, known)
        raise InputError(f"arch {name!r} is unknown{note}; choose from {', '.join(known)}")
    return known[name]


class RandomWeights:
    """A `WeightSource` of random weights: N(0, `INITIALIZER_RANGE`), except for `Decoder.init_constants`. They do not
    depend on the device or mesh: each tensor is drawn whole, one at a time. `InputError`: a folder could not have all
    of them."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config, self._seed = config, seed

    @torch.no_grad()
    def fill(self, wanted: Ranges) -> None:
        generator, model = torch.Generator().manual_seed(self._seed), Decoder(self.config, torch.float32, "meta")
        require_all_stored(self.config, tensors_of(model))
        for name, parameter in model.named_parameters():
            if (value := model.init_constants.get(name)) is not None:
                for values, _ in wanted.get(name, ()):
                    values.fill_(value)
            else:
                _fill_normal(parameter.numel(), generator, wanted.get(name, ()))


def _fill_normal(size: int, generator: torch.Generator, wanted: Sequence[TensorRange]) -> None:
    drawn = torch.empty(size).normal_(0, INITIALIZER_RANGE, generator=generator)
    for values, first in wanted:
        values.copy_(drawn[first : first + values.numel()])


def initialize(model: Decoder, seed: int) -> Decoder:
    RandomWeights(model.config, seed).fill(ranges_of(model))
    return model


def init_folder(arch: str, out: Path, seed: int, tokenizer: str | None = None, vocab_size: int | None = None) -> dict:
    """Write the Hugging Face folder of a random model (bfloat16; float32 for tiny ones), marked as random for recipes,
    with the tokenizer of another folder or a byte-level one. `vocab_size` overrides the architecture's. Returns the
    summary that the command prints."""
    from .tokenizer import byte_tokenizer, check_vocabulary, load_tokenizer, save_tokenizer

    config = architecture(arch)
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out}: {'not empty' if out.is_dir() else 'a file'}; name a new folder")
    refuse(not 0 <= seed < 2**63, f"--seed is {seed}; it must be between 0 and {2**63 - 1}")
    config = replace(config, vocab_size=config.vocab_size if vocab_size is None else vocab_size)
    tok: Any = load_tokenizer(Path(tokenizer)) if tokenizer else byte_tokenizer()
    check_vocabulary(tok, config.vocab_size, f"arch {arch}", with_added=True)
    ends = () if tok.eos_token_id is None else (tok.eos_token_id,)
    config = replace(config, eos_token_ids=ends, pad_token_id=tok.pad_token_id)
    dtype = torch.float32 if arch.startswith("tiny") else torch.bfloat16
    require_memory(config, dtype, "cpu", f"arch {arch}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: the folder cannot be made ({error.strerror}); name another") from error
    model = initialize(Decoder(config, dtype), seed)
    with empty_on_error(out):
        save_model(model, out, metadata=MARK)
        save_tokenizer(tok, out)
    return {
        "arch": arch,
        "out": str(out),
        "parameters": num_parameters(config),
        "vocab_size": config.vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
    }
