"""Tests which values of a job are secrets that no file may show."""

from __future__ import annotations

import pytest

from paceline.launch.launcher import secrets_of
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Entry, Environment, Job, mask_assignments, redact


def test_short_values_are_not_secrets() -> None:
    """An empty string or a digit would be removed from every line."""
    variables = {"API_KEY": "", "A_TOKEN": "1", "B_TOKEN": "long-enough"}
    job = Job("j", Entry("script", "x.py"), "/", "python3", Environment(variables), notify=(
        "https://hooks.example.com/x", "mail me"))  # fmt: skip
    cluster = Cluster((Host("n1", env={**variables, "B_TOKEN": "another-one"}),), "here")
    assert secrets_of(job, cluster) == ("long-enough", "another-one", "https://hooks.example.com/x")


@pytest.mark.parametrize(
    "name",
    ["MYSQL_PWD", "GH_PAT", "PAT", "COOKIE", "session_cookies", "DB_PW2", "AWS_CREDS", "MY_JWT"],
)
def test_secret_is_recognised_by_word_of_name(name: str) -> None:
    assert redact(name, "correct-horse") == "(not recorded)"
    assert Environment({name: "correct-horse"}).secrets() == ("correct-horse",)


@pytest.mark.parametrize(
    "name", ["PWD", "OLDPWD", "PATH", "PYTHONPATH", "PATTERN", "PATIENCE", "EARLY_STOP_PATIENCE"]
)
def test_part_of_word_makes_no_secret(name: str) -> None:
    assert redact(name, "/home/me/project") == "/home/me/project"
    assert Environment({name: "/home/me/project"}).secrets() == ()


@pytest.mark.parametrize(
    ("value", "shown", "secrets"),
    [
        ("postgres://u:hunter22@h/db", "postgres://u:[secret]@h/db", ("//u:hunter22@", "hunter22")),
        ("redis://:p%40ssword@h", "redis://:[secret]@h",
         ("//:p%40ssword@", "p%40ssword", "p@ssword")),
        ("amqp://u:pw@h", "amqp://u:[secret]@h", ("//u:pw@",)),
        ("http://u:a@b@proxy:3128", "http://u:[secret]@proxy:3128", ("//u:a@b@",)),
        ("https://ghp0123456789abcdef@github.com/x", "https://[secret]@github.com/x",
         ("ghp0123456789abcdef",)),
        ("ssh://me@h", "ssh://me@h", ()),
        ("http://h:80/a@b", "http://h:80/a@b", ()),
    ],
)  # fmt: skip
def test_login_in_url_is_not_recorded(value: str, shown: str, secrets: tuple[str, ...]) -> None:
    environment = Environment({"DBURL": value})
    assert environment.redacted() == {"DBURL": shown}
    assert environment.secrets() == secrets
    assert Environment(forwarded={"DBURL": value}).forwarded_secrets() == (
        ("DBURL",) if secrets else ()
    )


def test_short_secrets_are_masked_in_command_line() -> None:
    argv = ["paceline", "run", "--env", "A_TOKEN=x1", "--env=B_PWD=", "--env", "LR=x1", "--env",
            "C_KEY", "--env", "URL=ftp://a:b@h", "x.py", "D_KEY=x1"]  # fmt: skip
    assert mask_assignments(argv) == [
        "paceline", "run", "--env", "A_TOKEN=[secret]", "--env=B_PWD=[secret]", "--env", "LR=x1",
        "--env", "C_KEY", "--env", "URL=ftp://a:[secret]@h", "x.py", "D_KEY=x1",
    ]  # fmt: skip
