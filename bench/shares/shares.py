"""Trials and a training of Paceline on real SMB and NFS shares that one kernel mounts twice.

The kernel is Debian's user-mode Linux, because this machine's kernel may not support these mounts.
The servers are Samba and the kernel's NFS server. Needs the packages user-mode-linux, samba,
cifs-utils and nfs-kernel-server, and a C compiler.

    python bench/shares/shares.py [--out FILE]
"""

from __future__ import annotations

import argparse
import datetime
import platform
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "lab"))
import uml

PROGRAMS = {
    "cifs": ["smbd", "smbpasswd", "mount.cifs"],
    "nfs": ["exportfs", "rpc.nfsd", "rpc.mountd"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    machine = platform.processor() or platform.machine()
    lines = [f"# Shares, {datetime.date.today()}", "", machine, ""]
    lines += ["| share | trial | output | seconds |", "|---|---|---|---|"]
    for kind, programs in PROGRAMS.items():
        if reason := uml.missing(programs):
            lines.append(f"| {kind} | not tried | {reason} | |")
            continue
        with tempfile.TemporaryDirectory() as folder:
            outputs = uml.boot(Path(folder), kind, timeout=400)
        seconds = dict(re.findall(r"^(\w+): ([0-9.]+) s\r?$", outputs.pop("all"), re.MULTILINE))
        for trial, output in outputs.items():
            lines.append(f"| {kind} | {trial} | `{output}` | {seconds.get(trial, '')} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if out is not None:
        out.write_text(text)


if __name__ == "__main__":
    main()
