"""Finds and hashes the files of a job's code, and maps paths to nodes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pwd
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.agent.files import safe_paths, snapshot
from paceline.agent.files.snapshot import hash_file
from paceline.rundir.earlier_outputs import EarlierOutputs
from paceline.rundir.output_rules import DCP_INDEX
from paceline.spec.errors import SettingError
from paceline.spec.formatting import pluralize, shell_text
from paceline.spec.job import Entry, Job
from paceline.spec.rundir import DEFAULT_PARENT, WEIGHTS, is_launcher_file, is_run
from paceline.transfer.git import repository_problem, run_git, work_tree_root
from paceline.transfer.links import OutwardLinks

MAX_DEPTH = 2 * safe_paths.MAX_DEPTH  # runs may be nested in the folder
MAX_FILES = 5000
MAX_BYTES = 256 * 1024 * 1024
MAX_LISTED_FILES = 4 * MAX_FILES  # to name the largest folder; then listing ends
ENV_FILE = ".env"  # often holds passwords
_NO_PROJECTS = {"/", "/home", "/tmp", "/var/tmp"}  # noqa: S108 - beside home folders
_SECRETS = {ENV_FILE, ".aws", ".git-credentials", ".kube", ".netrc", ".pgpass", ".pypirc", ".ssh"}
_SKIPPED = {"__pycache__", "node_modules", "runs", "wandb", "mlruns", "site-packages"}

# For thousands of files: creating a Path takes longer than hashing a small file.
_stat, _is_file = os.stat, os.path.isfile

Manifest = list[list[object]]  # [path, sha256, mode, size], as the agent takes it


@dataclass(frozen=True, slots=True)
class Tree:
    """A folder of the launching machine that the job needs.

    Attributes:
        root: Its absolute path on the launching machine.
        manifest: Its files with their hashes, sorted by path.
        copy: Local copy of the folder, if the launching machine is another one.
        cached: Cached copies of files, as they were when hashed, by path.
        outward: Targets of files that are outside the folder and only linked, by path.
        empty_submodules: Submodules of git that were not initialised, so that they have no files.
        linked_folders: Links to folders, which are not sent.
        unsent_env: A file ``.env`` that is not sent; empty if there is none.
        repository_problem: Why git does not read the repository of the folder, so that files which
            it ignores are here; empty if it does.
        is_partial: The folder is no project, so that only its Python files, and files that the
            command names, are here.
    """

    root: Path
    manifest: Manifest
    copy: Path | None = None
    cached: Mapping[str, Path] = field(default_factory=dict)
    outward: Mapping[str, str] = field(default_factory=dict)
    empty_submodules: Sequence[str] = ()
    linked_folders: Sequence[str] = ()
    unsent_env: str = ""
    repository_problem: str = ""
    is_partial: bool = False

    def file(self, path: str) -> Path:
        """The local path of a file."""
        return self.cached.get(path) or (self.copy or self.root) / path

    def sources(self, copy: str) -> list[tuple[str, str]]:
        """Paths of a copy of this folder, with those of the originals: the most exact first.

        A file that is only linked here has its own.
        """
        linked = ((f"{copy}/{path}", target) for path, target in self.outward.items())
        ordered = sorted(linked, key=lambda pair: len(pair[0]), reverse=True)
        return [*ordered, (copy, str(self.root))]

    def without(self, paths: Collection[str]) -> Tree:
        """Returns this folder without some of its files."""
        return replace(self, manifest=[entry for entry in self.manifest if entry[0] not in paths])

    @property
    def size(self) -> int:
        """Bytes in all files."""
        return sum(int(str(entry[3])) for entry in self.manifest)

    def changed(self) -> list[str]:
        """Files that have changed since they were hashed. Blocking."""
        return [str(path) for path, sha256, *_ in self.manifest
                if not self.file(str(path)).is_file()
                or hash_file(self.file(str(path))) != sha256]  # fmt: skip

    def current_entries(self, paths: Collection[str]) -> dict[str, list[object] | None]:
        """The current entries of files; ``None`` for a missing one. Blocking."""
        entries: dict[str, list[object] | None] = dict.fromkeys(paths)
        for path in paths:
            with contextlib.suppress(OSError):
                entries[path] = _entry(self.root, path)
        return entries


def cache_files(tree: Tree) -> Tree:
    """Copies the files into this machine's cache, from which nodes then get them. Blocking.

    Files that have changed get new hashes in the returned tree; without space they are not cached.
    """
    cached: dict[str, Path] = {}
    manifest = [_cache_file(tree, entry, cached) for entry in tree.manifest]
    snapshot.remove_old(keep="")  # this machine may never have an agent that does so
    return replace(tree, manifest=manifest, cached=cached)


def _cache_file(tree: Tree, entry: list[object], cached: dict[str, Path]) -> list[object]:
    """Caches a file, adds its path to ``cached``, and returns its entry."""
    path, sha256, mode, size = entry
    with contextlib.suppress(OSError):
        if snapshot.missing_hashes([entry]):
            content = tree.file(str(path)).read_bytes()
            sha256, size = hashlib.sha256(content).hexdigest(), len(content)
            snapshot.store([(sha256, content)])
        cached[str(path)] = snapshot.cache_folder() / snapshot.blob_path(str(sha256))
        return [path, sha256, mode, size]
    return entry


def project_root(job: Job) -> Path:
    """The root of the job's code.

    This is the git work tree of the work folder, else the work folder; or the same for the folder
    of a script, function or program (``../train.sh``) outside it. A folder that is no project is
    none for code in its folders.
    """
    root = folder_root(Path(job.workdir))
    if job.entry.kind == "function" and job.entry.args:
        folder = Path(job.entry.args[0])
    elif job.entry.kind == "script" or job.entry.target.startswith("."):
        folder = script_path(job.entry, job.workdir).parent
    else:
        return root
    is_inside = folder == root or (folder.is_relative_to(root) and not is_no_project(root))
    return root if is_inside else folder_root(folder)


def names_code(job: Job) -> bool:
    """Whether a program is a file of the project, or has the path of one in its arguments.

    An argument may be a command for a shell: ``sh -c 'python main.py'``.
    """
    return bool(_named_files(job, project_root(job)))


def _named_files(job: Job, root: Path) -> set[str]:
    """Relative paths of files of the project that are the program, or words of its arguments."""
    entry = job.entry
    program = [entry.target] if "/" in entry.target or entry.kind == "script" else []
    words = [*program, *entry.args, *(word for arg in entry.args for word in arg.split())]
    paths = (script_path(replace(entry, target=word), job.workdir) for word in words if word)
    return {path.relative_to(root).as_posix() for path in paths
            if path.is_relative_to(root) and _may_be_file(path)}  # fmt: skip


def _may_be_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or not a path
        return False


def script_path(entry: Entry, workdir: str) -> Path:
    """Absolute local path of the script, without ``..``; links are not resolved."""
    return Path(os.path.normpath(Path(workdir, entry.target)))


def folder_root(folder: Path) -> Path:
    """The git work tree that contains a folder, unless that is no project; else the folder."""
    root = work_tree_root(folder)
    return folder if root is None or is_no_project(root) else root


def is_no_project(folder: Path) -> bool:
    """Whether a folder holds too much that is no code, even if it is a git work tree."""
    return is_home(folder) or str(folder.resolve()) in _NO_PROJECTS


def is_home(folder: Path) -> bool:
    """Whether a folder is the home folder of the user, or of its owner, as with ``sudo``."""
    homes = [os.path.expanduser("~")]  # noqa: PTH111 - may fail
    with contextlib.suppress(KeyError, OSError):
        homes.append(pwd.getpwuid(folder.stat().st_uid).pw_dir)
    return folder.resolve() in [Path(home).resolve() for home in homes]


def read_code(job: Job, outputs: Collection[str] = ()) -> Tree:
    """Hashes the job's code; ``outputs`` are excluded.

    If its folder is no project, this is only what the script may import from this folder itself,
    and what the command names.

    Raises:
        CodeTooLarge: The code is too large to be shipped at every start.
    """
    root, data = project_root(job), Path(job.data.path) if job.data else None
    if not is_no_project(root):
        return read_tree(root, data=data, outputs=outputs)
    modules = {path.name for path in root.glob("*.py") if _may_be_file(path)}
    named = {path for path in _named_files(job, root) - {*outputs}
             if data is None or not (root / path).is_relative_to(data)}  # fmt: skip
    visible = sorted(path for path in modules | named if "/." not in f"/{path}")
    sizes = {path: _stat(f"{root}/{path}").st_size for path in visible}
    if len(sizes) > MAX_FILES or sum(sizes.values()) > MAX_BYTES:
        raise _too_large(root, sizes, is_complete=True)
    return replace(_hashed(root, visible), is_partial=True)


def read_tree(root: Path, parts: Sequence[str] = (), data: Path | None = None,
              outputs: Collection[str] = ()) -> Tree:  # fmt: skip
    """Hashes the code in ``root``: files that git does not ignore, else all visible files.

    Files of run directories, those in the folder ``data``, ``outputs``, and files that often hold
    passwords, unless git tracks them, are excluded. With ``parts`` only paths that begin with one
    of them.

    Raises:
        CodeTooLarge: The code is too large to be shipped at every start.
    """
    sizes: dict[str, int] = {}
    total, is_complete = 0, True
    empty_submodules: list[str] = []
    linked_folders: list[str] = []
    for path in files_of(root, data, empty_submodules, linked_folders):
        if path not in outputs and _is_within(path, parts):
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                sizes[path] = _stat(f"{root}/{path}").st_size
                total += sizes[path]
        if len(sizes) > MAX_LISTED_FILES:
            is_complete = False
            break
    if len(sizes) > MAX_FILES or total > MAX_BYTES:
        raise _too_large(root, sizes, is_complete)
    tree = _hashed(root, sorted(sizes))
    if data is not None:  # a link to the data is an argument, and is replaced
        real = data.resolve()
        linked_folders = [
            p for p in linked_folders if not real.is_relative_to((root / p).resolve())
        ]
    return replace(
        tree,
        empty_submodules=empty_submodules,
        linked_folders=linked_folders,
        unsent_env=ENV_FILE if ENV_FILE not in sizes and _is_file(f"{root}/{ENV_FILE}") else "",
        repository_problem=repository_problem(root),
    )


def read_parts(root: Path, parts: Sequence[str]) -> Tree:
    """Hashes these files and folders below ``root``, by default all; without compiled modules."""
    return _hashed(
        root, sorted({path for part in parts or (".",) for path in _walk_part(root, part)})
    )


def _walk_part(root: Path, part: str) -> Iterator[str]:
    """Relative paths of a file, or of all files of a folder."""
    if (root / part).is_file():
        yield part
    for folder, _, names in safe_paths.walk(str(root / part)):
        for name in names:
            path = os.path.normpath(f"{part}/{folder}/{name}")
            if "__pycache__" not in path.split("/") and (root / path).is_file():
                yield path


def _is_within(path: str, parts: Sequence[str]) -> bool:
    return not parts or path in parts or path.split("/")[0] in parts


def _hashed(root: Path, files: Sequence[str]) -> Tree:
    """Hashes the files; raises SettingError for one that is nested too deeply."""
    for path in files:
        if path.count("/") >= MAX_DEPTH:
            raise SettingError(
                f"{root} holds folders that are nested more than {MAX_DEPTH} deep",
                found=f"{path[:100]}…, {path.count('/')} folders deep",
                remedy="Remove them, or keep them out by .gitignore",
            )
    links = OutwardLinks(root)
    outward = {path: target for path in files if (target := links.target(path))}
    manifest = []
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
            manifest.append(_entry(root, path))
    return Tree(root, manifest, outward=outward)


def _entry(root: Path, path: str) -> list[object]:
    file = f"{root}/{path}"
    stat = _stat(file)
    return [path, hash_file(file), stat.st_mode & 0o777, stat.st_size]


def files_of(root: Path, data: Path | None = None, empty_submodules: list[str] | None = None,
             linked_folders: list[str] | None = None) -> Iterator[str]:  # fmt: skip
    """Relative paths of files that do not belong to run directories or to the folder ``data``.

    Submodules without files are added to ``empty_submodules``, and links to folders to
    ``linked_folders``.
    """
    submodules = [] if empty_submodules is None else empty_submodules
    links = [] if linked_folders is None else linked_folders
    is_run_folder = functools.cache(lambda folder: _allowed(is_run, root / folder))
    for name in _list_files(root, data, submodules, links):
        parts = name.split("/")
        if safe_paths.INCOMING in parts:  # a run directory that is just being made has no mark yet
            continue
        parents = ("/".join(parts[:depth]) for depth in range(1, len(parts)))
        paths = (name.removeprefix(f"{parent}/") for parent in parents if is_run_folder(parent))
        # other files in a run directory may be code
        if not any(is_launcher_file(path) or path == WEIGHTS for path in paths):
            yield name


def _list_files(root: Path, data: Path | None, empty_submodules: list[str],
                linked_folders: list[str]) -> Iterator[str]:  # fmt: skip
    is_inside = data is not None and data != root and data.is_relative_to(root)
    excluded = data.relative_to(root).as_posix() if data is not None and is_inside else None
    repositories, seen = [""], set[str]()  # the root, submodules, and other repositories in it
    while repositories:
        prefix = repositories.pop()
        if (real := os.path.realpath(root / prefix)) in seen:  # a forged index may lead in circles
            continue
        seen.add(real)
        listed = run_git(root / prefix, "ls-files", "-z", "--cached", "--others",
                         "--exclude-standard")  # fmt: skip
        names = (_visible(root, prefix, excluded) if listed is None
                 else _without_secrets(root / prefix, listed.split("\0")))  # fmt: skip
        for name in dict.fromkeys(filter(None, names)):
            path = prefix + name
            if excluded is not None and f"{path}/".startswith(f"{excluded}/"):
                continue
            if _is_file(f"{root}/{path}"):
                yield path
            elif _allowed(_is_repository, root / path):
                repositories.append(path.rstrip("/") + "/")
            elif not path.endswith("/") and _allowed(_is_empty_folder, root / path):
                empty_submodules.append(path)
            elif _allowed(_is_folder_link, root / path) and not _skip(root / path):
                linked_folders.append(path)


def _without_secrets(repository: Path, names: Sequence[str]) -> Iterable[str]:
    """Leaves out files that often hold passwords, unless git tracks them."""
    secrets = {name for name in names if not _SECRETS.isdisjoint(name.split("/"))}
    if secrets:
        secrets -= {*(run_git(repository, "ls-files", "-z") or "").split("\0")}
    return (name for name in names if name not in secrets)


def _is_repository(folder: Path) -> bool:
    return not folder.is_symlink() and os.path.lexists(folder / ".git")


def _is_folder_link(path: Path) -> bool:
    return path.is_symlink() and path.is_dir()


def _is_empty_folder(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir())


def _visible(root: Path, prefix: str, excluded: str | None) -> Iterator[str]:
    """Yields files and links to folders below ``root/prefix``, where git lists none.

    Hidden files and folders, and packages, are left out.
    """
    base = root / prefix
    for folder, folders, names in safe_paths.walk(str(base)):
        inner = f"{folder}/" if folder else ""
        folders[:] = [name for name in folders if prefix + inner + name != excluded
                      and not _skip(base / folder / name)]  # fmt: skip
        yield from (inner + name for name in names
                    if not (name.startswith(".") and name != DCP_INDEX)
                    and _allowed(Path.is_file, base / folder / name))  # fmt: skip
        yield from (inner + name for name in folders
                    if _allowed(Path.is_symlink, base / folder / name))  # fmt: skip


def _skip(folder: Path) -> bool:
    name = folder.name
    if name in _SKIPPED and not _allowed(Path.exists, folder / "__init__.py"):
        return True
    return name.startswith(".") or _allowed(Path.exists, folder / "pyvenv.cfg")


def _allowed(predicate: Callable[[Path], bool], path: Path) -> bool:
    """The predicate's result, or False without permission."""
    try:
        return predicate(path)
    except PermissionError:
        return False


class CodeTooLarge(SettingError):
    """The code has too many files or bytes to be shipped at every start."""


def _too_large(root: Path, sizes: Mapping[str, int], is_complete: bool) -> CodeTooLarge:
    """The error for too large a tree; names its largest part, usually data or results."""
    largest = _largest_part(sizes)
    members = {path: size for path, size in sizes.items() if f"{path}/".startswith(f"{largest}/")}
    is_folder = bool(largest) and largest not in sizes
    tracked = run_git(root, *(("ls-files", "--", largest) if largest else ("rev-parse",)))
    local_path = os.path.relpath(root / largest)
    untrack = shell_text(["git", "rm", "-r", "-q", "--cached", local_path])
    problem = repository_problem(root)
    no_repository = "" if problem else "run `git init` and "
    first = no_repository if tracked is None else f"run `{untrack}` and " if tracked else ""
    data = shell_text(["--data", local_path])
    elsewhere = "start from a folder that holds only the code"
    remedy = (
        f"To keep {largest or 'some of them'} out, {first}add {'it' if largest else 'them'} to"
        f" .gitignore{f'; if ranks need it, {data} sends it once' if is_folder else ''}. Or"
        f" {elsewhere}, or put the code at the same path on every host and add --ship never"
    )
    is_project = not is_no_project(root)
    most = (
        f"most of it is {largest}: {pluralize(len(members), 'file')},"
        f" {sum(members.values()) >> 20} MiB"
    )
    if largest and (run := _run_that_wrote(root, members)):
        most += f", results of the run {run}"
    return CodeTooLarge(
        f"the code in {root} is too large to ship at every start",
        found=f"{'' if is_complete else 'more than '}{pluralize(len(sizes), 'file')},"
        f" {sum(sizes.values()) >> 20} MiB (at most {MAX_FILES} and {MAX_BYTES >> 20} MiB)"
        f"{f'; {most}' if largest else ''}{f'; {problem}' if problem else ''}",
        remedy=remedy if is_project else elsewhere.capitalize(),
    )


def _run_that_wrote(root: Path, sizes: Mapping[str, int]) -> Path | None:
    """The run of ``runs/`` that wrote the last of these files, if runs wrote half the bytes."""
    earlier = EarlierOutputs(root / DEFAULT_PARENT / "-", root)
    written = {path: writer for path in sizes if (writer := earlier.writer(path))}
    if 2 * sum(sizes[path] for path in written) < sum(sizes.values()) or not written:
        return None
    return max(written.values(), key=lambda writer: writer[1].time)[0]


def _largest_part(sizes: Mapping[str, int]) -> str:
    """The innermost folder without code, or the file beside code, that holds most of the files.

    A folder with code in which no file holds half is returned itself; empty if that is the root.
    """
    part = ""
    while True:
        inside = {path: size for path, size in sizes.items() if path.startswith(part)}
        weights: Counter[str] = Counter()
        for path, size in inside.items():
            # a minimum for each: very many small files are as slow as a few large ones
            name = path.removeprefix(part).split("/")[0]
            weights[part + name] += size + MAX_BYTES // MAX_FILES
        largest, weight = weights.most_common(1)[0]
        has_code = not part or any(path.endswith(".py") for path in inside)
        holds_half = weight >= sum(weights.values()) / 2
        is_file = largest in sizes
        if is_file and has_code and holds_half:
            return largest
        if is_file or not (has_code or holds_half):
            return part.removesuffix("/")
        part = f"{largest}/"


def relocate(path: str, root: Path, target: str) -> str:
    """The path on a node on which ``root`` is at ``target``."""
    absolute = Path(path)
    try:
        return str(Path(target) / absolute.relative_to(root))
    except ValueError:
        return path


def entry_at(entry: Entry, workdir: str, root: Path, target: str) -> Entry:
    """The entry for a node on which ``root`` is at ``target``.

    Of a function's import folders, only those inside ``root`` are kept.
    """
    if entry.kind == "function":
        folders = [path for path in entry.args if Path(path).is_relative_to(root)]
        return replace(entry, args=tuple(relocate(path, root, target) for path in folders))
    if entry.kind == "binary" and entry.target.startswith("/"):
        return replace(entry, target=relocate(entry.target, root, target))
    if entry.kind != "script":
        return entry
    script = script_path(entry, workdir)
    is_inside = Path(workdir).is_relative_to(root) and script.is_relative_to(root)
    if is_inside and not Path(entry.target).is_absolute():
        return entry
    return replace(entry, target=relocate(str(script), root, target))


def args_at(entry: Entry, root: Path, target: str, others: Collection[str]) -> Entry:
    """The entry with arguments that are absolute paths below ``root`` as paths below ``target``.

    An argument is a path, or a name with a path behind ``=``. ``others`` are paths of folders that
    are sent separately, and stay.
    """

    def moved(arg: str) -> str:
        name, equals, value = arg.partition("=")
        if not equals or arg.startswith("/"):
            name, equals, value = "", "", arg
        is_absolute = value.startswith("/") and value not in others
        return name + equals + (relocate(value, root, target) if is_absolute else value)

    if entry.kind == "function":
        return entry
    return replace(entry, args=tuple(map(moved, entry.args)))
