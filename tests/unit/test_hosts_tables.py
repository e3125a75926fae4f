"""Tests the host tables of paceline.toml, and how the local machine is recognised."""

from __future__ import annotations

from pathlib import Path

import pytest

from each_case import each_case
from paceline.hosts import apply_overrides, find_local_host, load_toml
from paceline.spec.errors import HostsError
from paceline.spec.hosts import Cluster, Host

CLUSTER = Cluster((Host("n1", slots=1), Host("n2", slots=1, port=22)), notes=("a note",))


def test_tables_override_host_description() -> None:
    tables = {"n2": {"python": "/opt/py", "slots": 4, "key": "~/.ssh/n2"}, "n7": {"slots": 1}}
    cluster = apply_overrides(CLUSTER, {"hosts": tables, "run": {"nnodes": 2}})
    assert cluster.hosts[0] == CLUSTER.hosts[0]
    assert cluster.hosts[1] == Host(
        "n2", slots=4, port=22, python="/opt/py", identity_file="~/.ssh/n2"
    )
    assert cluster.notes == CLUSTER.notes


def test_applies_environment_of_host() -> None:
    table = {"env": {"FI_PROVIDER": "tcp", "NCCL_IB_TC": 106}}
    n1, _ = apply_overrides(CLUSTER, {"hosts": {"n1": table}}).hosts
    assert n1.env == {"FI_PROVIDER": "tcp", "NCCL_IB_TC": "106"}


def test_table_may_be_named_by_address() -> None:
    cluster = Cluster((Host("n1", address="FD00::1"),))
    changed = apply_overrides(cluster, {"hosts": {"fd00::1": {"user": "ml"}}})
    assert changed.hosts[0].user == "ml"


def test_cluster_is_unchanged_if_no_table_applies() -> None:
    assert apply_overrides(CLUSTER, {}) == CLUSTER
    assert apply_overrides(CLUSTER, {"hosts": "hostfile"}) == CLUSTER


def test_suggests_host_for_misspelled_table() -> None:
    cluster = Cluster((Host("worker-a"), Host("worker-1")))
    tables = {"hosts": {"wroker-a": {"slots": 1}, "worker-2": {"slots": 1}}}
    assert apply_overrides(cluster, tables).notes == (
        "[hosts.wroker-a] in paceline.toml belongs to no host here; is `worker-a` meant?",
    )


@each_case(
    ("table", "said"),
    [
        ({"pyhton": "/x"}, "did you mean `python`"),
        ({"slots": 0}, "slots as a whole number"),
        ({"slots": True}, "slots as a whole number"),
        ({"port": "22"}, "port as a whole number"),
        ({"workdir": "here"}, "absolute path"),
        ({"python": ""}, "text in quotes"),
        ({"user": "-x"}, "login name"),
        ({"address": "-oProxyCommand=x"}, "a host name or an IP address"),
        ({"env": "A=1"}, r'a table: `\[hosts."n1".env\]`'),
        ({"env": {"A B": "1"}}, "the name of a variable"),
        ({"env": {"A": True}}, "text in quotes, or a number, for A"),
        ({"env": {"RANK": 1}}, "does not say a rank's place"),
        ({"env": {"example": {"org": {}}}}, r'quotes around .* `\[hosts."n1.env.example.org"\]`'),
        ("n1", "a table"),
    ],
)
def test_rejects_invalid_tables(table: object, said: str) -> None:
    with pytest.raises(HostsError, match=said) as caught:
        apply_overrides(CLUSTER, {"hosts": {"n1": table}})
    assert "[hosts.n1]" in caught.value.message


def test_loads_toml_and_reports_errors(tmp_path: Path) -> None:
    path = tmp_path / "paceline.toml"
    assert load_toml(path) == {}
    path.write_text("[run]\nnnodes = 2\n[hosts.n1]\nslots = 2\n")
    assert load_toml(path) == {"run": {"nnodes": 2}, "hosts": {"n1": {"slots": 2}}}
    path.write_text("[run]\nnnodes = 2\n[hosts.n1]\nslot = 2\n")
    with pytest.raises(HostsError, match=r"paceline.toml, line 4"):
        load_toml(path)
    for text in (f"[run]\na{' .a' * 30_000} = 1\n", f"[run]\nnnodes = {'9' * 5_000}\n"):
        path.write_text(text)
        with pytest.raises(HostsError, match=r"keys of at most 500|4300 digits"):
            load_toml(path)
    path.write_text(f"[run]\nhosts = '{' '.join(['10.0.0.1'] * 400)}'\n")
    assert load_toml(path)
    path.unlink()
    path.symlink_to("gone.toml")
    with pytest.raises(HostsError, match="is not a file"):
        load_toml(path)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("n1 n2", "n2"),
        ("n1 n2.example.org", "n2.example.org"),
        ("n1 N2", "N2"),
        ("n1 n22", None),
        ("10.0.0.1 10.0.0.2", "10.0.0.2"),
        ("10.0.0.1 fd00:0::2", "fd00:0::2"),
        ("127.0.0.1 n9", "127.0.0.1"),
        ("n2.example.org n2.example.com", None),
        ("a b", None),
    ],
)
def test_identifies_local_host(hosts: str, expected: str | None) -> None:
    cluster = Cluster(tuple(map(Host, hosts.split())))
    addresses = ["127.0.0.1", "127.0.1.1", "::1", "10.0.0.2", "fd00::2"]
    assert find_local_host(cluster, ["n2", "localhost"], addresses) == expected


@pytest.mark.parametrize("hosts", ["127.0.1.1 10.0.0.2", "localhost n2", "n2 127.0.0.1 n3"])
def test_rejects_two_names_of_local_machine(hosts: str) -> None:
    cluster = Cluster(tuple(map(Host, hosts.split())))
    with pytest.raises(HostsError, match="both this machine") as caught:
        find_local_host(cluster, ["n2", "localhost"], ["127.0.0.1", "127.0.1.1", "10.0.0.2"])
    assert "slots=2" in caught.value.remedy


def test_identifies_local_host_by_full_name() -> None:
    cluster = Cluster((Host("n2.example.com"), Host("n2.example.org")))
    assert find_local_host(cluster, ["n2", "n2.example.org"], []) == "n2.example.org"
    assert find_local_host(Cluster((Host("n1"), Host("n2"))), ["n2.example.org"], []) == "n2"


def test_container_ports_are_not_local_host() -> None:
    hosts = (Host("a", "localhost", port=2201), Host("b", "localhost", port=2202))
    assert find_local_host(Cluster(hosts), ["n2"], ["10.0.0.2"]) is None
    hosts = (Host("a", "10.0.0.2", port=2201), Host("b", "10.0.0.2", port=22))
    assert find_local_host(Cluster(hosts), ["n2"], ["10.0.0.2"]) == "b"
    assert find_local_host(Cluster((Host("a", "10.0.0.2", port=2201),)), [], ["10.0.0.2"]) == "a"
