"""What of a job no file may show."""

from __future__ import annotations

from paceline.launch.launcher import secrets_of
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Entry, Environment, Job


def test_a_value_that_stands_everywhere_is_no_secret() -> None:
    """An empty one, or a digit, would be struck out of every line."""
    about = {"API_KEY": "", "A_TOKEN": "1", "B_TOKEN": "long-enough"}
    job = Job("j", Entry("script", "x.py"), "/", "python3", Environment(about), notify=(
        "https://hooks.example.com/x", "mail me"))  # fmt: skip
    cluster = Cluster((Host("n1", env={**about, "B_TOKEN": "another-one"}),), "here")
    assert secrets_of(job, cluster) == ("long-enough", "another-one", "https://hooks.example.com/x")
