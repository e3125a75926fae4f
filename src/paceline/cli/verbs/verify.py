"""``paceline verify``: whether a run's checkpoints have been changed."""

from __future__ import annotations

import sys

import click

from paceline.cli.options import RUN_DIR_OF, settings_options
from paceline.cli.runs.run_lookup import current_run
from paceline.cli.verb import Verb, say
from paceline.spec.formatting import format_size, pluralize, shell_text
from paceline.spec.rundir import CHECKPOINTS
from paceline.spec.terminal import format_for


@click.command("verify", cls=Verb)
@settings_options(RUN_DIR_OF)
@click.argument("run", required=False)
@click.pass_context
def command(ctx: click.Context, /, **_: object) -> None:
    """Compare every checkpoint of RUN with its hashes, its predecessor and its signature.

    Without RUN, use the run in progress below runs/, otherwise the newest.

    A checkpoint is "signed", "unsigned" (made by another user, on another machine or by an earlier
    version, or in a folder that was copied or renamed), "changed", or "missing" (the newest that
    you signed is gone). The exit status is 1 if any is changed or missing, if one is unsigned
    although an earlier one is signed, or if signatures were removed, moved or added.
    """
    from paceline.rundir import signatures
    from paceline.rundir.signature_file import SignatureFile

    path, num_problems, num_checkpoints = current_run(ctx), 0, 0
    for checkpoint in signatures.verify(path):
        num_checkpoints += 1
        num_problems += bool(checkpoint.problem) or checkpoint.is_unexpected
        details = checkpoint.problem
        if not details and checkpoint.manifest is not None:
            entries = checkpoint.manifest.files.values()
            size = format_size(sum(entry.bytes for entry in entries))
            details = f"{pluralize(len(entries), 'file')}, {size}"
        if checkpoint.uncovered:
            details += f"; not covered: {', '.join(checkpoint.uncovered):.200}"
        if checkpoint.is_unexpected:
            folder = path / CHECKPOINTS / checkpoint.name
            details += "; an earlier one is signed. A job has just written this one, its launcher"
            details += " was killed, or somebody else wrote it. If you do not trust it, remove it:"
            details += f" {shell_text(['rm', '-r', str(folder)])}"
        line = f"{checkpoint.name:<12} {checkpoint.status:<9} {details}"
        say(format_for(line, sys.stdout))
    if not num_checkpoints:
        say(f"no checkpoints in {path}")
    file = SignatureFile(path)
    written = file.read()
    if written.problem:
        num_problems += 1
        say(format_for(f"{file.path} was changed: {written.problem}\n{file.remedy}", sys.stdout))
    elif written.manifests and not written.is_recorded:
        say("This machine has no record of the last signature: newer ones may have been removed.")
    if num_problems:
        ctx.exit(1)
