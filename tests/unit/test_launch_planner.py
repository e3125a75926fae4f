"""Tests how job, hosts and facts become a plan: reproducible, and never less than requested."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.cli.verbs.run import data_note, data_of, misplaced_note
from paceline.launch.nodes import survey
from paceline.launch.nodes.survey import host_names
from paceline.launch.planning import placement, plan_text, planner
from paceline.launch.planning.entry import entry_argv, local_rank_flag, opens_store
from paceline.launch.planning.placement import HostSurvey, Place, Supplies
from paceline.launch.planning.request import Request
from paceline.recipes.data import local_path
from paceline.remote.network import NodeNetwork
from paceline.remote.transport import Transport
from paceline.spec.errors import NodeError, SettingError
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Data, Entry, Environment, Input, Job, parse_processes
from paceline.spec.launchers import MPI_DIALECTS
from paceline.spec.plan import Copy, Plan
from paceline.spec.settings import Setting, Source
from paceline.transfer.data import DataPlace
from paceline.transfer.tree import Tree

ENTRY = Entry("script", "train.py", ("a b", ";", "", "ü"))


def job(**fields: Any) -> Job:
    base: dict[str, Any] = {"name": "t", "entry": ENTRY, "workdir": "/w", "python": "/py"}
    return Job(**{**base, **fields})


def cli_setting(value: Any) -> Setting[Any]:
    return Setting(value, Source.COMMAND_LINE)


def facts(cpus: int = 4, gpus: int = 0, torch: str | None = "2.13.0+cpu",
          python: str = "3.11.7") -> dict[str, Any]:  # fmt: skip
    return {
        "cpu": {"available": list(range(cpus))},
        "devices": {
            "gpus": [
                {"maker": "nvidia", "device": f"nvidia{n}", "pci": "", "node": -1}
                for n in range(gpus)
            ]
        },
        "torch": {"version": torch} if torch else None,
        "python": {"executable": "/py", "version": python},
    }


def plan(the_job: Job, hosts: tuple[Host, ...] = (Host("n1"), Host("n2")),
         per_host: dict[str, Any] | None = None) -> Plan:  # fmt: skip
    names = [host.name for host in hosts]
    found = per_host or {name: facts() for name in names}
    surveyed = [
        HostSurvey(host, found[host.name], NodeNetwork(f"10.0.0.{at}", "eth0", "tried"))
        for at, host in enumerate(hosts, 1)
    ]
    port = Setting(29400, Source.FOUND, "free")
    return planner.make_plan(the_job, "run1", surveyed, Supplies(), port, ["a note"])


# --- RDMA cards


CARD = {"name": "mlx5_0", "port": 1, "active": True, "speed": 200000, "interfaces": [],
        "fabric": "InfiniBand fe80:0000:0000:0000, subnet manager 0x1", "gids": []}  # fmt: skip


def test_gpu_nodes_get_connecting_rdma_ports() -> None:
    observed = {name: {**facts(gpus=1), "rdma": [CARD]} for name in ("n1", "n2")}
    hca = [node.env["NCCL_IB_HCA"] for node in plan(job(), per_host=observed).nodes]
    assert [setting.value for setting in hca] == ["=mlx5_0:1"] * 2
    assert "subnet manager 0x1" in hca[0].detail
    hosts = (Host("n1", env={"NCCL_NET": "Socket"}), Host("n2"))
    configured = plan(job(), hosts, observed)
    assert all("NCCL_IB_HCA" not in node.env for node in configured.nodes)


def newcomer(the_job: Job, *cards: object) -> planner.NodePlan:
    """Returns the plan of n3, which joins the running n1 and n2."""
    observed = {name: {**facts(gpus=1), "rdma": [CARD]} for name in ("n1", "n2")}
    running = plan(the_job, per_host=observed).nodes
    all_facts = {**observed, "n3": {**facts(gpus=1), "rdma": [*cards]}}
    network = NodeNetwork("10.0.0.9", "eth0", "tried")
    *existing, joining = (
        HostSurvey(Host(name), host_facts, network) for name, host_facts in all_facts.items()
    )
    members = list(zip(existing, running, strict=True))
    return planner.newcomer_part(the_job, joining, Supplies(), "run1", 2, [2], members)


def test_joining_host_needs_reachable_rdma_port() -> None:
    assert newcomer(job(), CARD).env["NCCL_IB_HCA"].value == "=mlx5_0:1"
    with pytest.raises(NodeError, match="n3 has no RDMA port on the network of the running hosts"):
        newcomer(job())
    with_socket = job(environment=Environment({"NCCL_NET": "Socket"}))
    assert "NCCL_IB_HCA" not in newcomer(with_socket, CARD).env


# --- number of processes


def test_process_count_precedence() -> None:
    slots, default_host = Host("a", slots=3), Host("b")
    assert planner.processes_on(job(nproc_per_node=cli_setting(2)), slots, facts()).value == 2
    assert planner.processes_on(job(), slots, facts(gpus=8)).value == 3
    assert planner.processes_on(job(), default_host, facts(gpus=8)).value == 8
    one = planner.processes_on(job(), default_host, facts())
    assert (one.value, one.source) == (1, Source.DEFAULT)


@pytest.mark.parametrize("count", [0, -1, "-1", "many", 1.5, True, ""])
def test_rejects_invalid_process_counts(count: object) -> None:
    with pytest.raises(ValueError, match=r"less than 1|neither a number"):
        parse_processes(count)


def test_parses_process_counts() -> None:
    assert [parse_processes(count) for count in (2, "4", "auto")] == [2, 4, "auto"]


@pytest.mark.parametrize(("hard", "max_count"), [(1024, 224), (4096, 992), (-1, None)])
def test_open_file_limit_bounds_processes_of_host(hard: int, max_count: int | None) -> None:
    observed = {**facts(), "limits": {"nofile_hard": hard}}
    assert planner.max_processes(observed) == max_count
    large = job(nproc_per_node=cli_setting(2000))
    if max_count is None:
        assert planner.processes_on(large, Host("a"), observed).value == 2000
        return
    with pytest.raises(SettingError, match="2000 processes were asked for on a") as caught:
        planner.processes_on(large, Host("a"), observed)
    assert f"--nproc-per-node {max_count}" in caught.value.remedy
    assert (
        planner.processes_on(job(nproc_per_node=cli_setting(max_count)), Host("a"), observed).value
        == max_count
    )


def test_command_line_overrides_scheduler_tasks() -> None:
    tasks = Host("a", slots=2, slots_yield=True)
    assert planner.processes_on(job(), tasks, facts()).value == 2
    assert planner.processes_on(job(nproc_per_node=cli_setting(4)), tasks, facts()).value == 4
    (note,) = planner.slot_notes(job(nproc_per_node=cli_setting(4)), (tasks,))
    assert "tasks are fewer: a 2" in note
    assert planner.slot_notes(job(nproc_per_node=cli_setting(2)), (tasks,)) == []
    assert planner.slot_notes(job(), (tasks,)) == []


def test_allocated_gpus_determine_process_count() -> None:
    """Only the allocated GPUs count, even if the host reports none."""
    allocated = Host("a", gpus=2)
    for observed in (0, 2, 8):
        found = planner.processes_on(job(), allocated, facts(gpus=observed))
        assert (found.value, found.detail) == (2, "one a GPU of the allocation")
    assert planner.processes_on(job(), replace(allocated, slots=3), facts(gpus=8)).value == 3
    assert (
        planner.processes_on(job(nproc_per_node=cli_setting("gpu")), allocated, facts(gpus=8)).value
        == 2
    )
    assert len(planner.usable_gpus(job(), allocated, facts(gpus=8))) == 2


def test_cuda_visible_devices_selects_usable_gpus() -> None:
    """Slurm sets the variable for a step; the node may have more GPUs."""

    def count(value: str, **environment: Any) -> int:
        observed = {**facts(gpus=8), "environment": {"CUDA_VISIBLE_DEVICES": value}}
        job_with_env = job(environment=Environment(**environment))
        return len(planner.usable_gpus(job_with_env, Host("a"), observed))

    assert (count("4,5"), count("NoDevFiles"), count("")) == (2, 0, 0)
    assert count("4,5", public={"CUDA_VISIBLE_DEVICES": "6"}) == 1
    assert count("4,5", unset=("CUDA_VISIBLE_DEVICES",)) == 8


def test_notes_gpus_invisible_to_torch() -> None:
    hosts = (Host("a", gpus=2), Host("b", gpus=2), Host("c"))

    def notes(gpus: int, cuda: str | None = "13.0") -> list[str]:
        torch = {"version": "2.13.0+cpu", "cuda": cuda, "hip": None}
        devices = {"gpus": [{"maker": "nvidia"}] * gpus, "nvidia_driver": None}
        return planner.gpu_notes(hosts, [{**facts(), "devices": devices, "torch": torch}] * 3)

    (note,) = notes(0)
    assert note.startswith("torch sees no GPU on a, b, though the allocation has GPUs there (no /")
    assert note.endswith("the ranks compute on CPUs")
    assert "torch 2.13.0+cpu is built without GPUs" in notes(2, None)[0]
    assert notes(2) == []
    assert planner.gpu_notes(hosts, [{**facts(), "devices": None}] * 3) == []


def test_process_count_from_cpu_gpu_and_auto() -> None:
    def count(kind: str, gpus: int, **fields: Any) -> int:
        requested = job(nproc_per_node=cli_setting(kind), **fields)
        return planner.processes_on(requested, Host("a"), facts(cpus=4, gpus=gpus)).value

    assert (count("cpu", 2), count("gpu", 2), count("auto", 2), count("auto", 0)) == (4, 2, 2, 4)
    visible_gpu = Environment({"CUDA_VISIBLE_DEVICES": "1"})
    assert (
        count("gpu", 2, environment=visible_gpu),
        count("auto", 2, environment=visible_gpu),
    ) == (1, 1)
    with pytest.raises(SettingError, match="a has no GPU"):
        count("gpu", 0)
    no_gpus = Environment({"CUDA_VISIBLE_DEVICES": ""})
    assert count("auto", 2, environment=no_gpus) == 4
    with pytest.raises(SettingError, match="no GPU"):
        count("gpu", 2, environment=no_gpus)


def test_rejects_more_processes_than_slots() -> None:
    with pytest.raises(SettingError) as caught:
        planner.processes_on(job(nproc_per_node=cli_setting(4)), Host("a", slots=2), facts())
    assert "a has 2 slots" in caught.value.found


def test_rejects_more_nodes_than_hosts() -> None:
    cluster = Cluster((Host("n1"), Host("n2")), "hostfile")
    assert len(planner.choose_hosts(job(), cluster)) == 2
    assert planner.choose_hosts(job(nnodes=cli_setting(1)), cluster) == cluster.hosts[:1]
    with pytest.raises(SettingError, match="3 nodes"):
        planner.choose_hosts(job(nnodes=cli_setting(3)), cluster)
    with pytest.raises(SettingError):
        planner.choose_hosts(job(nnodes=cli_setting(0)), cluster)


# --- threads and CPUs


@pytest.mark.parametrize(("cpus", "processes", "threads"), [(8, 2, "4"), (2, 3, "1"), (0, 1, "1")])
def test_omp_threads_equal_cores_of_rank(cpus: int, processes: int, threads: str) -> None:
    env = planner.node_env(job(), Host("n1"), facts(cpus), processes, None)
    assert env["OMP_NUM_THREADS"].value == threads


def test_cpu_binding_can_be_disabled() -> None:
    two = job(nproc_per_node=cli_setting(2))
    assert plan(two).nodes[0].ranks[1].cpus == (2, 3)
    without_binding = job(nproc_per_node=cli_setting(2), bind=cli_setting("none"))
    assert plan(without_binding).nodes[0].ranks[1].cpus == ()


def test_ranks_are_bound_to_numa_node_of_gpu() -> None:
    observed = facts(gpus=2)
    observed["cpu"]["nodes"] = {"0": [0, 1], "1": [2, 3]}
    observed["devices"]["gpus"][0]["node"], observed["devices"]["gpus"][1]["node"] = 1, 0
    result = plan(job(), per_host={"n1": observed, "n2": observed})
    assert [rank.cpus for rank in result.nodes[0].ranks] == [(2, 3), (0, 1)]
    assert result.nodes[0].env["OMP_NUM_THREADS"].value == "2"
    swapped = job(environment=Environment({"CUDA_VISIBLE_DEVICES": "1,0"}))
    result = plan(swapped, per_host={"n1": observed, "n2": observed})
    assert [rank.cpus for rank in result.nodes[0].ranks] == [(0, 1), (2, 3)]


def test_gpu_selection_of_scheduler_limits_processes() -> None:
    """The agent's environment names the GPUs that Slurm gives to the task."""
    observed = {**facts(gpus=8), "environment": {"CUDA_VISIBLE_DEVICES": "0,1"}}
    assert planner.processes_on(job(), Host("a"), observed).value == 2
    complete = job(environment=Environment(unset=("CUDA_VISIBLE_DEVICES",)))
    assert planner.processes_on(complete, Host("a"), observed).value == 8


# --- variables of one host

HOST_WITH_ENV = Host(
    "n1", env={"FI_PROVIDER": "psm3", "CUDA_VISIBLE_DEVICES": "0", "A_TOKEN": "hidden-word"}
)


def test_host_table_sets_environment() -> None:
    two = {name: facts(gpus=2) for name in ("n1", "n2")}
    result = plan(job(), (HOST_WITH_ENV, Host("n2")), two)
    assert [len(node.ranks) for node in result.nodes] == [1, 2]
    first = result.nodes[0].env["FI_PROVIDER"]
    assert (first.value, first.source) == ("psm3", Source.FILE)
    assert "FI_PROVIDER" not in result.nodes[1].env
    text = plan_text.describe(result)
    assert "  FI_PROVIDER=psm3 ([hosts.n1.env] of paceline.toml), on n1" in text
    for output in (text, plan_text.describe_full(result), json.dumps(result.to_json())):
        assert "psm3" in output
        assert "hidden-word" not in output
    assert result.nodes[0].env["A_TOKEN"].value == "hidden-word"


@pytest.mark.parametrize(
    ("source", "wins"),
    [(Source.COMMAND_LINE, "typed"), (Source.ENVIRONMENT, "typed"), (Source.FILE, "psm3")],
)
def test_host_variable_overrides_only_file_settings(source: Source, wins: str) -> None:
    typed = job(environment=Environment({"FI_PROVIDER": "typed"}, source=source))
    assert planner.user_env(typed, HOST_WITH_ENV)["FI_PROVIDER"] == wins
    env = planner.node_env(typed, HOST_WITH_ENV, facts(), 1, None)
    assert ("FI_PROVIDER" in env) == (wins == "psm3")
    command = plan_text.rank_command(
        result := plan(typed, (HOST_WITH_ENV,)), result.nodes[0], result.nodes[0].ranks[0]
    )
    assert f"FI_PROVIDER={wins}" in command


def test_host_variables_override_computed() -> None:
    host = Host("n1", env={"GLOO_SOCKET_IFNAME": "ib0", "OMP_NUM_THREADS": "3"})
    env = planner.node_env(job(), host, facts(), 1, NodeNetwork("10.0.0.1", "eth0", "tried"))
    assert env["GLOO_SOCKET_IFNAME"].value == "ib0"
    assert env["OMP_NUM_THREADS"].value == "3"
    assert env["NCCL_SOCKET_IFNAME"].value == "=eth0"


@pytest.mark.parametrize(
    ("omp_threads", "threads"),
    [("1", "1"), ("64", "4"), ("0", "4"), ("many", "4"), ("", "4"), ("²", "4")],
)
def test_host_environment_limits_omp_threads(omp_threads: str, threads: str) -> None:
    observed = facts() | {"environment": {"OMP_NUM_THREADS": omp_threads}}
    assert (
        planner.node_env(job(), HOST_WITH_ENV, observed, 1, None)["OMP_NUM_THREADS"].value
        == threads
    )
    hidden = job(environment=Environment(unset=("OMP_NUM_THREADS",)))
    assert (
        planner.node_env(hidden, HOST_WITH_ENV, observed, 1, None)["OMP_NUM_THREADS"].value == "4"
    )


def test_user_variable_suppresses_mpi_variable() -> None:
    user_environment = Environment({"PMI_RANK": "7"})
    result = replace(plan(job(environment=user_environment)), dialects=MPI_DIALECTS)
    place = result.rank_env(result.nodes[1], result.nodes[1].ranks[0])
    assert "PMI_RANK" not in place
    assert (place["OMPI_COMM_WORLD_RANK"], place["RANK"]) == ("1", "1")


@pytest.mark.parametrize("backend", ["ccl", "xccl", "gloo"])
def test_sets_oneccl_launch_variables(backend: str) -> None:
    result = plan(job(backend=backend, nproc_per_node=cli_setting(2)))
    node = result.nodes[1]
    env = {name: setting.value for name, setting in node.env.items() if name[:3] == "CCL"}
    place = result.rank_env(node, node.ranks[1])
    if backend == "gloo":
        assert (env, place.get("CCL_LOCAL_RANK")) == ({}, None)
        return
    assert env == {
        "CCL_PROCESS_LAUNCHER": "none", "CCL_ATL_TRANSPORT": "ofi", "CCL_WORKER_COUNT": "1",
        "CCL_WORKER_AFFINITY": "1,3", "CCL_KVS_IFACE": "eth0",
    }  # fmt: skip
    assert (place["CCL_LOCAL_RANK"], place["CCL_LOCAL_SIZE"]) == ("1", "2")
    unbound = plan(job(backend=backend, nproc_per_node=cli_setting(2), bind=cli_setting("none")))
    assert "CCL_WORKER_AFFINITY" not in unbound.nodes[0].env


def test_user_variables_override_computed() -> None:
    user_environment = Environment({"OMP_NUM_THREADS": "7"}, {"GLOO_SOCKET_IFNAME": "ib0"})
    network = NodeNetwork("10.0.0.1", "eth0", "tried")
    env = planner.node_env(job(environment=user_environment), Host("n1"), facts(), 1, network)
    assert not {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"} & set(env)
    assert env["NCCL_SOCKET_IFNAME"].value == "=eth0"


# --- the whole plan


def test_ranks_are_numbered_across_unequal_hosts() -> None:
    result = plan(job(), (Host("n1", slots=2), Host("n2", slots=1), Host("n3", slots=3)))
    assert result.world_size == 6
    assert [[rank.rank for rank in node.ranks] for node in result.nodes] == [[0, 1], [2], [3, 4, 5]]
    env = result.rank_env(result.nodes[2], result.nodes[2].ranks[1])
    keys = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK",
            "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PACELINE_HOST"]  # fmt: skip
    assert [env[key] for key in keys] == ["4", "1", "6", "3", "2", "3", "127.0.0.1", "29400", "n3"]


def test_planning_is_deterministic() -> None:
    inputs = {"n1": facts(), "n2": facts()}
    original = copy.deepcopy(inputs)
    assert plan(job(), per_host=inputs) == plan(job(), per_host=inputs)
    assert inputs == original


def test_plan_serializes_to_json() -> None:
    result = plan(job(nproc_per_node=cli_setting(2)))
    found = json.loads(json.dumps(result.to_json()))
    assert found["world_size"] == 4
    assert found["entry"]["args"] == ["a b", ";", "", "ü"]
    assert found["settings"]["nproc_per_node"] == {"value": 2, "source": "command line"}
    assert found["nodes"][1]["ranks"][0]["env"]["RANK"] == "2"
    assert found["notes"] == ["a note"]


SECRETS = Environment(
    public={"WANDB_API_KEY": "typed-secret", "PLAIN": "seen"},
    forwarded={"HF_TOKEN": "hf-secret", "ANY_NAME": "forwarded-secret"},
)


@pytest.mark.parametrize(
    ("changes", "holder", "address"),
    [
        ({}, "agents, on loopback", "127.0.0.1"),
        ({"environment": Environment(public={"PACELINE_STORE": "open"})}, "agent", "10.0.0.1"),
        ({"opens_store": True}, "rank 0", "10.0.0.1"),
    ],
)
def test_store_is_closed_unless_script_or_user_opens_it(
    changes: Any, holder: str, address: str
) -> None:
    result = plan(job(**changes))
    (node, *_) = result.nodes
    assert result.to_json()["store"] == holder
    assert result.rank_env(node, node.ranks[0])["MASTER_ADDR"] == address
    by_hand = plan_text.rank_command(result, node, node.ranks[0])
    assert "MASTER_ADDR=10.0.0.1" in by_hand
    is_open = "open to all programs on the job's hosts" in plan_text.describe(result)
    assert is_open == (address == "10.0.0.1")
    with pytest.raises(SettingError, match="PACELINE_STORE is 'closed'"):
        plan(job(environment=Environment(public={"PACELINE_STORE": "closed"})))


@pytest.mark.parametrize(
    ("text", "opens"),
    [
        ("dist.init_process_group('gloo')", False),
        ("TCPStore(environ['MASTER_ADDR'], int(environ['MASTER_PORT']))", False),
        ("f'tcp://{environ[\"MASTER_ADDR\"]}:23456'", True),
        ("TCPStore(environ['MASTER_ADDR'], int(environ['MASTER_PORT']) + 1)", True),
        ("mp.spawn(f)\nenviron['MASTER_ADDR'] = 'localhost'; environ['MASTER_PORT'] = '1'", True),
    ],
)
def test_detects_scripts_that_open_store(text: str, opens: bool, tmp_path: Path) -> None:
    script = tmp_path / "a.py"
    script.write_text(text)
    assert opens_store(Entry("script", str(script), ())) == opens


def test_plan_output_contains_no_secrets() -> None:
    result = plan(job(environment=SECRETS))
    for text in (
        json.dumps(result.to_json()),
        plan_text.describe(result),
        repr(SECRETS.forwarded)[:0],
    ):
        assert "secret" not in text
    assert result.to_json()["environment"]["PLAIN"] == "seen"
    assert "HF_TOKEN" in plan_text.describe(result)
    assert "hf-secret" not in repr(SECRETS)


def test_secrets_are_recognised_by_variable_name() -> None:
    assert set(SECRETS.secrets()) == {"typed-secret", "hf-secret"}
    assert SECRETS.variables()["ANY_NAME"] == "forwarded-secret"


def test_full_plan_text() -> None:
    text = plan_text.describe_full(plan(job()))
    assert "world size 2: 2 hosts, rank 0 on n1, store at 10.0.0.1 port 29400 (for this" in text
    assert "29400 (found: free)" in text
    assert "note: a note" in text
    assert "'a b' ';' '' " in text
    assert "GLOO_SOCKET_IFNAME=eth0" in text


def test_brief_plan_text() -> None:
    large = tuple(Host(f"n{at}") for at in range(1, 17))
    custom = job(nproc_per_node=cli_setting(2), lease_s=Setting(20.0, Source.FILE, "paceline.toml"),
                 hosts=Setting("lab", Source.ENVIRONMENT, "PACELINE_OPT_HOSTS"))  # fmt: skip
    text = plan_text.describe(plan(custom, large))
    assert "32 ranks on 16 hosts, rank 0 on n1" in text
    assert "n16 (PACELINE_OPT_HOSTS)" in text
    assert "lease_s: 20.0 (paceline.toml)" in text
    assert "nproc_per_node: 2 (command line)" in text
    assert "n2    10.0.0.2   2-3    eth0       4 CPUs, 2 a rank" in text
    assert text.count("'a b' ';' ''") == 1
    assert "note: a note" in text
    for noise in ("None", "default", "GLOO", "(n2)", "grace"):
        assert noise not in text
    assert len(text.splitlines()) < 32


def test_plan_text_shows_differing_commands() -> None:
    text = plan_text.describe(plan(job(), (Host("n1"), Host("n2", python="/opt/py"))))
    assert "each rank on n1 runs, in /w:\n  /py" in text
    assert "each rank on n2 runs, in /w:\n  /opt/py" in text


def test_plan_text_names_original_of_current_folder() -> None:
    the_plan = plan(job())
    copies = (Copy("code", "/w", "/c/code"), Copy("input0", "/c", "/c/input0"))
    nodes = tuple(replace(node, workdir=f"/c/code{path}", copies=copies)
                  for node, path in zip(the_plan.nodes, ("", "/sub/exp"), strict=True))  # fmt: skip
    text = plan_text.describe(replace(the_plan, nodes=nodes))
    assert "each rank on n1 runs, in a copy of /w:" in text
    assert "each rank on n2 runs, in a copy of /w/sub/exp:" in text


@pytest.mark.parametrize(
    ("entry", "argv"),
    [
        (Entry("script", "t.py", ("x",)), ["/py", "t.py", "x"]),
        (Entry("module", "a.b", ("x",)), ["/py", "-m", "a.b", "x"]),
        (
            Entry("script", "t.py", ("x",), local_rank_flag="--local_rank"),
            ["/py", "t.py", "--local_rank=LOCAL_RANK", "x"],
        ),
        (Entry("binary", "hostname"), ["hostname"]),
    ],
)
def test_entry_argv(entry: Entry, argv: list[str]) -> None:
    assert entry_argv(entry, "/py") == argv


# --- where the code is

EQUAL_CODE: dict[str, Any] = {"exists": True, "missing": [], "different": []}
DIFFERENT_CODE: dict[str, Any] = {**EQUAL_CODE, "missing": ["a.py"], "different": ["b.py"]}
TREE = Tree(Path("/w"), [["a.py", "00", 0o644, 1]])


N1 = Host("n1")


def place_code(code: dict[str, Any] | None, host: Host = N1, supplies: Supplies | None = None,
           has_workdir: bool = True, **fields: Any) -> Place:  # fmt: skip
    surveyed = {**facts(), "user": {"home": "/home/u", "cache": "/c/paceline"}}
    found = HostSurvey(host, surveyed, NodeNetwork("10.0.0.1", "eth0", ""), code, has_workdir)
    read = Supplies(TREE) if supplies is None else supplies
    return placement.place_on(job(**{"workdir": "/w/sub", **fields}), found, read, "run1")


def test_equal_code_is_used_in_place() -> None:
    assert place_code(EQUAL_CODE) == Place("verified equal", "/w/sub", ENTRY)
    relocated = place_code(EQUAL_CODE, Host("n1", workdir="/data/w"))
    assert (relocated.code, relocated.workdir) == ("verified equal", "/data/w/sub")
    assert place_code(None, Host("n1", local=True)) == Place("in place", "/w/sub", ENTRY)


def test_too_large_code_is_not_compared() -> None:
    supplies, never_ship = Supplies(Tree(TREE.root, [])), cli_setting("never")
    assert place_code(EQUAL_CODE, supplies=supplies, ship=never_ship).code == "not compared"
    (note,) = placement.code_notes(job(ship=never_ship), supplies)
    assert note == "the code in /w is too large to compare with that of the hosts"
    assert placement.code_notes(job(ship=never_ship), Supplies(TREE)) == []
    (note,) = placement.code_notes(job(), Supplies(replace(TREE, empty_submodules=["a dep"])))
    assert "git submodule update --init 'a dep'" in note
    both = Supplies(Tree(TREE.root, [], empty_submodules=["dep"]))
    assert len(placement.code_notes(job(ship=never_ship), both)) == 2


@pytest.mark.parametrize("code", [DIFFERENT_CODE, {**EQUAL_CODE, "exists": False}])
def test_different_code_is_sent_to_job_folder(code: dict[str, Any]) -> None:
    sent = place_code(code)
    assert (sent.code, sent.workdir) == ("shipped", "/c/paceline/jobs/run1-676b8bb8/code/sub")
    assert sent.copies == (Copy("code", "/w", "/c/paceline/jobs/run1-676b8bb8/code"),)
    assert place_code(None, ship=cli_setting("always")) == sent


def test_host_without_current_folder_gets_copy() -> None:
    """It may be an empty folder, so that the code is equal there."""
    sent = place_code(EQUAL_CODE, has_workdir=False)
    assert sent == place_code(DIFFERENT_CODE)
    with pytest.raises(NodeError, match="--ship never was given") as caught:
        place_code(EQUAL_CODE, has_workdir=False, ship=cli_setting("never"))
    assert caught.value.found == "n1 lacks the current folder, /w/sub"
    in_sub = job(workdir="/w/sub")
    assert placement.required_workdir(in_sub, N1, TREE) == "/w/sub"
    assert placement.required_workdir(in_sub, Host("n1", workdir="/data/w"), TREE) == "/data/w/sub"
    assert placement.required_workdir(in_sub, Host("n1", local=True), TREE) is None


def test_absolute_paths_map_into_sent_code() -> None:
    args = ("/w/out", "--data=/w/sub/d", "--lr=/w2", "/w", "out=/w/out", "/photos", "/w/photos/a")
    photos = Data("/w/photos", {"/w/photos/a": "/a"})
    entry = Entry("script", "train.py", args)
    code = "/c/paceline/jobs/run1-676b8bb8/code"
    sent = place_code(DIFFERENT_CODE, entry=entry, data=photos)
    moved = (f"{code}/out", f"--data={code}/sub/d", "--lr=/w2", code, f"out={code}/out")
    assert sent.entry.args[:6] == (*moved, args[5])
    assert not sent.entry.args[6].startswith(code)
    assert place_code(EQUAL_CODE, entry=entry).entry.args == args


def test_outward_links_require_follow_links() -> None:
    tree = Tree(TREE.root, TREE.manifest, outward={"a.py": "/home/u/key"})
    data = DataPlace(COPY, False, missing=[["a", 1, 2]], outward={"a": "/home/u/key"})
    assert place_code(EQUAL_CODE, supplies=Supplies(tree)).code == "verified equal"
    for send in (lambda **fields: place_code(DIFFERENT_CODE, supplies=Supplies(tree), **fields),
                 lambda **fields: with_data(data, **fields)):  # fmt: skip
        with pytest.raises(SettingError, match="lead out of it") as exc_info:
            send()
        assert "-> /home/u/key" in exc_info.value.found
        assert send(follow_links=True).copies
    (note,) = placement.link_notes(job(follow_links=True), Supplies(tree), [])
    assert "/w/a.py -> /home/u/key" in note


def test_notes_folder_links_in_sent_code() -> None:
    linked = Supplies(replace(TREE, linked_folders=[f"link{i}" for i in range(7)]))
    sent = place_code(DIFFERENT_CODE).copies
    (note,) = placement.linked_folder_notes(linked, sent)
    assert "link0, link1, link2, link3, link4 and 2 more" in note
    assert not placement.linked_folder_notes(linked, place_code(EQUAL_CODE).copies)
    assert not placement.linked_folder_notes(Supplies(TREE), sent)
    (note,) = placement.env_notes(Supplies(replace(TREE, unsent_env=".env")), sent)
    assert note.startswith(".env is not sent to hosts. ")
    assert not placement.env_notes(Supplies(TREE), sent)


def test_links_in_named_inputs_are_followed() -> None:
    tree = Tree(Path("/t"), [["a.csv", "00", 0o644, 1]], outward={"a.csv": "/data/a.csv"})
    supplies = Supplies(TREE, inputs={"/t": tree})
    assert place_code(EQUAL_CODE, supplies=supplies, inputs=(Input("/t", named=True),)).copies
    with pytest.raises(SettingError, match="lead out of it"):
        place_code(EQUAL_CODE, supplies=supplies, inputs=(Input("/t"),))


PHOTOS = Data("/w/photos", {"/w/photos": "", "./photos": ""})
COPY = "/c/paceline/data/0123/files/photos"


def with_data(place: DataPlace, *args: str, **fields: Any) -> Place:
    surveyed = {**facts(), "user": {"home": "/home/u", "cache": "/c/paceline"}}
    network = NodeNetwork("10.0.0.1", "eth0", "")
    found = HostSurvey(N1, surveyed, network, EQUAL_CODE, True, place)
    entry = Entry("script", "train.py", args)
    the_job = job(**{"workdir": "/w", "entry": entry, "data": PHOTOS, **fields})
    return placement.place_on(the_job, found, Supplies(TREE), "run1")


def test_missing_data_are_sent_and_arguments_mapped() -> None:
    place = with_data(DataPlace(COPY, False, missing=[["a", 1, 2]]), "./photos", "--d=/w/photos",
                      "photos", "--name=photos", "/w/photos/a")  # fmt: skip
    assert place.copies == (Copy("data", "/w/photos", COPY),)
    assert place.entry.args == (COPY, f"--d={COPY}", "photos", "--name=photos", "/w/photos/a")
    env = placement.data_env(job(data=PHOTOS), place)
    assert {name: one.value for name, one in env.items()} == {
        "PACELINE_DATA_DIR": COPY, "PACELINE_DATA_HOME": "/w/photos"}  # fmt: skip


def test_arguments_within_data_folder_are_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos/tiny").mkdir(parents=True)
    (tmp_path / "other/deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("other/deep")
    args = ("./photos/tiny/", "--a=photos/tiny", f"{tmp_path}/photos/tiny", "photos/../photos/tiny",
            "data.root=photos/tiny", "+data.root=./photos",
            "--out=./photos/new", "./photostiny", "link/../photos", "photos")  # fmt: skip
    data = data_of(Path("photos"), args, is_local=True)
    assert [data.on_node(arg, COPY) for arg in args] == [
        f"{COPY}/tiny", f"--a={COPY}/tiny", f"{COPY}/tiny", f"{COPY}/tiny",
        f"data.root={COPY}/tiny", f"+data.root={COPY}", *args[6:]]  # fmt: skip


@pytest.mark.parametrize("typed", ["data/shapes", "./data/shapes/", "../ext/x", "../proj/../ext/x"])
def test_maps_different_spellings_of_data_path(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("proj/data/shapes/circle", "ext/x/circle"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "proj")
    root = "../ext/x" if "ext" in typed else "data/shapes"
    spellings = (root, f"./{root}/", f"../proj/{root}", str(tmp_path / "proj" / root))
    args = (*spellings, f"./{root}/circle", f"--root={root}/circle", "../ext")
    data = data_of(Path(typed), args, is_local=True)
    assert [data.on_node(arg, COPY) for arg in args] == [
        *[COPY] * len(spellings), f"{COPY}/circle", f"--root={COPY}/circle", "../ext"]  # fmt: skip


def test_note_if_script_does_not_get_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    Path("reads.py").write_text("os.environ['PACELINE_DATA_DIR']")
    Path("other.py").touch()

    def note(script: str, *args: str, local: bool = False) -> str:
        data = data_of(Path("photos"), args, is_local=True)
        the_job = job(entry=Entry("script", script, args), data=data)
        return data_note(the_job, Cluster((Host("n1", local=local),)))

    assert "no argument of the script names ./photos, as a single word is no path; " in note(
        "other.py", "photos"
    )
    assert not note("other.py", "root=./photos")
    assert not note("other.py", local=True)
    assert not note("reads.py")


def test_note_if_script_gets_option_of_paceline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain.py").touch()
    Path("own.py").write_text("parser.add_argument('--hosts')")

    def note(script: str, *args: str, local: bool = True) -> str:
        cluster = Cluster((Host("n1", local=local),))
        return misplaced_note(Entry("script", script, args), cluster)

    assert "paceline run --hosts … plain.py" in note("plain.py", "--lr", "1", "--hosts=n1,n2")
    assert not note("plain.py", "--hosts", "n1", local=False)
    assert not note("own.py", "--hosts", "n1")
    assert not note("plain.py", "--lr", "1")


def test_existing_data_are_used_in_place() -> None:
    place = with_data(DataPlace("/w/photos", True), "./photos")
    assert (place.copies, place.entry.args, place.data) == ((), ("/w/photos",), "/w/photos")


def test_ship_never_rejects_missing_data() -> None:
    with pytest.raises(NodeError, match="the data on n1 are not those") as told:
        with_data(DataPlace(COPY, False, missing=[["a", 1, 2]]), ship=cli_setting("never"))
    assert "1 file" in told.value.found
    complete = with_data(
        DataPlace(COPY, False), ship=cli_setting("never")
    )  # sent by an earlier run
    assert complete.data == COPY


def test_ship_never_rejects_different_code() -> None:
    with pytest.raises(NodeError, match="--ship never was given") as caught:
        place_code(DIFFERENT_CODE, ship=cli_setting("never"))
    assert caught.value.found == "2 files are missing or different there: b.py, a.py"
    with pytest.raises(NodeError) as caught:
        place_code({**EQUAL_CODE, "exists": False}, ship=cli_setting("never"))
    assert caught.value.found == "n1 has no folder /w"


ELSEWHERE = {"workdir": "/u/else", "entry": Entry("script", "/w/a.py", ("--lr", "1"))}


@pytest.mark.parametrize("code", [DIFFERENT_CODE, {**EQUAL_CODE, "exists": False}])
@pytest.mark.parametrize("has_workdir", [False, True])
def test_rejects_copy_without_current_folder(code: dict[str, Any], has_workdir: bool) -> None:
    """A folder of that name on the host may be another one, from which no file is fetched."""
    with pytest.raises(NodeError, match="outside the current folder") as caught:
        place_code(code, has_workdir=has_workdir, **ELSEWHERE)
    assert "the current folder is /u/else" in caught.value.found
    assert "cd /w, and name the script as a.py" in caught.value.remedy
    assert "Or cd" not in caught.value.remedy  # / is no project
    call = Entry("function", "f()", ("/w",))  # only its result is fetched
    place = place_code(code, has_workdir=has_workdir, workdir="/u/else", entry=call)
    assert (place.workdir == "/u/else") == has_workdir


@pytest.mark.parametrize(
    ("workdir", "common"),
    [("/u/x/else", "/u/x"), ("/u/x/proj2/deep", "/u/x"), ("/u/y", ""), ("/tmp", "")],
)
def test_names_common_parent_of_current_folder_and_script(
    workdir: str, common: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    supplies = Supplies(Tree(Path("/u/x/a proj"), TREE.manifest))
    entry = Entry("script", "/u/x/a proj/a.py")
    for home in ("/home/u", "/u/x/me"):
        monkeypatch.setenv("HOME", home)
        with pytest.raises(NodeError) as caught:
            place_code(DIFFERENT_CODE, supplies=supplies, workdir=workdir, entry=entry)
        first, *others = caught.value.remedy.splitlines()
        assert first.startswith("cd '/u/x/a proj', and name the script as a.py: ")
        is_named = bool(common) and home == "/home/u"  # a home folder is no project
        assert len(others) == is_named
        assert not is_named or f"Or cd {common}, and name the script as 'a proj/a.py'" in others[0]


def test_script_outside_current_folder_runs_in_it_if_host_has_both() -> None:
    place = place_code(EQUAL_CODE, **ELSEWHERE)
    assert (place.code, place.workdir, place.copies) == ("verified equal", "/u/else", ())
    with pytest.raises(NodeError, match="outside the current folder"):
        place_code(EQUAL_CODE, has_workdir=False, **ELSEWHERE)
    with pytest.raises(NodeError, match="--ship never was given") as caught:
        place_code(EQUAL_CODE, has_workdir=False, ship=cli_setting("never"), **ELSEWHERE)
    assert caught.value.found == "n1 lacks the current folder, /u/else"


def test_input_folders_are_sent_and_arguments_mapped() -> None:
    data = Supplies(inputs={"/here/d": TREE})
    the_entry = Entry("module", "m", ("--data", "/here/d", "x"))
    sent = place_code(None, supplies=data, entry=the_entry)
    assert sent.entry.args == ("--data", "/c/paceline/jobs/run1-676b8bb8/input0", "x")
    assert sent.copies == (Copy("input0", "/here/d", "/c/paceline/jobs/run1-676b8bb8/input0"),)
    on_launcher = place_code(None, Host("n1", local=True), data, entry=the_entry)
    assert (on_launcher.entry, on_launcher.copies) == (the_entry, ())


def test_recipe_runs_in_home_if_workdir_is_missing() -> None:
    """It writes to the run directory."""
    assert place_code(None, supplies=Supplies()).workdir == "/w/sub"
    assert place_code(None, supplies=Supplies(), has_workdir=False).workdir == "/home/u"
    with pytest.raises(NodeError, match="n1 has no folder /named"):
        place_code(None, Host("n1", workdir="/named"), Supplies(), has_workdir=False)


def test_program_runs_in_empty_copy_if_workdir_is_missing() -> None:
    """Files that it writes in its home folder would not be fetched."""
    empty, program = Supplies(Tree(Path("/w"), [])), Entry("binary", "/bin/p", ("--out=/w/sub/o",))
    place = place_code(None, supplies=empty, entry=program)
    assert place == Place("in place", "/w/sub", program)
    named = place_code(None, Host("n1", workdir="/named"), empty, entry=program)
    assert named == Place("in place", "/named", program)
    sent = place_code(None, supplies=empty, entry=program, has_workdir=False)
    folder = "/c/paceline/jobs/run1-676b8bb8/code"
    assert (sent.code, sent.workdir) == ("shipped", f"{folder}/sub")
    assert sent.copies == (Copy("code", "/w", folder),)
    assert sent.entry.args == (f"--out={folder}/sub/o",)
    with pytest.raises(NodeError, match="n1 has no folder /named"):
        place_code(None, Host("n1", workdir="/named"), empty, entry=program, has_workdir=False)


@pytest.mark.parametrize(
    ("kind", "code", "is_noted"),
    [("binary", "", True), ("function", "", True), ("module", "", False), ("binary", "/w", False),
     ("function", "/code", True)],
)  # fmt: skip
def test_notes_hosts_that_run_in_home_folder(kind: Any, code: str, is_noted: bool) -> None:
    surveyed = {**facts(), "user": {"home": "/home/u"}}
    network = NodeNetwork("10.0.0.1", "eth0", "")
    found = [HostSurvey(Host(name), surveyed, network, EQUAL_CODE, has_workdir=False)
             for name in ("n1", "n2")]  # fmt: skip
    supplies = Supplies(Tree(Path(code), []) if code else None)
    port = Setting(29400, Source.FOUND, "free")
    made = planner.make_plan(job(entry=Entry(kind, "p")), "run1", found, supplies, port, [])
    expected = ("/w is missing on n1, n2. Ranks run in /home/u there, and files that they write"
                " there are not fetched")  # fmt: skip
    assert [note for note in made.notes if "missing" in note] == [expected] * is_noted


@pytest.mark.parametrize(("code", "is_used"), [(EQUAL_CODE, True), (DIFFERENT_CODE, False)])
def test_notes_unused_workdir(code: dict[str, Any], is_used: bool) -> None:
    surveyed = {**facts(), "user": {"home": "/home/u"}}
    hosts = [Host("n1", workdir="/data/w"), Host("n2"), Host("n3", workdir="/data/w")]
    found = [HostSurvey(host, surveyed, NodeNetwork("10.0.0.1", "eth0", ""), code)
             for host in hosts]  # fmt: skip
    port = Setting(29400, Source.FOUND, "free")
    the_job = job(entry=Entry("script", "/w/a.py"))
    made = planner.make_plan(the_job, "run1", found[:2], Supplies(TREE), port, [], found[2:])
    assert made.nodes[0].workdir.startswith("/data/w") is is_used
    notes = [note for note in made.notes if note.startswith("workdir of n1, n3 in [hosts.NAME] is")]
    assert len(notes) == (not is_used)


def test_program_without_code_gets_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in ("home", "project"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "prog").touch()

    def read(program: str, *args: str, folder: str = "project", **host: Any) -> Tree | None:
        the_job = job(entry=Entry("binary", program, args), workdir=str(tmp_path / folder))
        request: Any = SimpleNamespace(job=the_job, hosts=[Host("n1", **host)], package=False,
                                       supplies=None, needs_package=False)  # fmt: skip
        return survey.read_supplies(request).code

    assert read("hostname") == Tree(tmp_path / "project", [])
    code = read("sh", "./prog")
    assert code is not None
    assert len(code.manifest) == 1
    assert read("hostname", local=True) is None
    assert read("hostname", folder="home") is None


def test_next_attempt_changes_only_port_and_number() -> None:
    first = plan(job())
    second = planner.next_attempt(first, 1, Setting(29500, Source.FOUND, "free"), 0)
    env = second.rank_env(second.nodes[0], second.nodes[0].ranks[0])
    assert (env["PACELINE_ATTEMPT"], env["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0")
    assert (second.attempt, second.master_port) == (1, 29500)
    assert second.settings["master_port"].value == 29500
    assert second.nodes == first.nodes


# --- checks that nodes agree


def agree(**by_host: Any) -> list[str]:
    hosts = [Host(name) for name in by_host]
    return planner.check_agreement(hosts, job(), by_host, dict.fromkeys(by_host, "/py"))


def test_agreeing_nodes_have_no_notes() -> None:
    assert agree(n1=facts(), n2=facts()) == []


def test_notes_different_python() -> None:
    (note,) = agree(n1=facts(), n2=facts(python="3.12.1"))
    assert "n1 3.11.7, n2 3.12.1" in note


def test_rejects_different_torch() -> None:
    with pytest.raises(NodeError) as caught:
        agree(n1=facts(), n2=facts(torch="2.12.0"))
    assert "n2: torch 2.12.0" in caught.value.found
    assert "torch==2.13.0" in caught.value.remedy


def test_rejects_missing_torch_if_needed() -> None:
    with pytest.raises(NodeError, match="no torch on n2"):
        agree(n1=facts(), n2=facts(torch=None))
    hosts = [Host("n2")]
    found = planner.check_agreement(
        hosts, job(needs_torch=False), {"n2": facts(torch=None)}, {"n2": "/py"}
    )
    assert found == []


@pytest.mark.parametrize(
    ("python", "change", "remedy"),
    [
        ("3.11.7", {}, "On n2: /py -m pip install torch==2.13.0+cpu --index-url "
                       "https://download.pytorch.org/whl/cpu"),
        ("3.11.2", {"externally_managed": True}, "/py -m venv ~/venv && ~/venv/bin/python -m pip"),
        ("3.9.18", {}, "Python 3.9.18 is too old for torch 2.13.0+cpu"),
    ],
)  # fmt: skip
def test_torch_remedy_installs_build_of_peers(
    python: str, change: dict[str, bool], remedy: str
) -> None:
    """pip accepts 2.13.0+cpu as 2.13.0, and does not change the Python of the system."""
    for torch in (None, "2.13.0+cu130"):
        peer_facts = facts(torch=torch, python=python)
        peer_facts["python"] |= change
        with pytest.raises(NodeError) as caught:
            agree(n1=facts(), n2=peer_facts)
        assert remedy in caught.value.remedy


def test_rejects_unexpected_interpreter() -> None:
    hosts = [Host("n1", python="/own/python")]
    with pytest.raises(NodeError) as caught:
        planner.check_agreement(hosts, job(), {"n1": facts()}, {"n1": "python3"})
    assert "/own/python" in caught.value.message
    assert "[hosts.n1]" in caught.value.remedy


def test_ranks_resolve_paths_of_sent_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Copy("input0", "/w/runs/1", "/c/jobs/x/input0")
    place = placement.Place("in place", "/w", ENTRY, (sent,))
    ((name, told),) = placement.inputs_env(place).items()
    monkeypatch.setenv(name, told.value)
    assert local_path(Path("/w/runs/1/model")) == Path("/c/jobs/x/input0/model")
    assert local_path(Path("/w/runs/10")) == Path("/w/runs/10")


@pytest.mark.parametrize(
    ("described", "connected", "among", "names"),
    [
        ("n1 n2 n3", "n1 n3", "", "n1 n2 n3"),  # n2 is missing
        ("n1 n3", "n1 n3", "n1 n2 n3", "n1 n2 n3"),  # n2 was not chosen
        ("node0 node1", "n1 n2", "", "n1 n2"),  # typed on each host: names were unknown
        ("node0 node1", "n1", "", ""),
    ],
)
def test_host_names_include_absent_hosts(
    described: str, connected: str, among: str, names: str
) -> None:
    hosts, observed = (tuple(map(Host, text.split())) for text in (described, connected))
    request = Request(job(), hosts, cast(Transport, None), among=tuple(among.split()))
    assert host_names(request, observed) == tuple(names.split())


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ('parser.add_argument("--local_rank")', "--local_rank"),
        ('parser.add_argument("--local-rank")', "--local-rank"),
        ('parser.add_argument("--local-rank", "--local_rank")', "--local_rank"),
        ("", "--local_rank"),
    ],
)
def test_local_rank_flag_follows_script(text: str, flag: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert local_rank_flag(str(script)) == flag
    assert local_rank_flag("a.module") == "--local_rank"


@pytest.mark.parametrize("gpus", [0, 1])
def test_accelerate_uses_cpu_if_no_gpu(gpus: int) -> None:
    env = planner.node_env(job(), Host("n1"), facts(gpus=gpus), 1, None)
    assert ("ACCELERATE_USE_CPU" in env) == (gpus == 0)
    typed = job(environment=Environment({"ACCELERATE_USE_CPU": "false"}))
    assert "ACCELERATE_USE_CPU" not in planner.node_env(typed, Host("n1"), facts(), 1, None)
