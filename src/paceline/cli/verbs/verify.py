"""``paceline verify``: whether a run's model and checkpoints have been changed."""

from __future__ import annotations

import sys
from itertools import chain

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
    """Compare the model and every checkpoint of RUN with their hashes and signatures.

    Without RUN, use the run in progress below runs/, otherwise the newest.

    The final model and each checkpoint are "signed", "unsigned" (made by another user, on another
    machine or by an earlier version, or in a folder that was copied or renamed), "changed", or
    "missing" (the newest checkpoint, or the model, that you signed is gone). best.json is "changed"
    if it does not name the checkpoint that the manifests call the best. The exit status is 1 if
    anything is changed or missing, if a checkpoint is unsigned although an earlier one is signed,
    or if signatures were removed, moved or added.
    """
    from paceline.rundir import signatures, signed_model
    from paceline.rundir.signature_file import SignatureFile

    path, num_problems, is_empty = current_run(ctx), 0, True
    others = filter(None, (signed_model.verify_model(path), signed_model.verify_best_pointer(path)))
    for item in chain(others, signatures.verify(path)):
        is_empty = False
        num_problems += bool(item.problem) or item.is_unexpected
        details = item.problem
        if not details and item.manifest is not None:
            entries = item.manifest.files.values()
            size = format_size(sum(entry.bytes for entry in entries))
            details = f"{pluralize(len(entries), 'file')}, {size}"
        if item.uncovered:
            details += f"; not covered: {', '.join(item.uncovered):.200}"
        if item.is_unexpected:
            folder = path / CHECKPOINTS / item.name
            details += "; an earlier one is signed. A job has just written this one, its launcher"
            details += " was killed, or somebody else wrote it. If you do not trust it, remove it:"
            details += f" {shell_text(['rm', '-r', str(folder)])}"
        line = f"{item.name:<12} {item.status:<9} {details}"
        say(format_for(line, sys.stdout))
    if is_empty:
        say(f"no model and no checkpoints in {path}")
    file = SignatureFile(path)
    written = file.read()
    if written.problem:
        num_problems += 1
        say(format_for(f"{file.path} was changed: {written.problem}\n{file.remedy}", sys.stdout))
    elif (written.manifests or written.model) and not written.is_recorded:
        say("This machine has no record of the last signature: newer ones may have been removed.")
    if num_problems:
        ctx.exit(1)
