#!/bin/sh
# The first process of the small kernel: what it writes to is in memory, the rest is the host's, to read.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
HOME=/run TMPDIR=/mnt PYTHONPATH=@SOURCE@ PYTHONDONTWRITEBYTECODE=1
export PATH HOME TMPDIR PYTHONPATH PYTHONDONTWRITEBYTECODE
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /run
mount -t tmpfs tmp /mnt
@PYTHON@ @INSIDE@ @WORDS@ 2>&1
@PYTHON@ -c 'import ctypes; ctypes.CDLL(None).syscall(169, 0xFEE1DEAD, 672274793, 0x4321FEDC, 0)'
