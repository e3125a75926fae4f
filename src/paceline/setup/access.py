"""Gains access to all hosts: checks logins, pins host keys, installs and revokes our key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from paceline.remote.login import MAX_PARALLEL_LOGINS, effective_config, fetch_host_key
from paceline.remote.openssh import Refusal, SshOptions
from paceline.setup import keys
from paceline.setup.journal import Change, Journal, write_file
from paceline.setup.login import PasswordServer, newly_pinned_key, run_on_host
from paceline.spec.hosts import Host

State = Literal["works", "unpinned", "no key", "refused"]
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class AccessStatus:
    """Whether a host accepts our login.

    Attributes:
        state: ``works``: login succeeds. ``unpinned``: its host key is not known yet.
            ``no key``: it does not accept our key. ``refused``: anything that setup cannot fix.
        fingerprint: Fingerprint of the host key, if it is unpinned.
        refusal: Why ssh failed, unless it works.
    """

    host: Host
    state: State
    fingerprint: str = ""
    refusal: Refusal | None = None


_STATES: dict[str, State] = {"host key not known": "unpinned", "login refused": "no key",
                             "too many keys offered": "no key"}  # fmt: skip


async def check_access(hosts: Sequence[Host], options: SshOptions) -> list[AccessStatus]:
    """Tries to log in everywhere, without prompts."""
    gate = asyncio.Semaphore(MAX_PARALLEL_LOGINS)

    async def check_one(host: Host) -> AccessStatus:
        async with gate:
            return await _check_host(host, options)

    return list(await asyncio.gather(*(check_one(host) for host in hosts)))


async def _check_host(host: Host, options: SshOptions) -> AccessStatus:
    if host.local:
        return AccessStatus(host, "works")
    answer = await run_on_host(host, options, ["true"])
    if answer.refusal is None:
        return AccessStatus(host, "works")
    state = _STATES.get(answer.refusal.cause, "refused")
    if state != "unpinned":
        return AccessStatus(host, state, refusal=answer.refusal)
    fingerprint = await fetch_host_key(host, options)
    state = "unpinned" if fingerprint else "refused"
    return AccessStatus(host, state, fingerprint or "", answer.refusal)


async def pin_host_keys(statuses: Sequence[AccessStatus], options: SshOptions,
                        journal: Journal) -> list[str]:  # fmt: skip
    """Pins the host keys that were shown; returns a message for each that differs.

    Runs one by one, because ssh writes the file and each change is recorded.
    """
    mismatches = []
    accepting = replace(options, accept_new_host_keys=True)
    for status in statuses:
        config = await effective_config(status.host, options)
        files = (config.get("userknownhostsfile") or ["~/.ssh/known_hosts"])[0].split()
        file = Path(files[0]).expanduser()
        previous = file.read_bytes() if file.exists() else None
        answer = await run_on_host(status.host, accepting, ["true"])
        current = file.read_bytes() if file.exists() else None
        if current is not None and current != previous:
            _record_pin(journal, file, previous, current)
        pinned = newly_pinned_key(answer)
        if pinned != status.fingerprint:
            later = pinned or "nothing"
            mismatches.append(f"{status.host.name} showed {status.fingerprint}, then {later}")
    return mismatches


def _record_pin(journal: Journal, file: Path, previous: bytes | None, current: bytes) -> None:
    """Restores the file and writes it again through the journal, which records the change."""
    previous_lines = set((previous or b"").splitlines())
    added = tuple(line.decode() for line in current.splitlines() if line not in previous_lines)
    if previous is None:
        file.unlink()
    else:
        file.write_bytes(previous)
    write_file(journal, file, current, 0o600, added)


async def install_keys(statuses: Sequence[AccessStatus], options: SshOptions, public: str,
                       passwords: PasswordServer, journal: Journal,
                       report: Report) -> dict[str, str]:  # fmt: skip
    """Installs the public key on hosts that lack it; returns why it failed, by host."""
    gate = asyncio.Semaphore(MAX_PARALLEL_LOGINS)
    failures: dict[str, str] = {}
    script = keys.install_script(public)

    async def install_one(host: Host) -> None:
        async with gate:
            failure = await _install_key(host, options, script, public, passwords, journal)
        report(f"{host.name}: {failure or 'key installed'}")
        if failure:
            failures[host.name] = failure

    await asyncio.gather(*(install_one(item.host) for item in statuses))
    return failures


async def _install_key(host: Host, options: SshOptions, script: str, public: str,
                       passwords: PasswordServer, journal: Journal) -> str:  # fmt: skip
    answer = await run_on_host(host, options, ["/bin/sh", "-s"], script, passwords.environment())
    if answer.refusal is not None:
        if answer.refusal.cause == "login refused":
            return "the password was refused"
        return f"{answer.refusal.cause}: {answer.refusal.details.splitlines()[-1]}"
    report = keys.read_report(answer.output)
    if report.failed:
        return report.failed
    if report.changed:
        journal.add(keys.change_record(host.name, public, report))
    return ""


async def revoke_keys(changes: Sequence[Change], hosts: Mapping[str, Host], options: SshOptions,
                      journal: Journal, report: Report) -> bool:  # fmt: skip
    """Undoes changes on other hosts; returns whether all of them are undone."""
    is_complete = True
    for change in changes:
        host = hosts.get(change.host)
        if host is None:
            report(f"{change.host}: not among the hosts: give the same -H as for setup")
            is_complete = False
            continue
        answer = await run_on_host(host, options, ["/bin/sh", "-s"], keys.revoke_script(change))
        if "paceline done" in answer.output:
            journal.forget(change)
            report(f"{host.name}: key taken away")
        else:
            error = (answer.refusal.details if answer.refusal else answer.messages).strip()
            report(f"{host.name}: {error.splitlines()[-1] if error else 'no answer'}")
            is_complete = False
    return is_complete
