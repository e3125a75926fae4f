"""An indexed Job or a JobSet for Kubernetes. Validated by the published schemas; not tested on a
cluster.

Every pod runs the same command; they rendezvous at the first pod's name.
"""

from __future__ import annotations

import json
import re
from pathlib import PurePosixPath
from typing import Any

from paceline.rendezvous.endpoint import DEFAULT_PORT, KEY_VARIABLE
from paceline.schedulers.scheduler import Scheduler
from paceline.schedulers.script import (
    SUBMITTED_VARIABLE,
    BatchRequest,
    check_request,
    gpus_per_node,
    processes_per_node,
)
from paceline.spec.errors import SettingError

PLACEHOLDER = "replace this by the output of: openssl rand -hex 16"  # refused as a key
GPU = "nvidia.com/gpu"
KINDS = ("kind=Job", "kind=JobSet")
_NODE = "node"  # of a JobSet, its only job
_RUN = "app.kubernetes.io/instance"  # label by which the service finds the pods


class Kubernetes(Scheduler):
    """Secret, Service and Job as JSON documents, which are YAML too."""

    name, title = "kubernetes", "Kubernetes"
    submit_options = frozenset({
        "ship", "image", "shm_size", "mount", "time_limit", "cpus_per_task", "mem", "gres", "gpus",
        "gpus_per_node", "constraint", "setup_command", "sbatch_arg",
    })  # fmt: skip
    submit_command = "kubectl apply -f FILE"
    stores_secrets = True
    is_tested = False

    def render(self, request: BatchRequest) -> str:
        check_request(request)
        if request.folder != "--run-dir":
            raise SettingError(
                "pods meet for one run, not for several", remedy="paceline run, at each size"
            )
        if not request.image:
            raise SettingError("Kubernetes needs an image", remedy="--image IMAGE")
        if unsupported := [kind for kind in request.arguments if kind not in KINDS]:
            raise SettingError(
                f"--sbatch-arg {unsupported[0]} cannot be written into a manifest",
                found=f"these can: {', '.join(KINDS)}",
                remedy="Change the manifest before you apply it",
            )
        workload = [jobset(request)] if "kind=JobSet" in request.arguments else [
            service(request), job(request)]  # fmt: skip
        documents = (secret(request), *workload)
        return "---\n".join(f"{json.dumps(document, indent=2)}\n" for document in documents)


def name_of(request: BatchRequest) -> str:
    """Returns a valid name of a service: lower case, dashes, first a letter, 40 characters."""
    name = re.sub(r"[^a-z0-9-]+", "-", request.name.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}"
    return name[:40].rstrip("-")


# --- the objects


def secret(request: BatchRequest) -> dict[str, Any]:
    """Returns the rendezvous key and the forwarded variables, or placeholders in a plan.

    Pods refuse to start with the placeholder.
    """
    values = {KEY_VARIABLE: PLACEHOLDER}
    values |= {name: f"replace this by the value of {name}" for name in request.forwarded}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": _secret_name(request)},
        "type": "Opaque",
        "stringData": {**values, **request.secrets},
    }


def service(request: BatchRequest) -> dict[str, Any]:
    """Returns a headless service that names the pods before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name_of(request)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _labels(request),
            "ports": [{"name": "rendezvous", "port": DEFAULT_PORT}],
        },
    }


def job(request: BatchRequest) -> dict[str, Any]:
    """Returns a Job of numbered pods, one for each node; the first failure ends it."""
    name = name_of(request)
    spec = _indexed(request, f"{name}-0.{name}")
    spec["template"]["spec"]["subdomain"] = name
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def jobset(request: BatchRequest) -> dict[str, Any]:
    """Returns the same as a JobSet, which makes the service itself."""
    name = name_of(request)
    spec = _indexed(request, f"{name}-{_NODE}-0-0.{name}")
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": spec}}],
        },
    }


def _indexed(request: BatchRequest, first: str) -> dict[str, Any]:
    limit = {"activeDeadlineSeconds": _seconds(request.time)} if request.time else {}
    return {
        "parallelism": request.nodes,
        "completions": request.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        **limit,
        "template": {"metadata": {"labels": _labels(request)}, "spec": _pod(request, first)},
    }


def _pod(request: BatchRequest, first: str) -> dict[str, Any]:
    volumes, mounts = _volumes(request)
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        **({"nodeSelector": _features(request.constraint)} if request.constraint else {}),
        "containers": [
            {
                "name": "paceline",
                "image": request.image,
                "workingDir": request.workdir,
                "command": _command(request, first),
                "env": [*_secrets(request), _INDEX, {"name": SUBMITTED_VARIABLE, "value": "1"}],
                "ports": [{"containerPort": DEFAULT_PORT}],
                "resources": _resources(request),
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def _labels(request: BatchRequest) -> dict[str, str]:
    return {"app.kubernetes.io/name": "paceline", _RUN: name_of(request)}


# --- of a pod


def _command(request: BatchRequest, first: str) -> list[str]:
    rendezvous = ["--rdzv", f"{first}:{DEFAULT_PORT}", "--nnodes", str(request.nodes)]
    rendezvous += ["--via", "ssh", "--node-rank", "$(JOB_COMPLETION_INDEX)"]
    derived = processes_per_node(request) if request.processes is None else None
    processes = ["-p", str(derived)] if derived else []
    run_dir, *words = (_literal(word) for word in (request.run_dir, *request.options))
    lines = _literal("\n".join([*request.setup, 'exec "$@"']))
    setup = ["/bin/sh", "-c", lines, "sh"] if request.setup else []
    paceline = ["paceline", *request.verb, "--run-dir", run_dir]
    return [*setup, *paceline, *rendezvous, *processes, *words]


def _literal(word: str) -> str:
    """Escapes dollars: Kubernetes expands ``$(NAME)`` in a command."""
    return word.replace("$", "$$")


def _secret_name(request: BatchRequest) -> str:
    return f"{name_of(request)}-secrets"


def _secrets(request: BatchRequest) -> list[dict[str, Any]]:
    """Returns variables that take their values from the secret."""
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": _secret_name(request), "key": name}}}
        for name in (KEY_VARIABLE, *request.forwarded)
    ]


# the variable with the pod's index, for ``$(…)`` in the command
_ANNOTATION = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_INDEX = {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": {"fieldPath": _ANNOTATION}}}


def _volumes(request: BatchRequest) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the pod's volumes and their mounts: /dev/shm, and a volume for each source."""
    size = {"sizeLimit": _quantity(request.shm_size)} if request.shm_size else {}
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", **size}}]
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
    names: dict[str, str] = {}
    is_persistent = False
    for mount in request.mounts:
        source, target, read_only = _parts(mount)
        if source not in names:
            names[source] = f"volume-{len(names)}"
            volumes.append({"name": names[source], **_volume(source)})
        access = {"readOnly": True} if read_only else {}
        mounts.append({"name": names[source], "mountPath": target, **access})
        holds_run_dir = PurePosixPath(request.run_dir).is_relative_to(target)
        is_persistent = is_persistent or (holds_run_dir and not read_only)
    if not is_persistent:
        raise SettingError(
            f"the run directory {request.run_dir} would be gone with its pods",
            found="no --mount that can be written to holds it",
            remedy=f"--mount CLAIM:{request.workdir}, where CLAIM is a PersistentVolumeClaim with "
            "your project, or another --run-dir",
        )
    return volumes, mounts


def _parts(mount: str) -> tuple[str, str, bool]:
    """Returns source, target, and whether the mount is read-only."""
    match = re.fullmatch(r"(/[^:]*|[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?):(/[^:]+)(:ro)?", mount)
    if match is None:
        raise SettingError(
            f"--mount {mount} cannot be written into a manifest",
            found="CLAIM:/TARGET and CLAIM:/TARGET:ro can, with the name of a "
            "PersistentVolumeClaim or, for a folder of each node, its absolute path",
        )
    return match[1], match[2], bool(match[3])


def _volume(source: str) -> dict[str, Any]:
    if source.startswith("/"):
        return {"hostPath": {"path": source, "type": "Directory"}}
    return {"persistentVolumeClaim": {"claimName": source}}


def _resources(request: BatchRequest) -> dict[str, Any]:
    limits: dict[str, str] = {}
    if request.mem:
        limits["memory"] = _quantity(request.mem)
    if request.cpus_per_task:
        limits["cpu"] = str(request.cpus_per_task * (processes_per_node(request) or 1))
    if request.gpus or request.gpus_per_node:
        limits[GPU] = _gpus(request)
    limits |= _named_devices(request.gres)
    return {"limits": limits} if limits else {}


def _gpus(request: BatchRequest) -> str:
    gpus = gpus_per_node(request)
    if any(kind for kind, _ in gpus):
        raise SettingError(
            f"GPUs {request.gpus or request.gpus_per_node} cannot be written for this batch system",
            found="Kubernetes tells kinds of GPUs by labels of its nodes",
            remedy="--gpus-per-node N, and --constraint nvidia.com/gpu.product=NAME",
        )
    return str(sum(number for _, number in gpus))


def _named_devices(gres: str) -> dict[str, str]:
    """Returns limits for ``gpu:2``, ``amd.com/gpu:2``, ``rdma/hca:1``."""
    limits = {}
    for entry in filter(None, gres.split(",")):
        match = re.fullmatch(r"(gpu|[a-z0-9.-]+/[\w.-]+):(\d+)", entry, re.ASCII)
        if match is None:
            raise SettingError(
                f"--gres {entry} cannot be written for this batch system",
                found="gpu:2 and names of a device plugin can, as amd.com/gpu:2",
            )
        limits[GPU if match[1] == "gpu" else match[1]] = match[2]
    return limits


def _features(constraint: str) -> dict[str, str]:
    """Parses labels of nodes, ``NAME=VALUE`` separated by commas."""
    labels = {}
    for feature in constraint.split(","):
        match = re.fullmatch(r"([\w./-]+)=([\w.-]*)", feature, re.ASCII)
        if match is None:
            raise SettingError(
                f"--constraint {constraint} cannot be written into a manifest",
                found="labels of nodes can: NAME=VALUE,NAME=VALUE",
            )
        labels[match[1]] = match[2]
    return labels


def _seconds(time: str) -> int:
    """Parses a time limit of a batch system: ``90`` minutes, ``1:30:00``, ``2-12:00:00``."""
    match = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?", time)
    if match is None:
        raise SettingError(f"--time {time} is not a time", remedy="--time H:MM:SS")
    days, first, second, third = (int(group or 0) for group in match.groups())
    if match[1] or match[4]:  # days or seconds are named: hours come first
        return ((days * 24 + first) * 60 + second) * 60 + third
    return first * 60 + second


def _quantity(size: str) -> str:
    """Converts ``16G`` or Docker's ``16g`` to ``16Gi``."""
    return re.sub(r"(?<=\d)([kmgtKMGT])[bB]?$", lambda unit: unit.group(1).upper() + "i", size)


SCHEDULER = Kubernetes()
