"""Words of fixed computations: the same for the same arithmetic, others for any other."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from c_library import using
from processes import finished

from lockstep import ops
from lockstep.models.init import architecture
from lockstep.ops.activation import operator as activation
from lockstep.ops.linear import choice as linear_choice
from lockstep.ops.logprobs import operator as logprobs
from lockstep.ops.logprobs import philox
from lockstep.run import resume
from lockstep.session import golden

CPU = torch.device("cpu")
KINDS = ["product", "exp", "norm", "attention", "AdamW", golden.GRADIENT_NORM, "log", "decoder"]
KINDS += ["head", "gradients", "sums", "sample"]


def test_families_whose_layers_have_windows_have_words() -> None:
    more = golden.compute_words(CPU, torch.float32, architecture("tiny-gpt-oss")).keys() - set(KINDS)
    assert more == {"layers"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_words_are_a_function_of_the_arithmetic(dtype: torch.dtype) -> None:
    first = golden.compute_words(CPU, dtype)
    state, used = torch.get_rng_state(), set(linear_choice.requested)
    began = time.thread_time()
    assert golden.compute_words(CPU, dtype) == first and list(first) == KINDS
    assert time.thread_time() - began < 1 and linear_choice.requested == used
    assert torch.equal(torch.get_rng_state(), state)
    assert len(set(first.values())) == len(KINDS)
    with using(None):
        other = golden.compute_words(CPU, dtype)
    computed_in_c = {
        torch.float32: set(KINDS) - {"AdamW", golden.GRADIENT_NORM, "sums"},
        torch.bfloat16: {"log", "decoder", "head", "sample"},
    }[dtype]
    differ = {kind for kind in KINDS if other[kind] != first[kind]}
    assert differ == (computed_in_c if ops.cpu_backend() == "native" else set())


def test_a_decoder_with_other_blocks_has_words_of_them() -> None:
    some = [("experts", "tiny-qwen3-moe", {}), ("latent", "tiny-deepseek-v3", {"moe": None})]
    some.append(("windows", "tiny", {"sliding_window": 20, "sliding_layers": (1,)}))
    odd = {name: replace(architecture(arch), **changes) for name, arch, changes in some}
    found = {name: golden.compute_words(CPU, torch.float32, config) for name, config in odd.items()}
    assert {name: list(words)[len(KINDS) - 2 : -2] for name, words in found.items()} == {name: [name] for name in odd}
    assert len({words[name] for name, words in found.items()}) == 3


def test_a_step_whose_backward_pass_is_another_has_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    before = golden.compute_words(CPU, torch.float32)
    backward = activation.silu_mul_backward
    monkeypatch.setattr(activation, "silu_mul_backward", lambda *args: backward(*args) * 1.001)
    after = golden.compute_words(CPU, torch.float32)
    assert [kind for kind in KINDS if after[kind] != before[kind]] == ["gradients"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_added_up_in_another_order_has_other_words(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """In bfloat16 too, which rounds most of what an order changes away."""
    before = golden.compute_words(CPU, dtype)
    matmul = logprobs.matmul
    monkeypatch.setattr(logprobs, "matmul", lambda a, b: matmul(a.flip(1), b.flip(0)))
    after = golden.compute_words(CPU, dtype)
    assert "head" in [kind for kind in KINDS if after[kind] != before[kind]]


def test_tokens_from_other_random_numbers_have_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with using(None):
        before = golden.compute_words(CPU, torch.float32)
        monkeypatch.setattr(philox, "ROUNDS", 9)
        after = golden.compute_words(CPU, torch.float32)
    assert [kind for kind in KINDS if after[kind] != before[kind]] == ["sample"]


def off_by_one_word(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator with the lowest bit of its first element turned."""

    def turned(*args: Any, **options: Any) -> Any:
        result = operator(*args, **options)
        result.data.view(-1)[:1].view(torch.uint8)[0] ^= 1
        return result

    return turned


@pytest.mark.parametrize(
    ("name", "changed"),
    [("linear", "product"), ("silu_mul", "exp"), ("rms_norm", "norm"), ("attention_packed", "attention")]
    + [("square_sums", "AdamW"), ("root_of_sum", golden.GRADIENT_NORM)],
)
def test_a_bit_of_an_operator_is_seen_under_its_name(name: str, changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = golden.compute_words(CPU, torch.float32)
    monkeypatch.setattr(ops, name, off_by_one_word(getattr(ops, name)))
    after = golden.compute_words(CPU, torch.float32)
    assert changed in [kind for kind in KINDS if after[kind] != before[kind]]
    assert before["log"] == after["log"] or name in ("rms_norm", "attention_packed")


def test_fixed_numbers_are_exact() -> None:
    """Made of whole numbers: in bfloat16 or float32 on any machine the same."""
    x = golden._fixed(40, 50, seed=3)
    assert (x * 2**19).frac().count_nonzero() == 0 and x.abs().max() <= 8
    assert x[0, :3].tolist() == [float.fromhex(text) for text in ("-0x1.2e2cp+2", "-0x1.8f6cp-5", "-0x1.e018p-5")]
    assert x.unique().numel() > 1900 and 0.4 < (x > 0).float().mean() < 0.6


_WORDS = """
import hashlib, torch
from lockstep.session import golden; from lockstep import graph, ops  # graph: operators need no torch._dynamo then
def said(*tensors):
    return hashlib.sha256(b"".join(x.contiguous().numpy().tobytes() for x in tensors)).hexdigest()
torch.manual_seed(0)
x, w = torch.randn(16, 512).bfloat16(), torch.randn(512, 512).bfloat16()
w[:, ::2], x[:, ::2] = w[:, 1::2], -x[:, 1::2]
cpu, y = torch.device("cpu"), torch.randn(8, 250, 250)
print(torch.backends.cpu.get_cpu_capability())
print(said(ops.linear(x, w).view(torch.int16)), golden.compute_words(cpu, torch.bfloat16)["product"])
print(said(torch.bmm(y, y.transpose(1, 2)), y.sum(-1)), golden.compute_words(cpu, torch.float32)["gradients"])
"""


@cache
def told(setting: str) -> list[list[str]]:
    """Of a process with this in its environment: the CPU's capability; a product and its words; sums and theirs."""
    done = finished([sys.executable, "-c", _WORDS], env=os.environ | dict([setting.split("=")]))
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_a_library_told_to_use_other_instructions_is_seen() -> None:
    """At the same name of the CPU's capability."""
    capability, (product, words), _ = told("NOTHING=1")
    other_capability, (other_product, other_words), _ = told("ONEDNN_MAX_CPU_ISA=AVX2")
    assert other_capability == capability
    if other_product != product:  # where the CPU has such instructions
        assert other_words != words


@pytest.mark.parametrize("setting", ["ATEN_CPU_CAPABILITY=avx2", "MKL_CBWR=COMPATIBLE"])
def test_a_library_told_to_differentiate_by_other_instructions_is_seen(setting: str) -> None:
    (sums, words), (other_sums, other_words) = told("NOTHING=1")[2], told(setting)[2]
    if other_sums != sums:  # where the CPU has other instructions
        assert other_words != words


THEN = {"torch": "2.12", "dtype": "torch.float32", "device": "AVX2", "operators": "native", "threads": 1}
WORDS = {"product": "a", "exp": "b"}


@pytest.mark.parametrize(
    ("then", "now", "changed"),
    [
        ({}, {"torch": "2.13", "device": "AVX512"}, []),
        ({}, {"words": {**WORDS, "exp": "c"}}, ["exp of fixed numbers has other words (the versions are the same)"]),
        (
            {},
            {"words": {"product": "x", "exp": "c"}, "torch": "2.13"},
            ["product, exp of fixed numbers have other words (torch was '2.12' and is '2.13')"],
        ),
        ({}, {"words": WORDS | {"gradients": "d"}}, []),  # an earlier version's checkpoint
        ({}, {"threads": 2}, ["threads was 1 and is 2"]),
        ({"operators": "cuda"}, {"operators": "cuda", "device": "H100"}, ["device was 'AVX2' and is 'H100'"]),
        ({"words": None}, {"torch": "2.13"}, ["torch was '2.12' and is '2.13'"]),
        ({"words": None}, {"device": "AVX512", "c_library": "d"}, ["device was 'AVX2' and is 'AVX512'"]),
        ({"words": None}, {}, []),
    ],
)
def test_what_keeps_a_run_from_going_on(then: dict, now: dict, changed: list[str]) -> None:
    before: dict[str, Any] = {**THEN, "c_library": "c", "words": WORDS} | then
    if before["words"] is None:  # of an earlier version
        del before["words"], before["c_library"]
    assert resume.describe_other_numerics(before, {**THEN, "c_library": "c", "words": WORDS} | now) == changed
