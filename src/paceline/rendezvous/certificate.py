"""A certificate for one run: made when the launcher begins to listen, forgotten when it ends.

Nobody vouches for it. The callers prove the run's key over its hash; see ``agent.caller``.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.spec.errors import SettingError

_CONFIG = "[req]\ndistinguished_name = name\nprompt = no\n[name]\nCN = paceline\n"
_PATIENCE_S = 20.0


@functools.cache
def identity() -> tuple[ssl.SSLContext, str]:
    """This process's TLS context as a server, and its certificate's SHA-256 in hexadecimal.

    Raises:
        SettingError: There is no ``openssl`` to make one, or it cannot.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-tls-") as folder:
        key, certificate = _made_in(Path(folder))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(certificate, key)
        der = ssl.PEM_cert_to_DER_cert(certificate.read_text(encoding="ascii"))
    return context, hashlib.sha256(der).hexdigest()


def _made_in(folder: Path) -> tuple[Path, Path]:
    """Private key and certificate, in a folder that only this user can enter."""
    config, key, certificate = (folder / name for name in ("config", "key.pem", "cert.pem"))
    config.write_text(_CONFIG, encoding="ascii")
    argv = [
        _openssl(), "req", "-x509", "-config", str(config), "-newkey", "ec",
        "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30",
        "-keyout", str(key), "-out", str(certificate),
    ]  # fmt: skip
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=_PATIENCE_S,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        raise SettingError(
            "openssl could not make a certificate for the connections of this run",
            found=done.stderr.strip(), remedy=f"Try: {argv[0]} version", exit_code=1,
        )  # fmt: skip
    return key, certificate


def _openssl() -> str:
    beside = str(Path(sys.executable).parent)  # conda has its own there
    found = shutil.which("openssl", path=os.pathsep.join([os.environ.get("PATH", ""), beside]))
    if found is None:
        raise SettingError(
            "agents that call back do so over TLS, and there is no openssl to make a certificate",
            found="no openssl on PATH",
            remedy="Install it (Debian: sudo apt-get install openssl), or start over SSH",
        )
    return found
