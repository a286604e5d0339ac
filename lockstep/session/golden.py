"""Golden words: hashes of what a process's operators give for fixed inputs, which identify its arithmetic.

They say more than a version or the name of a CPU capability: different libraries may compute the same words, and a
setting (`ONEDNN_MAX_CPU_ISA`) may change them while every name stays the same. Inputs are integers times powers of
two, so that making them involves no rounding and depends on no library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..models import Decoder, Masks, ModelConfig, PackedAttention
from ..models.families import family_of
from ..models.init import architecture
from ..ops.linear import choice as linear_choice

GRADIENT_NORM = "gradient norm"  # runs without this word computed the norm by float32 additions
_DECODER = replace(architecture("tiny"), num_layers=2)
_ODD_DECODER = replace(_DECODER, vocab_size=509, hidden_size=131, intermediate_size=395)  # rows with a vector remainder
_ROWS, _DEPTH, _TOKENS = 17, 512, 75  # tokens: two sequences that share a prefix, longer than a tile of keys


def identify_arithmetic(device: torch.device, dtype: torch.dtype, config: ModelConfig) -> dict[str, Any]:
    """What identifies the arithmetic of a process: the build of its C library, and its golden words."""
    return {"c_library": ops.cpu_build(), "words": compute_words(device, dtype, config)}


def compute_words(device: torch.device, dtype: torch.dtype, config: ModelConfig = _DECODER) -> dict[str, str]:
    """A hash for each kind of computation on this device in this compute dtype, 16 hexadecimal digits each. On a CPU,
    where libraries choose their instructions in each process, this includes sampled tokens and gradients of whole
    decoders, among them those that the family of `config` names (`Family.golden`)."""
    used = set(linear_choice.requested)
    with torch.no_grad():
        found = {name: _hash(tensors) for name, tensors in _results(device, dtype)}
        if device.type == "cpu":
            found |= {name: _hash(tensors) for name, tensors in _cpu_results(dtype, config)}
    linear_choice.requested.intersection_update(used)  # forget the kernels used here: the run may not use them
    return found


def _hash(tensors: tuple[Tensor, ...]) -> str:
    data = b"".join(tensor.flatten().cpu().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(data).hexdigest()[:16]


def _results(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    x, weight = (_fixed(n, _DEPTH, seed=n) for n in (_ROWS, 96))
    _make_products_cancel(x, weight)
    x, weight = x.to(device, dtype), weight.to(device, dtype)
    yield "product", (ops.linear(x, weight), ops.linear(x[-1:], weight))
    yield "exp", (ops.silu_mul(_fixed(_ROWS, 2 * _DEPTH, seed=2).to(device, dtype)),)
    yield "norm", (ops.rms_norm(x, _fixed(_DEPTH, seed=3).to(device, dtype), 1e-6),)
    yield "attention", (_attention(device, dtype),)
    yield "AdamW", _adamw_update(device, dtype)
    squares = ops.square_sums(_fixed(5 * ops.SQUARES_BLOCK, seed=101).to(device))
    yield GRADIENT_NORM, (ops.root_of_sum(ops.exact_sum(squares)),)
    found = _score(_fixed_decoder(_DECODER, dtype, device), device)
    yield "log", (found.logprob_C, found.entropy_C)  # with filters: sums and their logarithms
    yield "decoder", (found.model_logprob_C,)


def _cpu_results(dtype: torch.dtype, config: ModelConfig) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    kinds = {"gradients": _ODD_DECODER} | family_of(config).golden_decoders(config, _ODD_DECODER)
    yield "head", _head_gradients(dtype)
    for name, decoder in kinds.items():
        model = _fixed_decoder(decoder, dtype)
        if name == "windows":
            model.masks = Masks(decoder.windows)  # computed by flex, as it was when this word was introduced
        yield name, _gradients(model)
    x = _fixed(_ROWS, 2 * _DEPTH + 5, seed=96)
    yield "sums", (x.sum(), x.sum(-1), x.sum(-1, dtype=torch.float64), x.softmax(-1), x.exp())  # x is always float32
    yield "sample", _sample(dtype)


def _fixed(*shape: int, seed: int) -> Tensor:
    """16-bit numbers between -1 and 1, times powers of two between 1/16 and 8; float32 on the CPU."""
    count = torch.Size(shape).numel()
    mixed = (torch.arange(1, count + 1) + 1_000_003 * seed) * 2_654_435_761  # Knuth's multiplicative hash
    mixed ^= mixed >> 15
    powers = torch.tensor([2.0**power for power in range(-4, 4)])
    return (((mixed >> 3 & 0xFFFF) - 0x8000) / 0x8000 * powers[mixed >> 19 & 7]).view(shape)


def _make_products_cancel(x_RK: Tensor, weight_NK: Tensor) -> None:
    """Make every second row's exact products zero: what is left are rounding errors, so that any change in the order of
    summation shows even in bfloat16."""
    order = torch.arange(_DEPTH) * 197 % _DEPTH  # a permutation, since 197 is odd
    first, second = order[: _DEPTH // 2], order[_DEPTH // 2 :]
    weight_NK[:, second] = weight_NK[:, first]
    x_RK[::2, second] = -x_RK[::2, first]


def _layout(device: torch.device) -> ops.Packed:
    """Two packed sequences; the second begins with the first 5 tokens of the first."""
    numbers = [0, _TOKENS - 9, _TOKENS], [0, 0], [0, 5]
    ends, start, length = (torch.tensor(n, dtype=torch.int32, device=device) for n in numbers)
    return ops.Packed(ends, start, length, max_len=_TOKENS)


def _attention(device: torch.device, dtype: torch.dtype) -> Tensor:
    shapes = {4: (_TOKENS, 4, 32), 5: (_TOKENS, 2, 32), 6: (_TOKENS, 2, 32)}
    q, k, v = (_fixed(*shape, seed=seed).to(device, dtype) for seed, shape in shapes.items())
    return ops.attention_packed(q, k, v, _layout(device))


def _adamw_update(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Sums of squares of gradients (as for clipping), and weights, masters and moments after one update."""
    count = 3 * ops.SQUARES_BLOCK + 5
    grad, master, first, second = (_fixed(count, seed=seed).to(device) for seed in (7, 8, 9, 10))
    second.abs_()
    squares, weights = ops.square_sums(grad), master.to(dtype, copy=True)
    steps = torch.tensor([2.0, 2.0], device=device)
    rate, scale = (torch.tensor(number, device=device) for number in (0.001, 1.75))
    applied = torch.ones((), dtype=torch.bool, device=device)
    settings = ops.AdamWSettings(2 * ops.SQUARES_BLOCK, 0.9, 0.999, 1e-8, 0.01)
    state, step = ops.AdamWState(weights, grad, master, first, second, steps), ops.AdamWStep(rate, scale, applied)
    ops.adamw(state, step, settings)
    return squares, weights, master, first, second


def _gradients(model: Decoder) -> tuple[Tensor, ...]:
    """All parameters' gradients of a weighted sum of exponentials and squares of both log-probabilities, on the CPU."""
    with torch.enable_grad():
        found = _score(model, torch.device("cpu"))
        weights = _fixed(_TOKENS, seed=99)
        terms = torch.exp(found.logprob_C / 16) + torch.square(found.model_logprob_C)
        return torch.autograd.grad((weights * terms).sum(), list(model.parameters()))


def _head_gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Gradients of hidden states and the head, on the CPU. Every hidden state appears twice, with losses of opposite
    sign, so that the head's gradient is rounding errors alone and any change of order shows even in bfloat16."""
    hidden, weight = (_fixed(n, 131, seed=n).to(dtype).requires_grad_() for n in (2 * _ROWS, 257))
    with torch.enable_grad():
        both = torch.cat((hidden, hidden))
        filters = ops.Filters(*(torch.full((4 * _ROWS,), value) for value in (0.7, 0, 1.0, 0.0)))
        found = ops.token_logprobs(both, weight / 16, torch.arange(2 * _ROWS).repeat(2), filters)
        signs = _fixed(2 * _ROWS, seed=100)
        loss = (torch.cat((signs, -signs)) * (found.logprob_C + found.model_logprob_C)).sum()
        return torch.autograd.grad(loss, (both, weight))


def _sample(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Sampled tokens, with and without filters, and their log-probabilities, on the CPU."""
    hidden, weight = _fixed(_ROWS, 131, seed=97).to(dtype), _fixed(509, 131, seed=98).to(dtype) / 16
    keys = torch.tensor([ops.sample_key(7, 0, 3, group, 1) for group in range(_ROWS)])
    temperature, min_p = torch.full((_ROWS,), 1.5), torch.zeros(_ROWS)
    top_k, top_p = torch.arange(_ROWS, dtype=torch.int32) * 20, torch.ones(_ROWS)
    rows = ops.SampleKeys(keys, torch.arange(_ROWS) * 1000), ops.Filters(temperature, top_k, top_p, min_p)
    return ops.sample(hidden, weight, *rows, True, False)  # with filters, not greedy


def _fixed_decoder(config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> Decoder:
    model = Decoder(config, dtype, device)
    for seed, parameter in enumerate(model.parameters(), start=11):
        values = _fixed(*parameter.shape, seed=seed)
        parameter.copy_(1 + values / 16 if parameter.dim() == 1 else values / 16)
    return model


def _score(model: Decoder, device: torch.device) -> ops.TokenLogprobs:
    """Log-probabilities, with filters, of each token's successor in a fixed sequence."""
    tokens = torch.arange(_TOKENS, device=device) * 37 % model.config.vocab_size
    hidden = model(tokens, torch.arange(_TOKENS, device=device), PackedAttention(_layout(device), model.masks))
    temperature, top_p, min_p = (torch.full((_TOKENS,), number, device=device) for number in (0.7, 0.9, 0.01))
    top_k = torch.full((_TOKENS,), 50, dtype=torch.int32, device=device)
    filters = ops.Filters(temperature, top_k, top_p, min_p)
    return ops.token_logprobs(hidden, model.lm_head, tokens.roll(-1), filters, truncated=True)
