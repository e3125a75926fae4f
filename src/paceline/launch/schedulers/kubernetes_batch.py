"""A JobSet manifest for Kubernetes. Rendered and schema-checked; not tried on a cluster.

Every pod runs the same command and they meet at the first pod's name, as nodes do on which it is
typed by hand.
"""

from __future__ import annotations

import json
import re
from typing import Any

from paceline.launch.schedulers.batch import BatchRequest, processes_of
from paceline.spec.errors import SettingError

PORT = 29400
WORD = "PACELINE_RDZV_ID"
_JOB = "node"


def render(request: BatchRequest) -> str:
    """Secret and JobSet as JSON documents, which are YAML too."""
    if not request.image:
        raise SettingError("Kubernetes needs an image", remedy="--image IMAGE")
    documents = [json.dumps(one, indent=2) for one in (secret(request), jobset(request))]
    return "---\n".join(f"{one}\n" for one in documents)


def name_of(request: BatchRequest) -> str:
    """As Kubernetes allows names: lower case, dashes, 40 characters."""
    name = re.sub(r"[^a-z0-9-]+", "-", request.name.lower()).strip("-")
    return name[:40].rstrip("-") or "paceline"


def secret(request: BatchRequest) -> dict[str, Any]:
    """The meeting's word; the placeholder is to be replaced before it is applied."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{name_of(request)}-word"},
        "stringData": {"word": "REPLACE-WITH-A-RANDOM-WORD"},
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
            "failurePolicy": {"maxRestarts": 3 if request.requeue else 0},
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
                "env": [_word(request), _index()],
                "ports": [{"containerPort": PORT}],
                "resources": _resources(request),
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108
            }
        ],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }


def _command(request: BatchRequest) -> list[str]:
    name = name_of(request)
    meeting = ["--rdzv", f"{name}-{_JOB}-0-0.{name}:{PORT}", "--nnodes", str(request.nodes)]
    meeting += ["--node-rank", "$(JOB_COMPLETION_INDEX)"]
    processes = processes_of(request)
    each = ["-p", str(processes)] if processes else []
    verb = request.argv[-1]
    return ["paceline", verb, "--run-dir", request.run_dir, *meeting, *each, *request.words]


def _word(request: BatchRequest) -> dict[str, Any]:
    source = {"secretKeyRef": {"name": f"{name_of(request)}-word", "key": "word"}}
    return {"name": WORD, "valueFrom": source}


def _index() -> dict[str, Any]:
    """Kubernetes expands ``$(…)`` in a command from variables that stand in the manifest."""
    annotation = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    source = {"fieldRef": {"fieldPath": annotation}}
    return {"name": "JOB_COMPLETION_INDEX", "valueFrom": source}


def _resources(request: BatchRequest) -> dict[str, Any]:
    limits: dict[str, str] = {}
    if request.mem:
        limits["memory"] = re.sub(r"(?<=[KMGT])B?$", "i", request.mem)
    if request.cpus_per_task:
        limits["cpu"] = str(request.cpus_per_task * (processes_of(request) or 1))
    if match := re.search(r"gpu(?::[\w.-]+)?:(\d+)", request.gres):
        limits["nvidia.com/gpu"] = match.group(1)
    return {"limits": limits} if limits else {}
