"""Triton kernels behind the operators. Imported by the operators when they first run on a GPU, never before.

Two rules keep the bits apart from the batch. A reduction's order follows the tile's shape, the number of warps and the
loads' alignment, so all three are functions of the model's sizes alone. Multiplications and additions are fused only
where `tl.fma` says so (`enable_fp_fusion=False`), so the compiler has nothing left to choose.
"""
