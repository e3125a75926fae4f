"""Our code on real shares of SMB and NFS, mounted twice by one kernel: trials, and a training.

The kernel is user-mode Linux (Debian's), for this machine's own may know no such mounts; the
servers are Samba's and the kernel's own. Needs the packages user-mode-linux, samba, cifs-utils and
nfs-kernel-server, and a C compiler.

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

NEEDS = {"cifs": ["smbd", "smbpasswd", "mount.cifs"], "nfs": ["exportfs", "rpc.nfsd", "rpc.mountd"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    machine = platform.processor() or platform.machine()
    lines = [f"# Shares, {datetime.date.today()}", "", machine, ""]
    lines += ["| share | trial | what it said | seconds |", "|---|---|---|---|"]
    for kind, programs in NEEDS.items():
        if reason := uml.missing(programs):
            lines.append(f"| {kind} | not tried | {reason} | |")
            continue
        with tempfile.TemporaryDirectory() as folder:
            said = uml.boot(Path(folder), kind, timeout=400)
        took = dict(re.findall(r"^(\w+): ([0-9.]+) s\r?$", said.pop("all"), re.MULTILINE))
        for trial, found in said.items():
            lines.append(f"| {kind} | {trial} | `{found}` | {took.get(trial, '')} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if out is not None:
        out.write_text(text)


if __name__ == "__main__":
    main()
