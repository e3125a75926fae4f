"""Which files are the job's code, and where they lie on each node."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.agent import inside, snapshot
from paceline.agent.snapshot import hash_file
from paceline.spec.errors import SettingError
from paceline.spec.helptext import counted
from paceline.spec.job import Entry, Job
from paceline.spec.rundir import WEIGHTS, is_ours, is_run
from paceline.transfer.git import run_git, top_of
from paceline.transfer.links import OutwardLinks

MAX_DEPTH = 2 * inside.MOST_DEPTH  # also with what runs bring home somewhere in the folder
MAX_FILES = 5000
MAX_BYTES = 256 * 1024 * 1024
_SKIPPED = {"__pycache__", "node_modules", "runs", "wandb", "mlruns", "site-packages"}

# There may be thousands of files, and somebody waits: a Path for each takes longer than its hash.
_stat, _is_file = os.stat, os.path.isfile

Manifest = list[list[object]]  # [path, sha256, mode, size], as the agent takes it


@dataclass(frozen=True, slots=True)
class Tree:
    """A folder of the launching machine that the job needs.

    Attributes:
        root: Absolute path there, by which the user knows it.
        manifest: Its files with their hashes, sorted by path.
        copy: Where its files lie here, when the launching machine is another one.
        kept: By path, where a file lies that stays as it was when it was hashed.
        outward: By path, where a file lies that only a link in the folder leads to.
    """

    root: Path
    manifest: Manifest
    copy: Path | None = None
    kept: Mapping[str, Path] = field(default_factory=dict)
    outward: Mapping[str, str] = field(default_factory=dict)

    def file(self, path: str) -> Path:
        """Where a file of it lies here."""
        return self.kept.get(path) or (self.copy or self.root) / path

    @property
    def size(self) -> int:
        """Bytes in all files."""
        return sum(int(str(entry[3])) for entry in self.manifest)

    def changed(self) -> list[str]:
        """Files that cannot be had any more as they were when they were hashed. Blocking."""
        return [str(path) for path, sha256, *_ in self.manifest
                if not self.file(str(path)).is_file()
                or hash_file(self.file(str(path))) != sha256]  # fmt: skip

    def as_now(self, paths: Collection[str]) -> dict[str, list[object] | None]:
        """Of these the entries that its folder would give now; ``None``: it is gone. Blocking."""
        now: dict[str, list[object] | None] = dict.fromkeys(paths)
        for path in paths:
            with contextlib.suppress(OSError):
                now[path] = _entry(self.root, path)
        return now


def keep(tree: Tree) -> Tree:
    """The tree with a copy of each file in this machine's cache, from which nodes get it then.

    Blocking. A file that has changed since it was hashed is another one in the new tree; what
    finds no room is not kept.
    """
    kept: dict[str, Path] = {}
    manifest = [_kept(tree, entry, kept) for entry in tree.manifest]
    snapshot.forget_old(keep="")  # there may never be an agent on this machine that does so
    return replace(tree, manifest=manifest, kept=kept)


def _kept(tree: Tree, entry: list[object], kept: dict[str, Path]) -> list[object]:
    """The entry of a file as it is kept now; notes where."""
    path, sha256, mode, size = entry
    with contextlib.suppress(OSError):
        if snapshot.lacking([entry]):
            content = tree.file(str(path)).read_bytes()
            sha256, size = hashlib.sha256(content).hexdigest(), len(content)
            snapshot.store([(sha256, content)])
        kept[str(path)] = snapshot.cache_folder() / snapshot.blob_path(str(sha256))
        return [path, sha256, mode, size]
    return entry


def project_root(job: Job) -> Path:
    """The folder that belongs to the job.

    The git work tree that holds the work folder, else the work folder itself; for a script that
    lies elsewhere, or whose function it is, the same of the script's folder.
    """
    root = folder_root(Path(job.workdir))
    if job.entry.kind == "function" and job.entry.args:
        home = Path(job.entry.args[0])
        return root if home.is_relative_to(root) else folder_root(home)
    if job.entry.kind == "script":
        script = script_path(job.entry, job.workdir)
        if not script.is_relative_to(root):
            return folder_root(script.parent)
    return root


def script_path(entry: Entry, workdir: str) -> Path:
    """Absolute path of the script on this machine, without ``..``; links are left alone."""
    return Path(os.path.normpath(Path(workdir, entry.target)))


def folder_root(folder: Path) -> Path:
    """The top of the git work tree that holds a folder, else the folder."""
    return top_of(folder) or folder


def read_tree(root: Path, parts: Sequence[str] = ()) -> Tree:
    """Hashes the code in ``root``: what git tracks or would track, else everything plain.

    What runs have left in it is no code: it changes while it is read.

    With ``parts`` only what begins with one of them. SettingError when that is more than is
    sensibly shipped at every start.
    """
    files = sorted(path for path in files_of(root) if _is_within(path, parts))
    _demand_depth(root, files)
    sizes = {path: _stat(f"{root}/{path}").st_size for path in files}
    if len(files) > MAX_FILES or sum(sizes.values()) > MAX_BYTES:
        raise _too_large(root, sizes)
    return _hashed(root, files)


def read_parts(root: Path, parts: Sequence[str]) -> Tree:
    """Hashes those files and folders below ``root``, all if none are named."""
    files = {path for part in parts or (".",) for path in _below(root, part)}
    _demand_depth(root, files)
    return _hashed(root, sorted(files))


def _below(root: Path, part: str) -> Iterator[str]:
    """Relative paths, ``/``-separated, of a file, or all plain files of a folder."""
    if (root / part).is_file():
        yield part
    for folder, _, names in inside.walk(str(root / part)):
        for name in names:
            path = os.path.normpath(f"{part}/{folder}/{name}")
            if (root / path).is_file():
                yield path


def _demand_depth(root: Path, files: Iterable[str]) -> None:
    """SettingError for a file that lies too deep to be shipped."""
    for path in files:
        if path.count("/") >= MAX_DEPTH:
            raise SettingError(
                f"{root} holds folders that are nested more than {MAX_DEPTH} deep",
                found=f"{path[:100]}…, {path.count('/')} folders deep",
                remedy="Remove them, or keep them out by .gitignore",
            )


def _is_within(path: str, parts: Sequence[str]) -> bool:
    return not parts or path in parts or path.split("/")[0] in parts


def _hashed(root: Path, files: Sequence[str]) -> Tree:
    links = OutwardLinks(root)
    outward = {path: target for path in files if (target := links.target(path))}
    return Tree(root, [_entry(root, path) for path in files], outward=outward)


def _entry(root: Path, path: str) -> list[object]:
    file = f"{root}/{path}"
    stat = _stat(file)
    return [path, hash_file(file), stat.st_mode & 0o777, stat.st_size]


def files_of(root: Path) -> Iterator[str]:
    """Relative paths, ``/``-separated, of plain files that no run has left."""
    holds_run = functools.cache(lambda folder: _true_of(is_run, root / folder))
    for name in _plain(root):
        parts = name.split("/")
        above = ("/".join(parts[:depth]) for depth in range(1, len(parts)))
        if not any(_of_a_run(name.removeprefix(f"{run}/")) for run in above if holds_run(run)):
            yield name


def _of_a_run(path: str) -> bool:
    """Whether a path in a run directory is the run's; a script may well lie beside it."""
    return is_ours(path) or path == WEIGHTS


def _plain(root: Path) -> Iterator[str]:
    listed = run_git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed is not None:
        for name in dict.fromkeys(filter(None, listed.split("\0"))):
            if _is_file(f"{root}/{name}"):
                yield name
        return
    for folder, folders, names in inside.walk(str(root)):
        folders[:] = [name for name in folders if not _skip(root / folder / name)]
        for name in names:
            if _true_of(Path.is_file, root / folder / name):
                yield f"{folder}/{name}" if folder else name


def _skip(folder: Path) -> bool:
    name = folder.name
    return name.startswith(".") or name in _SKIPPED or _true_of(Path.exists, folder / "pyvenv.cfg")


def _true_of(ask: Callable[[Path], bool], path: Path) -> bool:
    """False, too, where we may not look."""
    try:
        return ask(path)
    except PermissionError:
        return False


def _too_large(root: Path, sizes: Mapping[str, int]) -> SettingError:
    """Says which part is too large, for it is data or results as a rule."""
    folders: Counter[str] = Counter()
    for path, size in sizes.items():
        # A block each: very many small files are as bad as a few large ones.
        folders[path.split("/")[0]] += size + MAX_BYTES // MAX_FILES
    largest = folders.most_common(1)[0][0]
    inside = [size for path, size in sizes.items() if path.split("/")[0] == largest]
    return SettingError(
        f"the code in {root} is too large to ship at every start",
        found=f"{counted(len(sizes), 'file')}, {sum(sizes.values()) >> 20} MiB (at most"
        f" {MAX_FILES} and {MAX_BYTES >> 20} MiB); most of it is {largest}:"
        f" {counted(len(inside), 'file')}, {sum(inside) >> 20} MiB",
        remedy=f"Keep {largest} out by .gitignore; if ranks need it, add --data {largest}, which "
        "sends it once. Or start from a folder that holds only the code, or put the code at the "
        "same path on every host and add --ship never",
    )


def relocate(path: str, root: Path, target: str) -> str:
    """``path`` of this machine as it is called where ``root`` lies at ``target``."""
    absolute = Path(path)
    try:
        return str(Path(target) / absolute.relative_to(root))
    except ValueError:
        return path


def entry_at(entry: Entry, workdir: str, root: Path, target: str) -> Entry:
    """The entry for a node on which ``root`` lies at ``target``.

    A script named relative to a work folder inside ``root`` stays as it was typed, for the work
    folder moves along. Of the folders from which a function imports, those inside ``root`` do.
    """
    if entry.kind == "function":
        folders = [path for path in entry.args if Path(path).is_relative_to(root)]
        there = tuple(relocate(path, root, target) for path in folders)
        return replace(entry, args=there)
    if entry.kind != "script":
        return entry
    script = script_path(entry, workdir)
    inside = Path(workdir).is_relative_to(root) and script.is_relative_to(root)
    if inside and not Path(entry.target).is_absolute():
        return entry
    return replace(entry, target=relocate(str(script), root, target))
