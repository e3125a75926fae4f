"""A JobSet manifest for Kubernetes. Rendered and schema-checked; not tried on a cluster.

Every pod runs the same command and they meet at the first pod's name, as nodes do on which it is
typed.
"""

from __future__ import annotations

import json
import re
from typing import Any

from paceline.rendezvous.endpoint import DEFAULT_PORT, KEY_VARIABLE
from paceline.schedulers.scheduler import Scheduler
from paceline.schedulers.script import SUBMITTED, BatchRequest, check, gpus_of, processes_of
from paceline.spec.errors import SettingError

PLACEHOLDER = "replace this by the output of: openssl rand -hex 16"  # refused as a key
_JOB = "node"


class Kubernetes(Scheduler):
    """Secret and JobSet as JSON documents, which are YAML too."""

    name, title = "kubernetes", "Kubernetes"
    submitting = frozenset({"ship", "image", "shm_size", "cpus_per_task", "mem", "gres"})
    hand_over = "kubectl apply -f FILE"
    tried = False

    def render(self, request: BatchRequest) -> str:
        check(request)
        if not request.image:
            raise SettingError("Kubernetes needs an image", remedy="--image IMAGE")
        if request.forwarded:
            raise SettingError(
                f"--env {request.forwarded[0]} cannot be forwarded into a manifest",
                found="its value would stand there for all to read",
                remedy="--env NAME=VALUE for what is no secret; else a Secret in the manifest",
            )
        documents = [json.dumps(one, indent=2) for one in (secret(request), jobset(request))]
        return "---\n".join(f"{one}\n" for one in documents)


def name_of(request: BatchRequest) -> str:
    """As Kubernetes allows names: lower case, dashes, 40 characters."""
    name = re.sub(r"[^a-z0-9-]+", "-", request.name.lower()).strip("-")
    return name[:40].rstrip("-") or "paceline"


def secret(request: BatchRequest) -> dict[str, Any]:
    """The rendezvous' key; until the placeholder is replaced, the pods refuse to start."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{name_of(request)}-key"},
        "stringData": {"key": PLACEHOLDER},
    }


def jobset(request: BatchRequest) -> dict[str, Any]:
    """One indexed job with a pod a node, found under stable names."""
    template = {
        "parallelism": request.nodes,
        "completions": request.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": _pod(request)},
    }
    job = {"name": _JOB, "replicas": 1, "template": {"spec": template}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name_of(request)},
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [job],
        },
    }


def _pod(request: BatchRequest) -> dict[str, Any]:
    return {
        "restartPolicy": "Never",
        "containers": [
            {
                "name": "paceline",
                "image": request.image,
                "workingDir": request.workdir,
                "command": _command(request),
                "env": [_key(request), _index(), {"name": SUBMITTED, "value": "1"}],
                "ports": [{"containerPort": DEFAULT_PORT}],
                "resources": _resources(request),
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108
            }
        ],
        "volumes": [{"name": "shm", "emptyDir": _memory(request)}],
    }


def _memory(request: BatchRequest) -> dict[str, str]:
    limit = {"sizeLimit": _quantity(request.shm_size)} if request.shm_size else {}
    return {"medium": "Memory", **limit}


def _command(request: BatchRequest) -> list[str]:
    name = name_of(request)
    where = ["--rdzv", f"{name}-{_JOB}-0-0.{name}:{DEFAULT_PORT}", "--nnodes", str(request.nodes)]
    where += ["--via", "ssh", "--node-rank", "$(JOB_COMPLETION_INDEX)"]
    derived = processes_of(request) if request.processes is None else None
    each = ["-p", str(derived)] if derived else []
    run_dir, *words = (_literal(word) for word in (request.run_dir, *request.words))
    return ["paceline", request.argv[-1], "--run-dir", run_dir, *where, *each, *words]


def _literal(word: str) -> str:
    """Kubernetes reads ``$(NAME)`` in a command as a variable, and ``$$`` as a dollar."""
    return word.replace("$", "$$")


def _key(request: BatchRequest) -> dict[str, Any]:
    source = {"secretKeyRef": {"name": f"{name_of(request)}-key", "key": "key"}}
    return {"name": KEY_VARIABLE, "valueFrom": source}


def _index() -> dict[str, Any]:
    """Kubernetes expands ``$(…)`` in a command from variables that stand in the manifest."""
    annotation = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    source = {"fieldRef": {"fieldPath": annotation}}
    return {"name": "JOB_COMPLETION_INDEX", "valueFrom": source}


def _resources(request: BatchRequest) -> dict[str, Any]:
    limits: dict[str, str] = {}
    if request.mem:
        limits["memory"] = _quantity(request.mem)
    if request.cpus_per_task:
        limits["cpu"] = str(request.cpus_per_task * (processes_of(request) or 1))
    if gpus := gpus_of(request):
        limits["nvidia.com/gpu"] = str(gpus)
    return {"limits": limits} if limits else {}


def _quantity(size: str) -> str:
    """Kubernetes writes ``16Gi`` where people write ``16G`` and Docker ``16g``."""
    return re.sub(r"(?<=\d)([kmgtKMGT])[bB]?$", lambda unit: unit.group(1).upper() + "i", size)


SCHEDULER = Kubernetes()
