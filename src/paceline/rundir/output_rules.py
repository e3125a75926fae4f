"""Rules for files that scripts write below their project: where they arrive, which belong together.

Pure. A host may be hostile. What it sends must not become code in the user's project.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from paceline.agent.files.outputs import SHARD_SUFFIX
from paceline.agent.files.safe_paths import fold_name, refusal_reason
from paceline.spec import rundir


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Suffixes that no program runs or reads as its settings: may arrive in folders of the user.
DATA_SUFFIXES = _words(
    "arrow bin ckpt csv distcp gif h5 hdf5 jpeg jpg json jsonl log model msgpack npy npz parquet"
    " png pt pth safetensors tsv txt webp"
)
# Suffixes of programs, settings, and pages with scripts: never arrive in the project.
CODE_SUFFIXES = _words(
    "a app awk bash bat bazel bzl c cc cfg cjs class cmake cmd code-workspace com command conf"
    " cpp csh cu cuh cxx deb desktop dll dylib egg ex exe exs fish gradle go h hcl hpp hta htm"
    " html inc ini ipynb jar java jl js jse ko ksh lnk lua mak make mjs mk msi ninja nix o php pif"
    " pl plist pm properties ps1 psd1 psm1 py pyc pyd pyi pyo pyw pyx pyz r rb reg rpm rs rules"
    " scpt scr service sh shtml so socket sql svg tcl tf tfvars timer toml ts tsx url vbe vbs whl"
    " wsf wsh xhtml zsh"
)
_PICKLE_SUFFIXES = _words("dill joblib pickle pkl")  # run what is in them when they are loaded
_TEMPORARY_SUFFIXES = _words("incomplete lock part partial swp temp tmp")
_SETTINGS_FILES = _words(  # that programs look for, though their suffixes are those of data
    "agents.md angular.json app.json biome.json cdk.json claude.md cmakelists.txt"
    " cmakepresets.json cmakeuserpresets.json composer.json conanfile.txt crush.json cypress.json"
    " deno.json devbox.json devcontainer.json docker-bake.json dub.json ecosystem.json"
    " electron-builder.json firebase.json gemini-extension.json gemini.md jsconfig.json"
    " kernel.json launch.json lefthook.json lerna.json mcp.json mcp_config.json mcp_servers.json"
    " nodemon.json now.json npm-shrinkwrap.json nx.json opencode.json package-lock.json"
    " package.json process.json project.json pyrightconfig.json renovate.json rush.json"
    " serverless.json settings.json skill.md tasks.json tsconfig.json turbo.json vcpkg.json"
    " vercel.json workspace.json wrangler.json"
    " bsdmakefile build containerfile dockerfile gemfile gnumakefile jenkinsfile justfile makefile"
    " procfile rakefile vagrantfile workspace"
)
_CODE_NAMES = re.compile(
    r"(?:.*[-_.])?(?:requirements|constraints)(?:[-_.].*)?\.txt|.*\.so\.[0-9.]+"
    r"|.*\.config\.json"
    r"|(?:docker-)?compose(?:[-_.].*)?\.ya?ml"
    r"|(?:jupyter|ipython)[-_].*\.json"  # Jupyter reads them in the folder in which it is started
    r"|.*\.(?:tf|tfvars|tofu|pkr)\.json"  # Terraform and Packer read all of a folder
)
# ``import torch`` calls what metadata of packages on ``sys.path`` names, and pytest looks in all
# folders for tests.
_PACKAGE_METADATA = re.compile(r".*\.(?:dist-info|egg|egg-info|egg-link)")
_TESTS = re.compile(r"(?:test_.*|.*_test|conftest)\.py")
_PYTHON_SUFFIXES = _words("py pyc pyd pyo so")
_PAGE_SUFFIXES = _words("htm html ipynb shtml svg xhtml")  # run only if the user opens them
_CODE_FOLDERS = _words(  # also settings in environments of virtualenv and conda, and of Ansible
    "site-packages dist-packages node_modules __pycache__"
    " conda-meta env_vars.d group_vars host_vars jupyter"
)
# By these, commands take a folder below runs/ for a run. With a manifest, a later one resumes.
_RUN_RECORDS = {rundir.PLAN, rundir.EVENTS, rundir.OWNER, rundir.BATCH, rundir.DETACHED,
        rundir.FORECAST}  # fmt: skip
# Text files that name the newest checkpoint: of DeepSpeed; of MMEngine and detectron2
_POINTERS = frozenset({"latest", "last_checkpoint"})
# TensorFlow's pointer is named ``checkpoint``, like files of torch.save
_CHECKPOINT_WITHOUT_SUFFIX = re.compile(
    r"(?:[a-z0-9=_-]+[-_=])?(?:best|checkpoint|ckpt|epoch|iter|last|model|optimizer|snapshot|state"
    r"|step|weights)(?:[-_=]?[0-9]+)?"
)
_LOG_SUFFIXES = _words("csv err jsonl log ndjson out tsv txt")  # programs append lines to them
_EVENT_FILE = re.compile(r"events\.out\.tfevents\.[0-9]+\..+")  # of TensorBoard
# state_rank1.pt, rank_3/model.pt, rng_1.pt, and of the Trainer and Accelerate: rng_state_1.pth,
# random_states_1.pkl
_RANK_NUMBER = re.compile(
    r"(?:^|(?<=[^a-z]))(?:rank|rng(?:_state)?|random_states?|process)[_.=-]?([0-9]+)",
    re.IGNORECASE,
)
MAX_RANK_NUMBERS = 8  # of a path that are tried: a hostile node's paths may have thousands
_RANDOM_STATE = re.compile(r"(?:rng|random_states?)[^/]*$", re.IGNORECASE)
DCP_INDEX = ".metadata"  # torch.distributed.checkpoint writes it last

# of Accelerator.save_state, in a folder of any name: its pickles, weights, and what is beside them
_SAVED_PICKLE = re.compile(r"(?:random_states|custom_checkpoint)_[0-9]+\.pkl")
_SAVED_WEIGHTS = re.compile(r"(?:pytorch_)?model(?:[-_].+)?\.(?:bin|safetensors)")
_SAVED_STATE = re.compile(rf"(?:optimizer|scheduler)(?:_[0-9]+)?\.bin|{_SAVED_PICKLE.pattern}")
_STEP_FOLDER = re.compile(
    r"(?:(?:checkpoint|ckpt|step|epoch|iter|iteration|global[-_]?step)s?|ep)[-_=.]?[0-9].*",
    re.IGNORECASE,
)
_LAST_FILES = frozenset({DCP_INDEX, "trainer_state.json"})  # written last, by DCP and HF Trainer
_CHECKPOINT_SUFFIXES = frozenset({"bin", "ckpt", "distcp", "npz", "pt", "pth", "safetensors"})
SETTLE_S = 3.0  # without a change, after which a file is complete
FOLDER_SETTLE_S = 10.0  # the same for a checkpoint folder without a file that is written last


@dataclass(frozen=True, slots=True)
class PathState:
    """What the launching machine has at the path of a file that a host wrote.

    Attributes:
        was_sent: It is part of the code that was sent.
        exists: Any file, folder or link has this name, or a link, a file or a run directory is on
            the way.
        is_own_output: A run in this run directory brought the file, and nobody changed it since.
        in_own_folder: Such a run made a folder on the path, or found it empty.
    """

    was_sent: bool = False
    exists: bool = False
    is_own_output: bool = False
    in_own_folder: bool = False


def kept_out_reason(path: str, state: PathState) -> str:
    """Why a file of a host does not arrive at ``path`` in the project; empty if it does."""
    if reason := name_refusal(path, in_own_folder=state.in_own_folder):
        return reason
    if state.was_sent:
        return "it was sent from here"
    if state.exists and not state.is_own_output:
        return "another file is there, or it was changed here"
    return ""


def name_refusal(path: str, *, in_own_folder: bool) -> str:
    """Why no file of a host may have this path in a project; empty if it may.

    Args:
        in_own_folder: The run made the folder. In folders of the user, fewer names are allowed.
    """
    if reason := refusal_reason(path):
        return reason
    parts = [fold_name(part).rstrip(". ") for part in path.split("/")]
    name = parts[-1]
    hidden = parts[:-1] if name == DCP_INDEX else parts
    if any(not part or part.startswith((".", "-", "~")) for part in hidden):
        return "a hidden file, or a name that looks like an option"
    if any(":" in part or "\\" in part for part in parts):
        return "a name with special characters"
    if not _CODE_FOLDERS.isdisjoint(parts[:-1]) or any(map(_PACKAGE_METADATA.fullmatch, parts)):
        return "in a folder of packages or settings"
    is_below_runs = len(parts) > 2 and parts[0] == rundir.DEFAULT_PARENT
    if is_below_runs and (name in _RUN_RECORDS or name == rundir.MANIFEST):
        return "a record of a run"
    if name == DCP_INDEX:
        return ""
    suffix = _suffix(name)
    if _has_code_name(name):
        return "a name of code or settings"
    is_in_checkpoint = unit_of(path) != path or (len(parts) > 1 and _SAVED_PICKLE.fullmatch(name))
    if suffix in _PICKLE_SUFFIXES and not (in_own_folder and is_in_checkpoint):
        return "a pickle outside a checkpoint folder"
    if suffix in _TEMPORARY_SUFFIXES:
        return "a temporary file"
    if _EVENT_FILE.fullmatch(name):
        return ""
    if not suffix and name not in _POINTERS and not _CHECKPOINT_WITHOUT_SUFFIX.fullmatch(name):
        return "a name without a suffix"
    if not in_own_folder and suffix not in DATA_SUFFIXES:
        return "no data file, in a folder that the run did not make"
    return ""


def _has_code_name(name: str) -> bool:
    """Whether a file is code or settings by its folded name."""
    is_named = name in _SETTINGS_FILES or _CODE_NAMES.fullmatch(name) is not None
    return is_named or _suffix(name) in CODE_SUFFIXES


def is_python_code(path: str) -> bool:
    """Whether Python or pytest runs a file unasked if they are started in a folder above it."""
    *folders, name = (fold_name(part).rstrip(". ") for part in path.split("/"))
    is_metadata = any(map(_PACKAGE_METADATA.fullmatch, (*folders, name)))
    is_test = _TESTS.fullmatch(name) is not None
    is_module = _suffix(name) in _PYTHON_SUFFIXES and all(map(str.isidentifier, folders))
    return is_metadata or is_test or is_module


def is_code(path: str) -> bool:
    """Whether some program may run a file unasked if it is started in a folder above it."""
    name = fold_name(path.rpartition("/")[2]).rstrip(". ")
    return is_python_code(path) or (_has_code_name(name) and _suffix(name) not in _PAGE_SUFFIXES)


def _suffix(name: str) -> str:
    return name.rpartition(".")[2].strip() if "." in name else ""


# --- checkpoints ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that a script wrote, as its host reports it.

    Attributes:
        path: Relative to the project.
        mtime_us: Time of the last change of its content, in microseconds since 1970.
        age_s: Seconds since its last change of any kind.
        state: Whether its format shows that it has its end: ``whole``, ``cut off`` or ``unknown``.
    """

    path: str
    size: int
    mtime_us: int
    age_s: float = 0.0
    state: str = "unknown"

    @property
    def is_whole(self) -> bool:
        """Whether it is not visibly cut off."""
        return self.state != "cut off"

    @property
    def version(self) -> tuple[int, int]:
        """Changes if the file does."""
        return self.size, self.mtime_us


def is_index(path: str) -> bool:
    """Whether a path is that of the index of a distributed checkpoint."""
    return path.rpartition("/")[2] == DCP_INDEX


def is_shard(path: str) -> bool:
    """Whether a path is that of a rank's part of a distributed checkpoint."""
    return path.endswith(SHARD_SUFFIX)


def is_of_other_rank(group: Sequence[WrittenFile], paths: Container[str]) -> bool:
    """Whether another rank than 0 has written a group for itself, as rank 0 has one of ``paths``.

    Their names differ in the rank's number only: ``state_rank1.pt``, ``rank_03/model.pt``.
    """
    return all(rank_0_twin(file.path, paths) for file in group)


def rank_0_twin(path: str, paths: Container[str]) -> str:
    """The path among others that differs from a path only in rank 0 for another rank, or ""."""
    for match in islice(_RANK_NUMBER.finditer(path), MAX_RANK_NUMBERS):
        twins = [path[: match.start(1)] + zero + path[match.end(1) :]
                 for zero in ("0", "0" * len(match[1]))]  # fmt: skip
        if int(match[1]) and (twin := next((twin for twin in twins if twin in paths), "")):
            return twin
    return ""


def rank_in(path: str) -> int | None:
    """The number of the rank in a path, if it has one; of several, the highest."""
    return max(map(int, _RANK_NUMBER.findall(path)), default=None)


def has_rank_0(path: str) -> bool:
    """Whether a path has the number of rank 0."""
    return 0 in map(int, _RANK_NUMBER.findall(path))


def lacking_parts(times: Mapping[str, int], num_ranks: int) -> list[str]:
    """Rank 0's newest file of each series that lacks files which other ranks had of earlier ones.

    Without states of random generators, which do not say at which step a rank resumes.
    Args:
        times: When each file was written last, by path.
        num_ranks: Of the job: higher numbers are not missed.
    """
    ranks: dict[str, set[int]] = {}
    newest: dict[str, str] = {}
    for path in sorted(times, key=times.__getitem__):
        rank = None if _RANDOM_STATE.search(path) else rank_in(path)
        if rank == 0:
            newest[series_of(path)] = path
        elif rank is not None and rank < num_ranks and rank_0_twin(path, times):
            ranks.setdefault(series_of(path), set()).add(rank)
    twins = {(rank_0_twin(path, times), rank_in(path)) for path in times if rank_in(path)}
    return sorted(path for series, path in newest.items()
                  if any((path, rank) not in twins for rank in ranks.get(series, ())))  # fmt: skip


def head_of(path: str, paths: Container[str]) -> str:
    """The file of rank 0 among others that belongs to a rank's part of a checkpoint, or ""."""
    if is_shard(path):
        return index_of(path) if index_of(path) in paths else ""
    return rank_0_twin(path, paths) if is_of_checkpoint(path) else ""


def is_of_checkpoint(path: str) -> bool:
    """Whether a file is a checkpoint, or in a folder of one, by its name; not if it is a log."""
    is_in_folder = unit_of(path) != path and not _belongs_to_training(path)
    return is_in_folder or is_checkpoint(path, [path])


def is_of_save(path: str) -> bool:
    """Whether a path is that of the index or of a part of a distributed checkpoint."""
    return is_index(path) or is_shard(path)


def index_of(path: str) -> str:
    """The path of the index of the checkpoint to which a file belongs that is a part of one."""
    folder = path.rpartition("/")[0]
    return f"{folder}/{DCP_INDEX}" if folder else DCP_INDEX


def group_files(files: Iterable[WrittenFile]) -> dict[str, list[WrittenFile]]:
    """Groups files that are complete only together, by their checkpoint folder or own path."""
    files = list(files)
    folders = {_parent(file.path) for file in files
               if is_index(file.path) or is_shard(file.path)} - {""}  # fmt: skip
    saved = saved_folders(file.path for file in files)
    groups: dict[str, list[WrittenFile]] = {}
    for file in files:
        groups.setdefault(unit_of(file.path, folders, saved), []).append(file)
    return groups


def saved_folders(paths: Iterable[str]) -> set[str]:
    """The folders with weights and, beside them, what else ``Accelerator.save_state`` writes."""
    weights, states = set[str](), set[str]()
    for path in paths:
        folder, _, name = path.rpartition("/")
        if _SAVED_WEIGHTS.fullmatch(name):
            weights.add(folder)
        elif _SAVED_STATE.fullmatch(name):
            states.add(folder)
    return weights & states - {""}


def unit_of(path: str, folders: Collection[str] = (), saved: Collection[str] = ()) -> str:
    """The checkpoint folder of a path by its name (``checkpoint-500``, ``step_3``), or the path.

    Args:
        folders: Other checkpoint folders.
        saved: Those of :func:`saved_folders`, which may also hold other files.
    """
    parts = path.split("/")
    for depth in range(1, len(parts)):
        folder = "/".join(parts[:depth])
        if folder in folders or _STEP_FOLDER.fullmatch(parts[depth - 1]):
            return folder
    folder, _, name = path.rpartition("/")
    is_saved = _SAVED_WEIGHTS.fullmatch(name) or _SAVED_STATE.fullmatch(name)
    return folder if is_saved and folder in saved else path


def withheld_root(path: str, folders: Container[str]) -> str:
    """The folder or file that is left out with incomplete checkpoints, if a path is in it, or "".

    Args:
        folders: Of the indexes of incomplete checkpoints, and those above that are named like one.
    """
    parts = path.split("/")
    for depth in range(len(parts) - 1, -1, -1):
        folder = "/".join(parts[:depth])
        if folder in folders and depth and _STEP_FOLDER.fullmatch(parts[depth - 1]):
            return folder
        if folder in folders and depth == len(parts) - 1 and is_of_save(path):
            return path
    return ""


def checkpoint_folders(index: str) -> set[str]:
    """The folder of an index, and the innermost one at or above it that is named like a step."""
    parts = _parent(index).split("/")
    steps = ["/".join(parts[: depth + 1]) for depth, name in enumerate(parts)
             if _STEP_FOLDER.fullmatch(name)]  # fmt: skip
    return {_parent(index), *steps[-1:]}


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def series_of(unit: str) -> str:
    """What the names of a script's successive checkpoints have in common."""
    return re.sub(r"[0-9]+", "", unit)


def superseded_units(groups: dict[str, list[WrittenFile]]) -> set[str]:
    """The checkpoints after which the script has begun another one of the same series."""
    superseded = set[str]()
    starts_us: dict[str, int] = {}  # of the latest checkpoint of each series
    for unit in order_of_arrival(groups):
        series, files = series_of(unit), groups[unit]
        if max(file.mtime_us for file in files) <= starts_us.get(series, -1):
            superseded.add(unit)
        starts_us.setdefault(series, min(file.mtime_us for file in files))
    return superseded


def is_complete(unit: str, files: Sequence[WrittenFile], *, has_ended: bool = False,
                is_superseded: bool = False) -> bool:  # fmt: skip
    """Whether a file, or all files of a checkpoint folder, have been written to their end.

    Args:
        has_ended: No process writes any more: a file that is written last proves it.
        is_superseded: The script has begun the next checkpoint.
    """
    if not all(file.is_whole for file in files):
        return False
    age_s = min(file.age_s for file in files)
    is_file = len(files) == 1 and files[0].path == unit
    if is_file and files[0].state == "whole":
        return True  # even if the script replaces it again and again
    has_last = any(file.path.rpartition("/")[2] in _LAST_FILES for file in files)
    needs_index = any(is_shard(file.path) for file in files)
    is_left = has_last or (is_superseded and not needs_index)
    if has_ended and is_left:
        return True
    return age_s >= (SETTLE_S if is_file or is_left else FOLDER_SETTLE_S)


CheckpointNames = dict[str, list[tuple[str, Counter[str]]]]


def checkpoint_names(times: Mapping[str, int]) -> CheckpointNames:
    """Names of the files of complete checkpoint folders by series, each with its folder, in order.

    Args:
        times: When the files were written, by path.
    """
    folders: dict[str, Counter[str]] = {}
    for path in sorted(times, key=times.__getitem__):
        if (unit := unit_of(path)) != path:
            folders.setdefault(unit, Counter())[series_of(path.removeprefix(unit))] += 1
    names: CheckpointNames = {}
    for unit, counts in folders.items():
        names.setdefault(series_of(unit), []).append((unit, counts))
    return names


def matches_earlier(unit: str, files: Iterable[WrittenFile], names: CheckpointNames) -> bool:
    """Whether a checkpoint folder has all files that the one before had, by their names."""
    earlier = [counts for other, counts in names.get(series_of(unit), ()) if other != unit]
    present = Counter(series_of(file.path.removeprefix(unit)) for file in files if file.is_whole)
    return bool(earlier) and earlier[-1] <= present


def is_log(path: str) -> bool:
    """Whether programs usually append to a file of this name: its beginning is of use."""
    name = path.rpartition("/")[2].lower()
    return _suffix(name) in _LOG_SUFFIXES or _EVENT_FILE.fullmatch(name) is not None


def split_growing_logs(groups: dict[str, list[WrittenFile]]) -> dict[str, list[WrittenFile]]:
    """Takes logs out of groups whose other files have not changed for longer.

    Such a folder is named like a checkpoint, but belongs to a whole training (``epochs10_lr3``).
    """
    split: dict[str, list[WrittenFile]] = {}
    for unit, files in groups.items():
        logs = [file for file in files if _belongs_to_training(file.path)
                and file.age_s < FOLDER_SETTLE_S]  # fmt: skip
        others = [file for file in files if file not in logs]
        if others and all(file.age_s >= FOLDER_SETTLE_S for file in others):
            split |= {unit: others, **{file.path: [file] for file in logs}}
        else:
            split[unit] = files
    return split


def _belongs_to_training(path: str) -> bool:
    """Whether a file is a log by its name, and not a vocabulary, for example."""
    name = path.rpartition("/")[2].lower()
    return is_log(path) and (_suffix(name) != "txt" or "log" in name)


def is_checkpoint(unit: str, paths: Iterable[str]) -> bool:
    """Whether a file or folder holds weights, by the names in it."""
    names = {path.rpartition("/")[2].lower() for path in paths}
    return any(_suffix(name) in _CHECKPOINT_SUFFIXES
               or (name not in _POINTERS and _CHECKPOINT_WITHOUT_SUFFIX.fullmatch(name))
               for name in names)  # fmt: skip


def order_of_arrival(groups: dict[str, list[WrittenFile]]) -> list[str]:
    """The groups, newest first."""
    return sorted(groups, key=lambda unit: max(f.mtime_us for f in groups[unit]), reverse=True)
