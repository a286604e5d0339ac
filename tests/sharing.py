"""More ranks than GPUs, a few on each: what they compute is as it would be on as many, and tells nothing of their
memory, of time, or of how words travel between them.

A GPU runs its ranks' kernels in turns of some milliseconds, and a kernel that waits for another rank's takes all of its
own: counts are kept small. Words travel through sockets, as each rank is told that it has a host of its own, since NCCL
refuses two ranks of one host on one GPU.
"""

from __future__ import annotations

import os
import sys

CHANNELS = 16  # of NCCL, a thread block each, that the ranks of a GPU have together
KV_CACHE_TOKENS = 1 << 16  # of each process that would plan it from memory which the others take too
# After torchrun's own words, and before those that Python is given for a rank.
AS_RANK = ["--no-python", "sh", "-c", 'NCCL_HOSTID=rank-$RANK exec "$@"', "rank", sys.executable]
WHERE = "ranks share GPUs"  # what results of such ranks say of where they are from


def on_shared_gpus(ranks: int, gpus: int) -> dict[str, str]:
    """Variables with which so many ranks have a GPU each in turn (`machine.restrict_to_local_gpu`), of those that there
    are."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = given.split(",") if given else [str(gpu) for gpu in range(gpus)]
    own = [visible[rank % len(visible)] for rank in range(ranks)]
    few = {"NCCL_MAX_CTAS": str(max(1, CHANNELS * len(visible) // ranks))}
    sockets = {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "4"}
    return {"CUDA_VISIBLE_DEVICES": ",".join(own), **few, **sockets}
