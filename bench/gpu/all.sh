#!/bin/sh
# What NCCL can show with several ranks on one NVIDIA GPU: all.sh OUT [--dry] [PART…]; see all.py.
exec "${PYTHON:-python3}" "$(dirname "$0")/all.py" "$@"
