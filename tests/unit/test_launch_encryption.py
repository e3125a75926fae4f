"""Tests which jobs ``--encrypt`` rejects, and the addresses that it gives to hosts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.verbs import env
from paceline.launch.elastic.encryption import JobEncryption
from paceline.launch.planning import encryption
from paceline.spec.errors import SettingError
from paceline.spec.job import Entry, Environment, Job
from paceline.spec.settings import Setting

GPU = {"n1": [], "n2": [{"name": "a GPU"}]}
CPUS: dict[str, list[Any]] = {"n1": [], "n2": []}
UNSUPPORTED = {
    "over NCCL": ({}, True, GPU),
    "--backend ccl has": ({"backend": "ccl"}, True, CPUS),
    "--no-python": ({"entry": Entry("binary", "/bin/true", ())}, True, CPUS),
    "or --no-torch": ({"needs_torch": False}, True, CPUS),
    "PACELINE_STORE=open": (
        {"environment": Environment({"PACELINE_STORE": "open"})}, False, CPUS,
    ),
    "the script opens one": ({}, False, CPUS),
}  # fmt: skip


def job(**fields: Any) -> Job:
    described: dict[str, Any] = {
        "name": "job", "entry": Entry("script", "train.py", ()), "workdir": "/",
        "python": "python3", "encrypt": Setting(True),
    }  # fmt: skip
    return Job(**{**described, **fields})


@pytest.mark.parametrize("found", UNSUPPORTED)
def test_rejects_unsupported_encryption(found: str) -> None:
    fields, closes_store, gpus = UNSUPPORTED[found]
    with pytest.raises(SettingError) as exc_info:
        encryption.check(job(**fields), closes_store, gpus)
    assert found in exc_info.value.found
    encryption.check(job(**fields, encrypt=Setting(False)), closes_store, gpus)


def test_rejects_encryption_under_mpirun(tmp_path: Path) -> None:
    """``mpirun … paceline env`` starts no agents, so nothing could encrypt."""
    environ = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert env.read_place(environ, 1, tmp_path)["RANK"] == "0"
    with pytest.raises(SettingError, match="cannot be encrypted"):
        env.read_place({**environ, env.ENCRYPT: "1"}, 1, tmp_path)
    (tmp_path / "paceline.toml").write_text("[run]\nencrypt = true\n")
    with pytest.raises(SettingError, match="cannot be encrypted") as exc_info:
        env.read_place(environ, 1, tmp_path)
    assert "encrypt in [run] of paceline.toml is set" in exc_info.value.found
    # the environment overrides the file
    assert env.read_place({**environ, env.ENCRYPT: "0"}, 1, tmp_path)["RANK"] == "0"


def test_gloo_on_cpus_is_encrypted() -> None:
    encryption.check(job(), True, CPUS)
    encryption.check(job(backend="gloo"), True, CPUS)


def test_loopback_addresses_are_unique_and_stable() -> None:
    keys = JobEncryption()
    asyncio.run(keys.prepare())
    hosts = [f"n{number}" for number in range(300)]
    found = {host: keys.settings(host, "10.0.0.1")["loopback"] for host in hosts}
    assert len(set(found.values())) == len(hosts)
    assert keys.settings("n7", "10.0.0.2")["loopback"] == found["n7"]
    assert all(address.startswith("127.") for address in found.values())
    assert "BEGIN" in keys.settings("n7", "10.0.0.2")["private_key"]
