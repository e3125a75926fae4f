"""Bringing code to the nodes."""

from __future__ import annotations

import asyncio
from typing import Any

from paceline.launch.decide import Code
from paceline.launch.node import Node
from paceline.remote.channel import AgentRefusal
from paceline.spec.errors import NodeError
from paceline.spec.job import Entry, Job
from paceline.transfer.files import send_tree
from paceline.transfer.tree import Tree, entry_at, relocate


async def ship_tree(node: Node, tree: Tree, name: str, run_id: str) -> str:
    """Builds ``tree`` on the node out of what is cached there and what is sent; its folder.

    NodeError when the node cannot take it.
    """
    try:
        root = await send_tree(node.channel, tree.manifest, tree.root.joinpath, run_id, name)
    except AgentRefusal as refusal:
        if changed := await asyncio.to_thread(tree.changed):
            raise NodeError(
                f"the code in {tree.root} changed while it was sent to {node.name}",
                found=", ".join(changed[:5]) + (" …" if len(changed) > 5 else ""),
                remedy="Run again; keep what other programs write out of the code's folder, or "
                "out of git's sight by .gitignore",
            ) from None
        raise NodeError(
            f"{node.name} cannot take the files of {tree.root}",
            found=refusal.found,
            remedy=f"Make room for {(tree.size >> 20) + 1} MiB in ~/.cache/paceline on "
            f"{node.name}, or set XDG_CACHE_HOME there to a folder on another disk",
        ) from None
    node.copies[name] = (root, tree.manifest)
    return root


async def place_code(node: Node, job: Job, tree: Tree | None, run_id: str) -> Code:
    """Makes sure that the node has the launcher's code; says where.

    Args:
        node: The node.
        job: For its folders and its wish whether to ship.
        tree: The job's code here; ``None`` when nobody needs it compared.
        run_id: Names the run.
    """
    workdir = node.host.workdir or job.workdir
    if node.host.local or tree is None:
        return Code("in place", workdir, job.entry)
    here = node.host.workdir or str(tree.root)
    if job.ship.value != "always":
        answer = await node.channel.request("compare_tree", root=here, manifest=tree.manifest)
        differing = [*answer["different"], *answer["missing"]]
        if answer["exists"] and not differing:
            return _at(job, tree, here, "verified equal", node)
        if job.ship.value == "never":
            raise _not_equal(node, here, answer, differing)
    root = await ship_tree(node, tree, "code", run_id)
    return _at(job, tree, root, "shipped", node)


def _at(job: Job, tree: Tree, root: str, how: str, node: Node) -> Code:
    workdir = relocate(job.workdir, tree.root, root)
    return Code(how, workdir, entry_at(job.entry, job.workdir, tree.root, root))


def _not_equal(node: Node, root: str, answer: dict[str, Any], differing: list[str]) -> NodeError:
    if not answer["exists"]:
        found = f"{node.name} has no folder {root}"
    else:
        shown = ", ".join(differing[:5]) + (" …" if len(differing) > 5 else "")
        count = f"{len(differing)} files are" if len(differing) > 1 else "1 file is"
        found = f"{count} missing or different there: {shown}"
    return NodeError(
        f"the code on {node.name} is not the code of this machine, and --ship never was given",
        found=found,
        remedy="Leave --ship out (what differs is shipped), or bring the folders into line",
    )


async def place_inputs(node: Node, inputs: dict[str, Tree], run_id: str) -> dict[str, str]:
    """Ships further folders; by the path here, the path there."""
    if node.host.local:
        return {path: path for path in inputs}
    return {
        path: await ship_tree(node, tree, f"input{number}", run_id)
        for number, (path, tree) in enumerate(inputs.items())
    }


def with_inputs(entry: Entry, places: dict[str, str]) -> Entry:
    """The entry with the paths of shipped folders as they are on the node."""
    return Entry(entry.kind, entry.target, tuple(places.get(arg, arg) for arg in entry.args))
