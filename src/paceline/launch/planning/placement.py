"""Decides where a host's ranks find code and data, and what is sent there. Pure."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.remote.network import NodeNetwork
from paceline.spec import jobenv
from paceline.spec.errors import NodeError
from paceline.spec.formatting import pluralize, shell_text
from paceline.spec.hosts import Host
from paceline.spec.job import Entry, Job
from paceline.spec.plan import Copy
from paceline.spec.settings import Setting, Source
from paceline.transfer.data import DataFolder, DataPlace
from paceline.transfer.files import job_folder
from paceline.transfer.links import reject_outward
from paceline.transfer.tree import Tree, args_at, entry_at, relocate, script_path

Facts = Mapping[str, Any]
MIN_PROJECT_PARTS = 2  # of the path of a folder that may be a project: / and a name are too few


@dataclass(frozen=True, slots=True)
class Supplies:
    """What may have to be sent to nodes, as it is on the launching machine.

    Attributes:
        code: The job's code; ``None`` when no node can need it.
        package: This installation's ``paceline``; ``None`` unless the job needs it.
        inputs: Further folders by their path here.
        data: The folder of data; ``None`` when there is none, or no node can need it.
    """

    code: Tree | None = None
    package: Tree | None = None
    inputs: Mapping[str, Tree] = field(default_factory=dict)
    data: DataFolder | None = None


@dataclass(frozen=True, slots=True)
class HostSurvey:
    """What is known about one host: its part of the plan follows from it.

    Attributes:
        code: How its code differs from the launcher's (``exists``, ``missing``, ``different``);
            ``None`` if there was nothing to compare.
        has_workdir: Whether the folder of :func:`required_workdir` exists there.
        data: Where it has the data, and what is missing; ``None`` on the launching machine.
    """

    host: Host
    facts: Facts
    network: NodeNetwork
    code: Mapping[str, Any] | None = None
    has_workdir: bool = True
    data: DataPlace | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node's ranks run.

    Attributes:
        code: The code is ``in place``, ``verified equal``, ``not compared`` or ``shipped``.
        workdir: Folder in which they run there.
        entry: What they run, with that node's paths.
        copies: What is sent there first.
        data: Its folder of data; empty for none.
    """

    code: str
    workdir: str
    entry: Entry
    copies: tuple[Copy, ...] = ()
    data: str = ""


def place_on(job: Job, survey: HostSurvey, supplies: Supplies, run_id: str) -> Place:
    """Decides where a host's ranks find code and data, and what is sent there."""
    host, tree = survey.host, supplies.code
    workdir = host.workdir or job.workdir
    data = survey.data.folder if survey.data else job.data.path if job.data else ""
    if host.local:
        return Place("in place", workdir, job.entry, (), data)
    code, entry, copies = "in place", job.entry, []
    if tree is not None:
        root = code_root(host, tree)
        code = _code_placement(job, survey, tree, root)
        if code == "verified equal" and not tree.manifest:
            code = "not compared"
        if code == "shipped":
            if not _is_function_elsewhere(job, tree):
                _check_workdir(job, host, tree)
            _check_links(job, tree)
            target = copy_target(survey.facts, job_folder(run_id, host.name), "code")
            copies.append(Copy("code", str(tree.root), target))
            root = copies[0].target
        if code != "in place":  # else the program finds what it needs on the host
            workdir = relocate(job.workdir, tree.root, root)
            entry = entry_at(job.entry, job.workdir, tree.root, root)
        if code == "shipped":
            words = job.data.words if job.data else ()
            entry = args_at(entry, tree.root, root, {*words, *supplies.inputs})
    if not survey.has_workdir and host.workdir and needs_no_code(job, tree):
        raise NodeError(
            f"{host.name} has no folder {host.workdir}",
            remedy=f"Create it there, or change workdir under [hosts.{host.name}]",
        )
    if not survey.has_workdir and (tree is None or _is_function_elsewhere(job, tree)):
        workdir = str(survey.facts["user"]["home"])  # a recipe writes to the run directory
    for number, path in enumerate(supplies.inputs):
        name = f"input{number}"
        if path not in {input_folder.path for input_folder in job.inputs if input_folder.named}:
            _check_links(job, supplies.inputs[path])
        target = copy_target(survey.facts, job_folder(run_id, host.name), name)
        copies.append(Copy(name, path, target))
    entry = with_inputs(entry, copies)
    if job.data is not None:
        entry = replace(entry, args=tuple(job.data.on_node(arg, data) for arg in entry.args))
    if job.data is not None and survey.data is not None and not survey.data.in_place:
        check_data(job, host, survey.data)
        copies.append(Copy("data", job.data.path, data))
    return Place(code, workdir, entry, tuple(copies), data)


def _is_function_elsewhere(job: Job, tree: Tree) -> bool:
    """Whether a function is called outside of its code: its result is all that is needed here."""
    return job.entry.kind == "function" and not Path(job.workdir).is_relative_to(tree.root)


def _check_workdir(job: Job, host: Host, tree: Tree) -> None:
    """Raises NodeError if the work folder is not part of the code that is sent.

    Relative paths of the script would lead to a folder of the host from which no file is fetched,
    and to which none is sent.
    """
    workdir, root = Path(job.workdir), tree.root
    if workdir.is_relative_to(root):
        return
    is_script = job.entry.kind == "script"
    script = script_path(job.entry, job.workdir) if is_script else None

    def start_in(folder: Path) -> str:
        name = shell_text([str(script.relative_to(folder))]) if script else ""
        how = f"name the script as {name}" if name else "start there"
        return f"cd {shell_text([str(folder)])}, and {how}: relative paths then lead to this folder"

    remedies, common = [start_in(root)], Path(os.path.commonpath([workdir, root]))
    # home folders, /tmp and the like hold too much that is no code
    if not Path.home().is_relative_to(common) and len(common.parts) > MIN_PROJECT_PARTS:
        remedies.append(f"Or {start_in(common)}, which is sent as a whole")
    problem = "the script is outside the current folder"
    if root.is_relative_to(workdir):
        problem = "the current folder holds more than one project, and is not sent to hosts"
    raise NodeError(
        f"{problem}, so the script's relative paths would lead to other files on {host.name} than"
        " here",
        found=f"the current folder is {workdir}; {host.name} needs a copy of the script's folder,"
        f" {root}, and gets no copy of other folders",
        remedy="\n".join(remedies),
    )


def _check_links(job: Job, tree: Tree) -> None:
    """Raises SettingError if the tree has links out of it that may not be followed."""
    if not job.follow_links:
        reject_outward(tree.root, tree.outward)


def code_notes(job: Job, supplies: Supplies) -> list[str]:
    """Returns notes on code that is not all of its folder, or more, or is not compared."""
    code, notes = supplies.code, list[str]()
    if code is not None and code.is_partial:
        notes.append(
            f"{code.root} holds more than one project: only its *.py files, and files that the"
            " command names, are compared and sent. If rank 0 runs there, other hosts do not get"
            " its checkpoints. To send more, put the script in a folder of its own"
        )
    if code is not None and code.repository_problem:
        notes.append(f"{code.repository_problem}. The code is all visible files in {code.root}")
    if code is not None and code.empty_submodules:
        command = f"git submodule update --init {shell_text(code.empty_submodules[:5])}"
        notes.append(f"submodules of git are empty here. To get their files: {command}")
    if code is not None and not code.manifest and job.ship.value == "never":
        notes.append(f"the code in {code.root} is too large to compare with that of the hosts")
    return notes


def workdir_notes(places: Sequence[tuple[Host, str]]) -> list[str]:
    """Returns a note on hosts whose ``workdir`` is not used, by how each host has the code."""
    names = [host.name for host, code in places if host.workdir and code == "shipped"]
    note = (
        f"workdir of {', '.join(names)} in [hosts.NAME] is not used: the project is sent, and ranks"
        " run in this copy"
    )
    return [note] if names else []


def linked_folder_notes(supplies: Supplies, copies: Sequence[Copy]) -> list[str]:
    """Returns a note on links to folders, which copies of the code do not have."""
    links = () if supplies.code is None else supplies.code.linked_folders
    if not links or not any(copy.name == "code" for copy in copies):
        return []
    remainder = f" and {len(links) - 5} more" if len(links) > 5 else ""
    return [
        f"links to folders are not sent with the code: {', '.join(links[:5])}{remainder}."
        " If ranks need their content, move it into the project, or send it with --data FOLDER"
    ]


def env_notes(supplies: Supplies, copies: Sequence[Copy]) -> list[str]:
    """Returns a note on a file of variables that copies of the code do not have."""
    if supplies.code is None or not supplies.code.unsent_env or not copies:
        return []
    if not any(copy.name == "code" for copy in copies):
        return []
    return [
        f"{supplies.code.unsent_env} is not sent to hosts. To pass its variables to the ranks:"
        " --env NAME for each"
    ]


def link_notes(job: Job, supplies: Supplies, surveys: Sequence[HostSurvey]) -> list[str]:
    """Returns a note on content outside of the sent folders, to which links lead."""
    if not job.follow_links:
        return []
    trees = [*filter(None, [supplies.code]), *supplies.inputs.values()]
    links = {f"{tree.root}/{path}": target
             for tree in trees for path, target in tree.outward.items()}  # fmt: skip
    if job.data is not None:
        places = [survey.data for survey in surveys if survey.data is not None]
        links |= {f"{job.data.path}/{path}": target
                  for place in places for path, target in place.outward.items()}  # fmt: skip
    examples = ", ".join(f"{path} -> {target}" for path, target in [*links.items()][:5])
    remainder = f" and {len(links) - 5} more" if len(links) > 5 else ""
    note = f"--follow-links: content from outside of the folders: {examples}{remainder}"
    return [note] if links else []


def unfetched_folder_notes(job: Job, workdirs: Mapping[str, str]) -> list[str]:
    """Returns a note on hosts whose ranks run in the home folder, from which nothing is fetched.

    Recipes write to the run directory instead.

    Args:
        workdirs: The home folder by host, of the hosts whose ranks run there.
    """
    if job.entry.kind not in ("binary", "function") or not workdirs:
        return []
    names = ", ".join([*workdirs][:5]) + (", …" if len(workdirs) > 5 else "")
    folders = ", ".join(dict.fromkeys([*workdirs.values()][:5]))
    return [
        f"{job.workdir} is missing on {names}. Ranks run in {folders} there, and files that they"
        " write there are not fetched"
    ]


def data_env(job: Job, place: Place) -> dict[str, Setting[str]]:
    """Returns the variables by which ranks find the data."""
    if job.data is None:
        return {}
    detail = "in place" if place.data == job.data.path else f"a copy of {job.data.path}"
    return {
        jobenv.DATA_DIR: Setting(place.data, Source.FOUND, detail),
        jobenv.LAUNCHER_DATA_DIR: Setting(job.data.path, Source.FOUND, "the launching machine"),
    }


def inputs_env(place: Place) -> dict[str, Setting[str]]:
    """Returns the variable by which ranks find other folders of the launching machine."""
    sent = {copy.source: copy.target for copy in place.copies if copy.name.startswith("input")}
    return {jobenv.INPUTS: Setting(json.dumps(sent), Source.FOUND, "as sent")} if sent else {}


def check_data(job: Job, host: Host, place: DataPlace) -> None:
    """Raises PacelineError if the data that a host lacks may not be sent."""
    assert job.data is not None
    if job.ship.value == "never" and (place.missing or place.extra):
        raise NodeError(
            f"the data on {host.name} are not those of this machine, and --ship never was given",
            found=f"{job.data.path} is missing or different there; its copy lacks"
            f" {pluralize(len(place.missing), 'file')}, and has {len(place.extra)} too many",
            remedy="Leave --ship out (what is missing is sent), or bring the folders into line",
        )
    if not job.follow_links:
        reject_outward(Path(job.data.path), place.outward)


def code_root(host: Host, tree: Tree) -> str:
    """Returns the folder on a host that may hold the same code already."""
    return host.workdir or str(tree.root)


def copy_target(facts: Facts, folder: str, name: str) -> str:
    """Returns where a host's agent builds what is sent to it."""
    user = facts["user"]
    cache = user.get("cache") or f"{user['home']}/.cache/paceline"
    return f"{cache}/jobs/{folder}/{name}"


def needs_no_code(job: Job, tree: Tree | None) -> bool:
    """Returns whether ranks need a folder to write to, but no file of the project."""
    is_program = job.entry.kind == "binary" and job.ship.value == "auto"
    return tree is None or (is_program and not tree.manifest)


def required_workdir(job: Job, host: Host, tree: Tree | None) -> str | None:
    """Returns the work folder that a host must have to run without a copy of the code."""
    if host.local:
        return None
    if tree is None or needs_no_code(job, tree):
        return host.workdir or job.workdir
    return relocate(job.workdir, tree.root, code_root(host, tree))


def with_inputs(entry: Entry, copies: Sequence[Copy]) -> Entry:
    """Returns the entry with the paths of sent folders on the node."""
    places = {copy.source: copy.target for copy in copies if copy.name.startswith("input")}
    return replace(entry, args=tuple(places.get(arg, arg) for arg in entry.args))


def _code_placement(job: Job, survey: HostSurvey, tree: Tree, root: str) -> str:
    """Decides how a host gets the code; NodeError if it differs and may not be sent."""
    if job.ship.value == "always":
        return "shipped"
    if needs_no_code(job, tree):
        return "in place" if survey.has_workdir else "shipped"
    host, code = survey.host, survey.code
    assert code is not None
    differing = [*code["different"], *code["missing"]]
    if code["exists"] and not differing and survey.has_workdir:
        return "verified equal"
    if job.ship.value != "never":
        return "shipped"
    reason = f"{host.name} has no folder {root}"
    if code["exists"] and not differing:
        reason = f"{host.name} lacks the current folder, {job.workdir}"
    elif code["exists"]:
        examples = ", ".join(differing[:5]) + (" …" if len(differing) > 5 else "")
        count = f"{len(differing)} files are" if len(differing) > 1 else "1 file is"
        reason = f"{count} missing or different there: {examples}"
    raise NodeError(
        f"the code on {host.name} is not the code of this machine, and --ship never was given",
        found=reason,
        remedy="Leave --ship out (what differs is shipped), or bring the folders into line",
    )
