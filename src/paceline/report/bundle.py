"""A support bundle: JSON and text files in one archive, secrets blotted out."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import paceline
from paceline.spec.errors import SettingError

_SECRET = re.compile(
    r"(?i)((?:[\w-]*(?:password|passwd|passphrase|secret|token|api[_-]?key|credential)[\w-]*)"
    r"[\"']?\s*[:=]\s*[\"']?)([^\s\"',}]{4,})"
)
_KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}|sk-[A-Za-z0-9_-]{20,})\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)",
    re.DOTALL,
)


def blot(text: str) -> str:
    """The text without what looks like a secret: by the name before it, or by its own shape."""
    return _SECRET.sub(r"\1[secret]", _KNOWN.sub("[secret]", text))


def write(path: Path, contents: Mapping[str, Any]) -> None:
    """Writes the archive, readable by its owner only.

    Args:
        path: Where; ends in ``.tar.gz``.
        contents: File name → text, or a value to be written as JSON.

    Raises:
        SettingError: It cannot be written there.
    """
    about = {"paceline": paceline.__version__, "python": sys.version, "system": platform.platform()}
    folder = path.name.removesuffix(".gz").removesuffix(".tar")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, content in {"about.json": about, **contents}.items():
                _add(archive, f"{folder}/{name}", content)
    except OSError as error:
        raise SettingError(f"cannot write the bundle {path}", found=str(error.strerror)) from None


def _add(archive: tarfile.TarFile, name: str, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content, indent=1)
    data = blot(text).encode()
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o600
    archive.addfile(member, io.BytesIO(data))
