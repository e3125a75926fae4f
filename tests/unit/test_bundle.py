"""Tests that support bundles contain no secrets and replace no other files."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest

from each_case import each_case
from paceline.report.bundle import redact, write
from paceline.spec.errors import SettingError

HEX = "0123456789abcdef" * 3
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSMeKKF2QT4fwpMeJf36POk6yJV"


@each_case(
    ("text", "secret"),
    [
        ("train.py --password hunter2 --lr 0.1", "hunter2"),
        ("--password x", " x"),
        ("--wandb-api-key=abcdef", "abcdef"),
        ('"args": ["--hub-token", "abc123", "--lr", "1"]', "abc123"),
        (json.dumps({"args": ["--db_password", "pw-1"]}, indent=2), "pw-1"),
        ("DB_PASSWORD=geheim", "geheim"),
        ('"api_key": "k-1"', "k-1"),
        ("Authorization: Bearer abc.def-ghi", "abc.def-ghi"),
        ("authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
        ("curl -H 'Authorization: token 123456789'", "123456789"),
        (f"got {JWT} back", "eyJ"),
        (f"key hf_{HEX[:34]}", "hf_0"),
        (f"ghp_{HEX[:36]} and github_pat_{HEX}", "0123456789ab"),
        (f"glpat-{HEX[:20]}", "0123456789ab"),
        (f"sk-proj-{HEX} sk_live_{HEX}", "0123456789ab"),
        (f"xoxb-{HEX}", "0123456789ab"),
        (f"AIza{HEX[:35]}", "0123456789ab"),
        (f"nvapi-{HEX} npm_{HEX} pypi-{HEX}", "0123456789ab"),
        ("AKIAIOSFODNN7EXAMPLE", "IOSFODNN7"),
        ("https://user:pass@host/x", "pass"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n-----END OPENSSH PRIVATE KEY-----\n", "abc"),
        ("-----BEGIN PRIVATE KEY-----\nabc, cut off", "abc"),
    ],
)
def test_redacts_secrets(text: str, secret: str) -> None:
    assert secret not in redact(text)
    assert "[secret]" in redact(text)


@pytest.mark.parametrize(
    "text",
    ["loss 0.31 at step 12", "tokenizer: bert-base", "samples 812", "File \"a.py\", line 3, in f",
     "https://download.pytorch.org/whl"],
)  # fmt: skip
def test_redact_keeps_ordinary_text(text: str) -> None:
    assert redact(text) == text


@each_case(
    "part",
    ["passwd", "-", "a-", "--password ", "token=", "eyJ", "-eyJa.", "://", "://a:", "hf_", "sk-",
     "bearer ", "authorization: x ", "-----BEGIN PRIVATE KEY-----", "AIza", '"secret" ', "--a-"],
)  # fmt: skip
def test_redact_is_fast_on_hostile_text(part: str) -> None:
    start = time.monotonic()
    redact(part * (200_000 // len(part)))
    assert time.monotonic() - start < 20


def test_bundle_is_not_written_through_hard_link(tmp_path: Path) -> None:
    bundle, foreign_file = tmp_path / "b.tgz", tmp_path / "theirs"
    foreign_file.touch()
    bundle.hardlink_to(foreign_file)
    bundle.chmod(0o666)
    write(bundle, {"log.txt": "of the run"})
    assert foreign_file.read_bytes() == b""
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.tgz", "theirs"]


def test_bundle_does_not_replace_fifo(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(SettingError, match="cannot write the bundle"):
        write(path, {})
    assert path.is_fifo()
