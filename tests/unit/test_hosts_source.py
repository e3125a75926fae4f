"""Tests the sources of hosts that ``-H`` accepts, and the hosts that are read from them."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline.hosts import read_hosts
from paceline.hosts.dialects import accelerate
from paceline.spec.errors import HostsError, SettingError
from paceline.spec.hosts import Cluster

SLURM = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
EMPTY: Mapping[str, str] = {}


def read(
    source: str | None,
    cwd: Path,
    environ: Mapping[str, str] = EMPTY,
    colon: str | None = None,
    dialect: str | None = None,
) -> Cluster:
    return read_hosts(source, environ=environ, cwd=cwd, colon=colon, dialect=dialect)


def slots(cluster: Cluster) -> dict[str, int | None]:
    return {host.name: host.slots for host in cluster.hosts}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hostfile").write_text("n1 slots=2\nn2 slots=2\n")
    (tmp_path / "machines.txt").write_text("n1:2\nn2:50022\n")
    return tmp_path


@pytest.mark.parametrize("source", [None, "local", "auto"])
def test_default_source_is_local_machine(source: str | None, tmp_path: Path) -> None:
    (host,) = read(source, tmp_path).hosts
    assert host.local
    assert host.name == os.uname().nodename.split(".")[0]


def test_allocation_is_suggested_but_not_used(tmp_path: Path) -> None:
    cluster = read(None, tmp_path, SLURM)
    assert cluster.hosts[0].local
    assert "-H slurm" in cluster.notes[0]


@pytest.mark.parametrize("source", ["slurm", "auto"])
def test_reads_allocation_by_keyword(source: str, tmp_path: Path) -> None:
    assert slots(read(source, tmp_path, SLURM)) == {"n1": 2, "n2": 2}


def test_environment_dialect_needs_no_source(tmp_path: Path) -> None:
    assert slots(read(None, tmp_path, SLURM, dialect="slurm")) == {"n1": 2, "n2": 2}


def test_keyword_has_precedence_over_file(tmp_path: Path) -> None:
    (tmp_path / "slurm").write_text("a\n")
    assert slots(read("slurm", tmp_path, SLURM)) == {"n1": 2, "n2": 2}
    assert slots(read("./slurm", tmp_path, SLURM)) == {"a": None}


def test_host_may_have_name_of_dialect(tmp_path: Path) -> None:
    assert slots(read("slurm,", tmp_path)) == {"slurm": None}
    assert slots(read("slurm:4", tmp_path)) == {"slurm": 4}


@pytest.mark.parametrize("source", ["hostfile", "./hostfile", "slots:hostfile", "openmpi:hostfile"])
def test_reads_host_file(source: str, folder: Path) -> None:
    cluster = read(source, folder)
    assert slots(cluster) == {"n1": 2, "n2": 2}
    assert cluster.source.endswith("hostfile (host file of Open MPI or DeepSpeed)")


def test_reads_absolute_path(folder: Path) -> None:
    assert slots(read(str(folder / "hostfile"), Path("/"))) == {"n1": 2, "n2": 2}


@pytest.mark.parametrize(
    ("colon", "expected"),
    [
        (None, {"n1": (2, None), "n2": (None, 50022)}),
        ("port", {"n1": (None, 2), "n2": (None, 50022)}),
        ("rendezvous", {"n1": (None, None), "n2": (None, None)}),
    ],
)
def test_colon_option(colon: str | None, expected: object, folder: Path) -> None:
    cluster = read("machines.txt", folder, colon=colon)
    assert {h.name: (h.slots, h.port) for h in cluster.hosts} == expected
    assert bool(cluster.notes) is (colon is None)


def test_rejects_port_as_slots(folder: Path) -> None:
    with pytest.raises(HostsError, match=r"machines.txt, line 2"):
        read("machines.txt", folder, colon="slots")


def test_dialect_determines_meaning_of_colon(tmp_path: Path) -> None:
    assert slots(read("a:22,b:22", tmp_path, dialect="mpich")) == {"a": 22, "b": 22}
    assert read("a:2,b:2", tmp_path, dialect="port").hosts[0].port == 2
    assert read("a:29500,b", tmp_path, dialect="tlt").hosts[0].port is None


@pytest.mark.parametrize(
    "source",
    ["hosts.txt", "hostfil", "hostfile2x/y", "./n1", "~/none", "machine.txt", "paceline.toml"],
)
def test_missing_file_is_not_read_as_host(source: str, folder: Path) -> None:
    with pytest.raises(HostsError, match="there is no host file"):
        read(source, folder)


def test_suggests_similar_file_name(folder: Path) -> None:
    with pytest.raises(HostsError, match="did you mean `hostfile`"):
        read("hostfil", folder)
    with pytest.raises(HostsError, match=r"write `hosts\.txt,`"):
        read("hosts.txt", folder)
    assert slots(read("hosts.txt,", folder)) == {"hosts.txt": None}


@pytest.mark.parametrize("source", ["n1", "node2", "host1", "n1.example.org", "gpu"])
def test_single_host_is_noted(source: str, folder: Path) -> None:
    (folder / "node1").touch()
    cluster = read(source, folder)
    assert slots(cluster) == {source: None}
    assert "was read as one host" in cluster.notes[0]


def test_rejects_folder_as_host_file(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    with pytest.raises(HostsError, match="write `cluster,`"):
        read("cluster", tmp_path)


@pytest.mark.parametrize("content", ["", "\n \n", "# nothing\n", "[hosts]\n", "Host *\n User a\n"])
def test_rejects_empty_host_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(content)
    with pytest.raises(HostsError, match="no hosts in it"):
        read("hosts", tmp_path, {"PBS_NODEFILE": "/nowhere"})


@pytest.mark.parametrize(
    ("content", "line"),
    [(b"n1\nn\xe9\n", 2), (b"n1\nn2\0\n", 2), (b"\x7fELF\x02\x01\0", 1)],
)
def test_rejects_binary_file(content: bytes, line: int, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(content)
    with pytest.raises(HostsError, match=f"hosts, line {line}:"):
        read("hosts", tmp_path)


def test_reads_utf16_file(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n1\r\nn2\r\n", encoding="utf-16")
    assert slots(read("hosts", tmp_path)) == {"n1": None, "n2": None}


def test_rejects_yaml_alias_bombs(tmp_path: Path) -> None:
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    lists = "\n".join(["a0: &a0 [x]", *levels, "hosts: *a11", ""])
    groups = [f"g{n}: &g{n} {{children: {{a: *g{n - 1}, b: *g{n - 1}}}}}" for n in range(1, 40)]
    nested = "\n".join(["g0: &g0 {hosts: [n1]}", *groups, ""])
    for text in (lists, nested, "hosts: &a [*a]\n"):
        (tmp_path / "hosts.yaml").write_text(text)
        with pytest.raises(HostsError):
            read("hosts.yaml", tmp_path)


def test_rejects_yaml_with_too_many_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate, "_MAX_YAML_NODES", 1_000)
    (tmp_path / "hosts.yaml").write_text("num_machines: [" + "?," * 1_000 + "]\n")
    with pytest.raises(HostsError, match="cannot be read") as caught:
        read("hosts.yaml", tmp_path)
    assert "at most 1,000 nodes" in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [":".join(["1"] * 40_000), "9" * 5_000, f"'{'9' * 5_000}'", "!!bool x", "!!int ''"],
    ids=["base 60", "digits", "quoted digits", "no boolean", "no integer"],
)
def test_rejects_yaml_values_that_cannot_be_constructed(value: str, tmp_path: Path) -> None:
    (tmp_path / "hosts.yaml").write_text(f"num_processes: 1\nnum_machines: {value}\n")
    with pytest.raises(HostsError, match=r"hosts\.yaml, line [12]: cannot be read"):
        read("hosts.yaml", tmp_path)


def test_handles_cyclic_and_deep_inventory_groups(tmp_path: Path) -> None:
    """There are many more paths through the groups than groups."""
    names = [f"g{number}" for number in range(14)]
    groups = [f"[{name}:children]\n" + "\n".join(names) for name in names]
    (tmp_path / "inv.ini").write_text("\n".join(["[g0]", "n1 ansible_port=2222", *groups]))
    assert [host.port for host in read("inv.ini", tmp_path).hosts] == [2222]
    chain = [f"[c{number}:children]\nc{number + 1}" for number in range(2000)]
    (tmp_path / "inv.ini").write_text("\n".join(["[c2000]", "n1", *chain]))
    with pytest.raises(HostsError, match="too many groups within groups"):
        read("inv.ini", tmp_path)


def test_host_limit_spans_lines(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("".join(f"h{n}-[1-60000]\n" for n in range(1000)))
    with pytest.raises(HostsError, match="hosts, line 2"):
        read("hosts", tmp_path)


def test_rejects_pipes_and_devices(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(HostsError, match="is a named pipe"):
        read("./pipe", tmp_path)
    with pytest.raises(HostsError, match="is a device"):
        read("slurm:/dev/zero", tmp_path)
    (tmp_path / "config").write_text(f"Include {tmp_path}/pipe\nHost n1\n")
    assert read("ssh-config:config", tmp_path).hosts[0].name == "n1"


def test_rejects_huge_file(tmp_path: Path) -> None:
    with (tmp_path / "hosts").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(HostsError, match="not a host file"):
        read("hosts", tmp_path)


def test_reads_file_named_by_pbs(tmp_path: Path) -> None:
    (tmp_path / "17.server").write_text("n1\nn1\nn2\n")
    environ = {"PBS_NODEFILE": str(tmp_path / "17.server")}
    for source in ("pbs", "auto"):
        assert slots(read(source, Path("/"), environ)) == {"n1": 2, "n2": 1}
    with pytest.raises(HostsError, match="does not exist"):
        read("pbs", tmp_path, {"PBS_NODEFILE": "/nowhere/17"})


def test_accelerate_host_file_is_relative_to_config(folder: Path) -> None:
    text = "num_machines: 2\ndeepspeed_config:\n  deepspeed_hostfile: hostfile\n"
    (folder / "acc").mkdir()
    (folder / "acc" / "default_config.yaml").write_text(text)
    (folder / "acc" / "hostfile").write_text("x slots=1\ny slots=1\n")
    for source in ("acc/default_config.yaml", "accelerate:acc/default_config.yaml"):
        cluster = read(source, folder)
        assert slots(cluster) == {"x": 1, "y": 1}
        assert "→ hostfile" in cluster.source


def test_reads_file_named_by_intel_mpi(folder: Path) -> None:
    environ = {"I_MPI_HYDRA_HOST_FILE": str(folder / "machines.txt")}
    with pytest.raises(HostsError, match="line 2"):  # Intel MPI reads `n2:50022` as 50022 slots
        read("mpi", folder, environ)


def test_ssh_config_with_include(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "more").write_text("Host n2\n Port 22\nInclude more\n")
    (tmp_path / "config").write_text("Include more nothing-*\nHost n1 *.org\n  Port 22\n")
    for source in ("ssh-config:config", "ssh-config:~/config", "config"):
        assert list(slots(read(source, tmp_path))) == ["n2", "n1"]


def test_ports_distinguish_hosts_of_equal_address(tmp_path: Path) -> None:
    hosts = read("localhost:2201,localhost:2202,localhost", tmp_path).hosts
    assert [host.name for host in hosts] == ["localhost:2201", "localhost:2202", "localhost"]
    assert {host.address for host in hosts} == {"localhost"}


def test_rejects_unknown_option_values(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="one of slots, port, rendezvous"):
        read("a:2", tmp_path, colon="ports")
    with pytest.raises(SettingError, match="did you mean `slurm`"):
        read("a:2", tmp_path, dialect="slrum")


@pytest.mark.parametrize(
    "source", ["", " ", "n1 n2", "n1;;n2", "-n1", "$(id)", "n1\nn2&", "n1:", "user@@n1", "a..b,"]
)
def test_rejects_hostile_lists(source: str, tmp_path: Path) -> None:
    with pytest.raises(HostsError):
        read(source, tmp_path)


def test_reading_leaves_file_unchanged(folder: Path) -> None:
    path = folder / "tlt"
    path.write_bytes(b"\xef\xbb\xbf10.0.0.1:29500\r\n10.0.0.2\r\n\r\n")
    initial_state = hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns
    path.chmod(0o444)
    assert [h.name for h in read("tlt:tlt", folder).hosts] == ["10.0.0.1", "10.0.0.2"]
    assert (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) == initial_state
    assert sorted(p.name for p in folder.iterdir()) == ["hostfile", "machines.txt", "tlt"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hosts.yaml", "n1:\n  slots: 2\nn2:\n  slots: 2\n"),
        ("hosts.yml", "workers: [n1 slots=2, n2 slots=2]\n"),
        ("hosts.json", '{"n1": 2, "n2": 2}'),
        ("inventory.ini", "[gpu]\nn[1:2] slots=2\n"),
        ("hosts.csv", "host,slots\nn1,2\nn2,2\n"),
    ],
)
def test_reads_yaml_json_ini_and_csv(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert slots(read(name, tmp_path)) == {"n1": 2, "n2": 2}


def test_missing_referenced_host_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("num_machines: 2\ndeepspeed_hostfile: /nowhere/hosts\n")
    with pytest.raises(HostsError, match=r"c\.yaml .* names the host file /nowhere/hosts"):
        read("c.yaml", tmp_path)


@pytest.mark.parametrize(
    "text", ["\n", "Host a " + " " * 300_000 + "b\n", "a,", "[", "{" + "," * 300_000, "a = ,"]
)
def test_a_file_of_one_repeated_sign_is_answered_in_linear_time(text: str, tmp_path: Path) -> None:
    """With quadratic time, each takes a minute or longer."""
    (tmp_path / "hosts").write_text("n1 x y\n" + text * (300_000 // len(text) or 1))
    began = time.process_time()
    with pytest.raises(HostsError):
        read("hosts", tmp_path)
    assert time.process_time() - began < 10
