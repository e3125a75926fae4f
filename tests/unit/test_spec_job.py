"""Tests which values of a job are secrets that no file may show."""

from __future__ import annotations

from paceline.launch.launcher import secrets_of
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Entry, Environment, Job


def test_short_values_are_not_secrets() -> None:
    """An empty string or a digit would be removed from every line."""
    variables = {"API_KEY": "", "A_TOKEN": "1", "B_TOKEN": "long-enough"}
    job = Job("j", Entry("script", "x.py"), "/", "python3", Environment(variables), notify=(
        "https://hooks.example.com/x", "mail me"))  # fmt: skip
    cluster = Cluster((Host("n1", env={**variables, "B_TOKEN": "another-one"}),), "here")
    assert secrets_of(job, cluster) == ("long-enough", "another-one", "https://hooks.example.com/x")
