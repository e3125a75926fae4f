"""No GPU can be seen.

Meaning: The process asked for a GPU that it cannot see.
Cause: CUDA_VISIBLE_DEVICES hides it, the container was started without GPUs, torch is a CPU
    build, or more processes than GPUs were started.
Confirm: nvidia-smi and python -c 'import torch; print(torch.version.cuda,
    torch.cuda.device_count())' on that host with the job's interpreter.
Remedy: --nproc-per-node = number of GPUs; a CUDA build of torch; in Slurm --gres gpu:N; in
    Docker --gpus all; or --device cpu.
Source: Lightning 8707 and 10098; torch's messages.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "no-gpu",
    __doc__,
    [
        "(?P<words>No CUDA GPUs are available)",
        "(?P<words>Torch not compiled with CUDA enabled)",
        "CUDA error: (?P<words>invalid device ordinal)",
        "(?P<words>no CUDA-capable device is detected)",
    ],
    "{where}: no GPU can be seen ({words})",
    confidence=0.95,
)
