"""Writes support bundles: JSON and text files in one archive, with secrets redacted."""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import re
import secrets
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import paceline
from paceline.spec.errors import SettingError

# Not a scanner such as detect-secrets, which reports places in files for review and needs an HTTP
# client and a YAML parser. Every repetition below is bounded, so that the time is linear.
_NAME = (
    r"(?:passw(?:or)?d|passphrase|passwd|pwd|secret|token(?!iz)|api[_-]?key|access[_-]?key"
    r"|private[_-]?key|auth[_-]?key|credential)"
)
_ASSIGNMENT = re.compile(
    rf"(?i)({_NAME}[\w-]{{0,60}}[\"']?\s{{0,9}}[:=]\s{{0,9}}[\"']?)([^\s\"',}}]{{1,9999}})"
)
# --password x, also as two elements of a list
_OPTION = re.compile(
    rf"(?i)(--?(?:[a-z0-9]{{1,20}}[_-]){{0,5}}{_NAME}[\w-]{{0,60}}"
    r"(?:[ \t]{1,9}[\"']?|[\"'],\s{0,60}[\"']))([^\s\"',}-][^\s\"',}]{0,9999})"
)
_HEADER = re.compile(r"(?i)(\b(?:bearer|authorization:? {1,3}\w{1,20}) {1,9})([\w.~+/=-]{4,9999})")
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,200}|gh[pousr]_[A-Za-z0-9]{20,255}|github_pat_\w{20,255}"
    r"|glpat-[\w-]{20,255}|(?:AKIA|ASIA)[0-9A-Z]{16}|[sr]k[-_][\w-]{20,255}|xox[abeoprs]-[\w-]{10,255}"
    r"|AIza[\w-]{35}|ya29\.[\w-]{20,999}|npm_[A-Za-z0-9]{30,99}|pypi-[\w-]{40,999}|nvapi-[\w-]{20,255}"
    r"|dop_v1_[0-9a-f]{30,99}|SG\.[\w-]{16,99}\.[\w-]{16,99}"
    r"|eyJ[\w-]{5,4000}\.[\w-]{5,4000}(?:\.[\w-]{0,4000})?)"
    r"|(?<=://)[^/\s:@]{0,200}:[^/\s@]{1,500}(?=@)"
)
_KEY_HEADER = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----")
_KEY_FOOTER = re.compile(r"-----END [A-Z ]{0,40}PRIVATE KEY-----")
REDACTED = "[secret]"


def redact(text: str) -> str:
    """Redacts what looks like a secret, by the name before it or by its own format."""
    text = _TOKEN.sub(REDACTED, _redact_keys(text))
    for pattern in (_HEADER, _OPTION, _ASSIGNMENT):
        text = pattern.sub(rf"\1{REDACTED}", text)
    return text


def _redact_keys(text: str) -> str:
    """Redacts private keys; one without an end is redacted to the end of the text."""
    parts, position = [], 0
    while header := _KEY_HEADER.search(text, position):
        footer = _KEY_FOOTER.search(text, header.end())
        parts += [text[position : header.start()], REDACTED]
        position = footer.end() if footer else len(text)
    return "".join([*parts, text[position:]])


def write(path: Path, contents: Mapping[str, Any]) -> None:
    """Writes the archive, readable by its owner only, in place of a file of that name.

    Args:
        contents: By file name, a text or a value that becomes JSON.

    Raises:
        SettingError: It cannot be written there.
    """
    versions = {"paceline": paceline.__version__, "python": sys.version,
                "system": platform.platform()}  # fmt: skip
    folder = path.name.removesuffix(".gz").removesuffix(".tar")
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    if path.exists() and not path.is_file():  # such as /dev/null, which root would replace
        raise SettingError(f"cannot write the bundle {path}", found="it exists and is no file")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, content in {"about.json": versions, **contents}.items():
                _add(archive, f"{folder}/{name}", content)
        temporary.replace(path)
    except OSError as error:
        raise SettingError(f"cannot write the bundle {path}", found=str(error.strerror)) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _add(archive: tarfile.TarFile, name: str, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content, indent=1)
    data = redact(text).encode()
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o600
    archive.addfile(member, io.BytesIO(data))
