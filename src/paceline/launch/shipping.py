"""Bringing code to the nodes, and new files back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from paceline.cluster.blobs import send_file
from paceline.cluster.channel import AgentRefusal, Event
from paceline.launch.code import Manifest, Tree, entry_at, relocate
from paceline.launch.node import Node
from paceline.launch.planning import Code
from paceline.spec.errors import NodeError
from paceline.spec.job import Entry, Job

RESULT_LIMIT = 8 << 30  # bytes brought back from one node


async def ship_tree(node: Node, tree: Tree, name: str, run_id: str) -> str:
    """Builds ``tree`` on the node out of what is cached there and what is sent; its folder.

    NodeError when the node cannot take it.
    """
    try:
        root = await _build_tree(node, tree, name, run_id)
    except AgentRefusal as refusal:
        raise NodeError(
            f"{node.name} cannot take the files of {tree.root}",
            found=refusal.found,
            remedy=f"Make room for {(tree.size >> 20) + 1} MiB in ~/.cache/paceline on "
            f"{node.name}, or set XDG_CACHE_HOME there to a folder on another disk",
        ) from None
    node.copies[name] = (root, tree.manifest)
    return root


async def _build_tree(node: Node, tree: Tree, name: str, run_id: str) -> str:
    answer = await node.channel.request("lacking_blobs", manifest=tree.manifest)
    where = {str(entry[1]): str(entry[0]) for entry in tree.manifest}
    for digest in answer["hashes"]:
        await send_file(node.channel, digest, tree.root / where[digest])
    built = await node.channel.request(
        "build_tree", manifest=tree.manifest, name=name, run_id=run_id
    )
    return str(built["root"])


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
        found = f"{len(differing)} files are missing or different there: {shown}"
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


def stays_below(path: str) -> bool:
    """Whether a relative path leads nowhere else; a node does not choose where we write."""
    return not path.startswith("/") and ".." not in path.split("/")


class Fetcher:
    """Receives files from agents; hand it every ``file`` event."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], BinaryIO] = {}
        self._targets: dict[str, Path] = {}
        self._problems: dict[str, OSError] = {}

    def take(self, event: Event) -> None:
        """Writes one block at its place."""
        target = self._targets.get(event.host)
        if target is None:
            return
        try:
            self._write(target, event)
        except OSError as problem:
            self._problems[event.host] = problem
            self._drop(event.host)

    def _drop(self, host: str) -> None:
        """Takes no more of this host, and leaves no half file under a whole one's name."""
        del self._targets[host]
        for key in [key for key in self._open if key[0] == host]:
            file = self._open.pop(key)
            with contextlib.suppress(OSError):
                file.close()
            Path(file.name).unlink(missing_ok=True)

    def _write(self, target: Path, event: Event) -> None:
        path = target / event.message["path"]
        if not stays_below(event.message["path"]):
            return
        key = (event.host, event.message["path"])
        file = self._open.get(key)
        if file is None:
            self._close_of(event.host)  # files come one after the other
            path.parent.mkdir(parents=True, exist_ok=True)
            file = self._open[key] = path.with_name(path.name + ".part").open("wb")
        file.seek(event.message["offset"])
        file.write(event.blob)

    def _close_of(self, host: str) -> None:
        for key in [key for key in self._open if key[0] == host]:
            file = self._open.pop(key)
            file.close()
            part = Path(file.name)
            part.replace(part.with_name(part.name.removesuffix(".part")))

    async def fetch(self, node: Node, root: str, manifest: Manifest | None, target: Path,
                    leave: Iterable[str] = ()) -> list[str]:  # fmt: skip
        """Brings the new and changed files below ``root`` of a node to ``target``.

        Args:
            node: From where.
            root: Folder there.
            manifest: What was there before the job; ``None`` when nothing was.
            target: Folder here.
            leave: First parts of paths that stay there.

        Returns:
            The paths that came, relative to ``target``.
        """
        answer = await node.channel.request("list_results", root=root, manifest=manifest)
        skipped = set(leave)
        files = [
            f
            for f in answer["files"]
            if stays_below(f["path"]) and f["path"].split("/")[0] not in skipped
        ]
        total = sum(f["size"] for f in files)
        if total > RESULT_LIMIT:
            raise NodeError(
                f"the results on {node.name} are larger than what is brought back",
                found=f"{total >> 20} MiB in {root}",
                remedy=f"Copy them by hand: scp -r {node.host.address}:{root} .",
            )
        paths = [str(f["path"]) for f in files]
        if paths:
            await self.fetch_files(node, root, paths, target)
        return paths

    async def fetch_files(self, node: Node, root: str, paths: list[str], target: Path) -> None:
        """Brings these files below ``root``; one call a node at a time."""
        self._targets[node.name] = target
        try:
            await node.channel.request("fetch", root=root, files=paths)
        finally:
            with contextlib.suppress(OSError):
                self._close_of(node.name)
            self._targets.pop(node.name, None)
        if problem := self._problems.pop(node.name, None):
            raise NodeError(
                f"cannot write what {node.name} sends",
                found=f"{problem.strerror} ({problem.filename or target})",
                remedy=f"Make room there, or copy by hand: scp -r {node.host.address}:{root} .",
            )
