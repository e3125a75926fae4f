"""Tests that a job and its hosts are equal after conversion to JSON and back."""

from __future__ import annotations

import json

import pytest

from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Data, Entry, Environment, Input, Job, NodeRange
from paceline.spec.serialization import from_jsonable, to_jsonable
from paceline.spec.settings import Setting, Source

JOB = Job(
    "train", Entry("script", "train.py", ("--lr", "0.1")), "/home/ada/my project", "python3",
    Environment({"A": "1", "is": "odd"}, {"TOKEN": "s3cret"}, ("B",), Source.FILE),
    nproc_per_node=Setting("auto", Source.COMMAND_LINE, "-p"), nnodes=Setting(NodeRange(1, 3)),
    activate=Setting(("/opt/vars.sh",)), preload=("torch",), inputs=(Input("/data", ("x", "y")),),
    data=Data("/d", {"d/": ""}),
)  # fmt: skip
CLUSTER = Cluster((Host("n1", env={"X": "y"}), Host("n2", "10.0.0.2", 4, port=22)), "list", ("a",))


@pytest.mark.parametrize("value", [JOB, CLUSTER])
def test_job_and_cluster_round_trip_through_json(value: object) -> None:
    assert from_jsonable(json.loads(json.dumps(to_jsonable(value)))) == value


@pytest.mark.parametrize("document", [{"is": "Popen"}, {"name": "x"}, {"is": "Host", "shell": "x"}])
def test_rejects_unknown_types_and_fields(document: object) -> None:
    with pytest.raises(ValueError):
        from_jsonable(document)
