"""Pods that a Kubernetes training operator or an indexed Job numbers.

The variables give the number of pods and the name of the first; pod names follow a pattern:

* Kubeflow PyTorchJob: ``NAME-master-0``, then ``NAME-worker-0``, ``NAME-worker-1``, …
* TrainJob and JobSet: ``NAME-node-0-0.NAME``, ``NAME-node-0-1.NAME``, …
* indexed Job or StatefulSet with a headless service: ``NAME-0.SERVICE``, ``NAME-1.SERVICE``, …
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.hosts.address import check_address
from paceline.hosts.dialect import Dialect, Parsed, Reading, UnreadableError
from paceline.hosts.nodelist import MAX_HOSTS
from paceline.spec.errors import HostsError
from paceline.spec.hosts import Host

MARK = "KUBERNETES_SERVICE_HOST"  # the kubelet sets it in every pod
NODES = ("PET_NNODES", "NNODES")
FIRST = ("PET_MASTER_ADDR", "MASTER_ADDR")
SLOTS = ("PET_NPROC_PER_NODE", "NPROC_PER_NODE", "LOCAL_WORLD_SIZE")
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})  # what a master pod may be told
_MASTER = re.compile(r"(.+)-master-0((?:\..+)?)")
_INDEXED = re.compile(r"([^.]+-)0((?:\..+)?)")


def detect(reading: Reading) -> bool:
    """Whether this is a pod whose variables count the job's pods."""
    environ = reading.environ
    return not reading.text and MARK in environ and _first_of(environ, NODES) != ""


def parse(reading: Reading) -> Parsed:
    """Returns the pods in rank order; raises HostsError if number or names are unknown."""
    environ = reading.environ
    min_pods, max_pods = _nodes(environ)
    first = _first_pod(environ, reading.hostname)
    names = [_checked(name) for name in pod_names(first, max_pods)]
    slots = _first_of(environ, SLOTS)
    count = int(slots) if slots.isdecimal() and int(slots) > 0 else None
    hosts = tuple(Host(name, slots=count) for name in names)
    return Parsed(hosts, _notes(first, min_pods, max_pods))


def pod_names(first: str, count: int) -> list[str]:
    """Returns the names of all pods, derived from the first one's."""
    if count == 1:
        return [first]
    master = _MASTER.fullmatch(first)
    if master:
        return [first, *(f"{master[1]}-worker-{i}{master[2]}" for i in range(count - 1))]
    indexed = _INDEXED.fullmatch(first)
    if indexed:
        return [f"{indexed[1]}{i}{indexed[2]}" for i in range(count)]
    raise _unknown_pods(f"the first pod is `{first}`, which ends in no number")


def _nodes(environ: Mapping[str, str]) -> tuple[int, int]:
    """Returns the minimum and maximum of pods; a PyTorchJob's WORLD_SIZE counts pods, too."""
    text = _first_of(environ, NODES)
    if not text and "JOB_COMPLETION_INDEX" not in environ:
        text = environ.get("WORLD_SIZE", "")
    match = re.fullmatch(r"([0-9]{1,5})(?::([0-9]{1,5}))?", text)
    min_pods, max_pods = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= min_pods <= max_pods <= MAX_HOSTS:
        raise _unknown_pods(f"the number of pods is not known: PET_NNODES={text or '(not set)'}")
    return min_pods, max_pods


def _first_pod(environ: Mapping[str, str], hostname: str) -> str:
    address = _first_of(environ, FIRST)
    if address and address not in _LOCAL:
        return address
    endpoint = environ.get("PET_RDZV_ENDPOINT", "").rpartition(":")[0]
    if endpoint and endpoint not in _LOCAL:
        return endpoint
    index = environ.get("JOB_COMPLETION_INDEX") or environ.get("PET_NODE_RANK", "")
    stem, dash, number = hostname.rpartition("-")
    return f"{stem}-0" if dash and index and number == index else hostname


def _notes(first: str, min_pods: int, max_pods: int) -> tuple[str, ...]:
    derived = f"pod names made from the first one's, `{first}`"
    range_note = f"the job may run on {min_pods} to {max_pods} pods: all {max_pods} are listed"
    return (*[derived] * (max_pods > 1), *[range_note] * (min_pods < max_pods))


def _first_of(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def _checked(name: str) -> str:
    try:
        return check_address(name)
    except UnreadableError as problem:
        raise _unknown_pods(f"`{name}` is not {problem.expected}") from None


def _unknown_pods(reason: str) -> HostsError:
    return HostsError(
        "the pods of a Kubernetes job cannot be told from its variables",
        found=reason,
        remedy="set PET_NNODES and PET_MASTER_ADDR in the pod, or name the hosts: `-H pod-0,pod-1`",
    )


DIALECT = Dialect(
    name="kubernetes",
    title="variables of a Kubernetes job",
    detect=detect,
    parse=parse,
    is_environment=True,
)
