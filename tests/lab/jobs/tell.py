"""Prints its arguments and variables (as hexadecimal bytes) and its rank variables as JSON."""

import json
import os
import sys
from pathlib import Path

PLACE = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
         "MASTER_PORT", "PACELINE_ATTEMPT", "PACELINE_HOST", "OMP_NUM_THREADS"]  # fmt: skip
print(
    json.dumps(
        {
            "argv": [os.fsencode(word).hex() for word in sys.argv[1:]],
            "env": {k: os.fsencode(v).hex() for k, v in os.environ.items() if k.startswith("T_")},
            "place": {name: os.environ.get(name) for name in PLACE},
            "cwd": str(Path.cwd()),
            "file": __file__,
            "name": __name__,
            "path0": sys.path[0],
            "cpus": sorted(os.sched_getaffinity(0)),
        }
    )
)
