"""Letting ourselves in everywhere: look, decide, do, look again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from paceline.remote.channel import LOGINS_AT_ONCE, show_host_key
from paceline.remote.openssh import Refusal, SshOptions
from paceline.setup import keys
from paceline.setup.journal import Change, Journal, write_file
from paceline.setup.login import Passwords, effective, newly_pinned_key, run
from paceline.spec.hosts import Host

State = Literal["works", "unpinned", "no key", "refused"]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Look:
    """How a host stands towards us.

    Attributes:
        host: Which.
        state: ``works``: we log in. ``unpinned``: its host key is not known yet. ``no key``: it
            does not take ours. ``refused``: anything that setup cannot mend.
        fingerprint: The key it shows, when unpinned.
        refusal: What ssh said, unless it works.
    """

    host: Host
    state: State
    fingerprint: str = ""
    refusal: Refusal | None = None


_STATES: dict[str, State] = {"host key not known": "unpinned", "login refused": "no key",
                             "too many keys offered": "no key"}  # fmt: skip


async def look(hosts: Sequence[Host], options: SshOptions) -> list[Look]:
    """Tries to log in everywhere, without asking anybody anything."""
    gate = asyncio.Semaphore(LOGINS_AT_ONCE)

    async def one(host: Host) -> Look:
        async with gate:
            return await _look(host, options)

    return list(await asyncio.gather(*(one(host) for host in hosts)))


async def _look(host: Host, options: SshOptions) -> Look:
    if host.local:
        return Look(host, "works")
    answer = await run(host, options, ["true"])
    if answer.refusal is None:
        return Look(host, "works")
    state = _STATES.get(answer.refusal.cause, "refused")
    if state != "unpinned":
        return Look(host, state, refusal=answer.refusal)
    shown = await show_host_key(host, options)
    return Look(host, "unpinned" if shown else "refused", shown or "", answer.refusal)


async def pin(looks: Sequence[Look], options: SshOptions, journal: Journal) -> list[str]:
    """Pins the keys that were shown; returns what did not go as shown.

    One after the other: ssh writes the file, and each change is written down.
    """
    wrong = []
    accepting = replace(options, accept_new_host_keys=True)
    for one in looks:
        file = await known_hosts_file(one.host, options)
        before = file.read_bytes() if file.exists() else None
        answer = await run(one.host, accepting, ["true"])
        after = file.read_bytes() if file.exists() else None
        if after is not None and after != before:
            _write_down(journal, file, before, after)
        pinned = newly_pinned_key(answer)
        if pinned != one.fingerprint:
            wrong.append(f"{one.host.name} showed {one.fingerprint}, then {pinned or 'nothing'}")
    return wrong


async def known_hosts_file(host: Host, options: SshOptions) -> Path:
    """Where ssh pins the keys of this host."""
    config = await effective(host, options)
    files = (config.get("userknownhostsfile") or ["~/.ssh/known_hosts"])[0].split()
    return Path(files[0]).expanduser()


def _write_down(journal: Journal, file: Path, before: bytes | None, after: bytes) -> None:
    """Puts the file back for a moment and writes it by the journal, so that all is recorded."""
    old = set((before or b"").splitlines())
    added = tuple(line.decode() for line in after.splitlines() if line not in old)
    if before is None:
        file.unlink()
    else:
        file.write_bytes(before)
    write_file(journal, file, after, 0o600, added)


async def install(looks: Sequence[Look], options: SshOptions, public: str, passwords: Passwords,
                  journal: Journal, say: Say) -> dict[str, str]:  # fmt: skip
    """Installs the public key on the hosts that do not take it; by host, why it failed there."""
    gate = asyncio.Semaphore(LOGINS_AT_ONCE)
    failed: dict[str, str] = {}
    script = keys.install_script(public)

    async def one(host: Host) -> None:
        async with gate:
            why = await _install(host, options, script, public, passwords, journal)
        say(f"{host.name}: {why or 'key installed'}")
        if why:
            failed[host.name] = why

    await asyncio.gather(*(one(item.host) for item in looks))
    return failed


async def _install(host: Host, options: SshOptions, script: str, public: str,
                   passwords: Passwords, journal: Journal) -> str:  # fmt: skip
    answer = await run(host, options, ["/bin/sh", "-s"], script, passwords.environment())
    if answer.refusal is not None:
        if answer.refusal.cause == "login refused":
            return "the password was refused"
        return f"{answer.refusal.cause}: {answer.refusal.found.splitlines()[-1]}"
    report = keys.read_report(answer.output)
    if report.failed:
        return report.failed
    if report.changed:
        journal.add(keys.change_of(host.name, public, report))
    return ""


async def revoke(changes: Sequence[Change], hosts: Mapping[str, Host], options: SshOptions,
                 journal: Journal, say: Say) -> bool:  # fmt: skip
    """Takes back what was done on other hosts; True when all of it is gone."""
    whole = True
    for change in changes:
        host = hosts.get(change.host)
        if host is None:
            say(f"{change.host}: not among the hosts: give the same -H as for setup")
            whole = False
            continue
        answer = await run(host, options, ["/bin/sh", "-s"], keys.revoke_script(change))
        if "paceline done" in answer.output:
            journal.forget(change)
            say(f"{host.name}: key taken away")
        else:
            words = answer.refusal.found if answer.refusal else answer.words
            say(f"{host.name}: {words.strip().splitlines()[-1] if words.strip() else 'no answer'}")
            whole = False
    return whole
