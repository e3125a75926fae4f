"""A certificate that is made for one run, by openssl."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.spec.errors import SettingError

_CONFIG = "[req]\ndistinguished_name = name\nprompt = no\n[name]\nCN = paceline\n"
_TIMEOUT_S = 20.0


def make_certificate() -> tuple[str, str]:
    """Returns a new certificate and its private key, in PEM.

    Raises SettingError if there is no ``openssl`` to make one, or it cannot.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-tls-") as folder:
        config, key, certificate = (Path(folder, name) for name in ("config", "key", "certificate"))
        config.write_text(_CONFIG, encoding="ascii")
        argv = [
            _openssl(), "req", "-x509", "-config", str(config), "-newkey", "ec",
            "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30",
            "-keyout", str(key), "-out", str(certificate),
        ]  # fmt: skip
        process = subprocess.run(
            argv, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if process.returncode:
            raise SettingError(
                "openssl could not make a certificate for the connections of this run",
                found=process.stderr.strip(), remedy=f"Try: {argv[0]} version", exit_code=1,
            )  # fmt: skip
        return certificate.read_text(encoding="ascii"), key.read_text(encoding="ascii")


def _openssl() -> str:
    python_folder = str(Path(sys.executable).parent)  # conda's openssl is there
    search_path = os.pathsep.join([os.environ.get("PATH", ""), python_folder])
    openssl = shutil.which("openssl", path=search_path)
    if openssl is None:
        raise SettingError(
            "the connections of this run use TLS, and there is no openssl to make a certificate",
            found="no openssl on PATH",
            remedy="Install it (Debian: sudo apt-get install openssl), or start over SSH without"
            " --encrypt",
        )
    return openssl
