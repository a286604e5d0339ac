"""Random words and the Gumbel noise that they make, in kernels. Meaning: `ops/logprobs/philox.py`,
`logprobs.reference.draw`."""

from __future__ import annotations

import triton
import triton.language as tl

MAX_UNIFORM = tl.constexpr(1 - 2.0**-24)
LN_2 = tl.constexpr(0.6931471805599453)
BITS_OF_ONE, BITS_OF_2_23 = tl.constexpr(0x3F800000), tl.constexpr(0x4B000000)  # of the float32
MARGIN = tl.constexpr(2.0**-15)


@triton.jit
def philox_words(key_ptr, position, quad):
    """A word a column: column 4 * quad + i has word i of Philox4x32-10 at counter (position, quad, key[2], key[3])."""
    k0, k1 = tl.load(key_ptr).to(tl.uint64), tl.load(key_ptr + 1).to(tl.uint64)
    c2, c3 = tl.load(key_ptr + 2).to(tl.uint32), tl.load(key_ptr + 3).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox((k1 << 32) | k0, position.to(tl.uint32), quad.to(tl.uint32), c2, c3)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def gumbel(words):
    """Standard Gumbel noise of uniform 32-bit words: -log(e) of e = -log1p(-u), which is -log(1 - u) corrected for the
    rounding of 1 - u (Goldberg 1991, "What every computer scientist should know about floating-point", theorem 4)."""
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * 2.0**-32, MAX_UNIFORM)
    rest = 1.0 - uniform
    exponential = tl.where(rest == 1.0, uniform, -tl.log(rest) * tl.div_rn(uniform, 1.0 - rest))
    return -tl.log(exponential)


@triton.jit
def gumbel_bound(words):
    """No less than `gumbel` of the same words, at most 0.07 more for words from 2**16 on, and cheap.

    -log1p(-u) is no less than u, and log2(u) no less than u's exponent plus its fraction, which are its bits. The low
    bits of u are left out, which makes it less. `MARGIN` is more than all rounding errors.
    """
    below = (words.to(tl.uint32, bitcast=True) >> 9 | BITS_OF_ONE).to(tl.float32, bitcast=True) - 1.0
    bits = below.to(tl.uint32, bitcast=True) >> 7 | BITS_OF_2_23  # an integer without a conversion
    return tl.fma(bits.to(tl.float32, bitcast=True), -LN_2 * 2.0**-16, LN_2 * 255 + MARGIN)
