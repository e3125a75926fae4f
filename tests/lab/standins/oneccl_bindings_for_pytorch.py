"""Stand-in for Intel's oneCCL bindings: registers their backend's name for gloo.

Intel's bindings need Intel's own torch; there is no build for the torch under test.
"""

import torch.distributed as dist

cwd = __file__.rpartition("/")[0]


def _on_gloo(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)


dist.Backend.register_backend("ccl", _on_gloo, devices=["cpu"])
