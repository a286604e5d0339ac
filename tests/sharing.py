"""Several ranks on one GPU, where there are not as many: what they compute is as it would be on several, and tells
nothing of a second GPU, of time, or of how words travel between two.

The GPU runs their kernels in turns of some milliseconds, and a kernel that waits for another rank's takes all of its
own: counts are kept small.
"""

from __future__ import annotations

import os

CHANNELS = 16  # of NCCL, a thread block each, that all of them have together
KV_CACHE_TOKENS = 1 << 16  # of each process that would plan it from memory which the others take too
WHERE = "ranks share one GPU"  # what results of such ranks say of where they are from


def on_one_gpu(ranks: int) -> dict[str, str]:
    """Variables with which so many ranks have the first GPU each (`machine.restrict_to_local_gpu`), and NCCL (2.30 on)
    lets them."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    few = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": str(max(1, CHANNELS // ranks))}
    return {"CUDA_VISIBLE_DEVICES": ",".join([first] * ranks), **few}
