"""Tests that every option of torchrun, in both spellings, is accepted or refused with a remedy."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import click
import pytest

from each_case import each_case
from paceline.cli import torchrun
from paceline.cli.dispatch import prepare
from paceline.cli.verbs.run import command
from paceline.spec.errors import SettingError
from paceline.spec.job import NodeRange

# values for options that do not accept any value
VALUES = {"--nnodes": "2", "--nproc-per-node": "auto", "--rdzv-backend": "c10d",
          "--max-restarts": "3", "--node-rank": "1", "--master-port": "29400"}  # fmt: skip
# torchrun's option → Paceline's parameter
EQUIVALENTS = {
    "--nnodes": "nnodes", "--nproc-per-node": "nproc_per_node", "--max-restarts": "max_restarts",
    "--rdzv-endpoint": "rdzv", "--rdzv-id": "rdzv_id", "--node-rank": "node_rank",
    "--master-port": "master_port", "--module": "module", "--no-python": "no_python",
}  # fmt: skip
ACCEPTED = {"--rdzv-backend", "--standalone"}  # accepted without an effect, as always true


def options() -> list[tuple[str, bool]]:
    """Returns every spelling in torchrun's parser, and whether it takes a value."""
    from torch.distributed.run import get_args_parser

    return [
        (spelling, action.nargs != 0)
        for action in get_args_parser()._actions
        for spelling in action.option_strings
        if spelling.startswith("--") and not isinstance(action, argparse._HelpAction)
    ]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def parse(*arguments: str) -> dict[str, Any]:
    return command.make_context("run", [*arguments, "train.py"]).params


@each_case(("spelling", "valued"), options())
def test_torchrun_options_are_accepted_or_rejected(spelling: str, valued: bool) -> None:
    normalized = spelling.replace("_", "-")
    arguments = [spelling, VALUES.get(normalized, "word")] if valued else [spelling]
    if normalized in torchrun.UNSUPPORTED | torchrun.UNSUPPORTED_FLAGS:
        with pytest.raises(SettingError) as caught:
            parse(*arguments)
        assert normalized in caught.value.message
        assert caught.value.remedy
        for flag in [part for part in caught.value.remedy.split() if part.startswith("--")]:
            assert any(flag.strip(",:") in p.opts for p in command.params) or flag == "--rank"
        return
    params = parse(*arguments)
    if normalized in EQUIVALENTS:
        assert params[EQUIVALENTS[normalized]] not in (None, 0, False)
    else:
        assert normalized in ACCEPTED


def test_standalone_uses_local_host() -> None:
    assert parse("--standalone", "--nproc_per_node=2")["hosts"] == "local"
    Path("paceline.toml").write_text('[run]\nhosts = "n1,n2"\n')
    assert parse("--standalone")["hosts"] == "local"
    with pytest.raises(SettingError, match="standalone"):
        parse("--standalone", "-H", "n1,n2")


def test_parses_node_range() -> None:
    assert parse("--nnodes=1:4")["nnodes"] == NodeRange(1, 4)
    assert parse("--nnodes", "2:")["nnodes"] == NodeRange(2)
    Path("paceline.toml").write_text('[run]\nnnodes = "2:2"\nwait-for-nodes = "1h30m"\n')
    assert parse()["nnodes"] == NodeRange(2, 2)
    assert parse()["wait_for_nodes"] == 5400
    for wrong in ("0", "many", "4:1", "0:2", ":3", "1:2:3", "-1:2"):
        with pytest.raises(click.BadParameter):
            parse("--nnodes", wrong)
    Path("paceline.toml").write_text("[run]\nnnodes = 0\n")
    with pytest.raises(SettingError, match=r"nnodes = 0 in \[run\] of .*paceline\.toml"):
        parse()
    Path("paceline.toml").unlink()
    for wrong in ("-1", "1x", "m", "inf", "1h30"):
        with pytest.raises(click.BadParameter):
            parse("--wait-for-nodes", wrong)


def test_rejects_etcd_backend() -> None:
    with pytest.raises(SettingError, match="etcd"):
        parse("--rdzv_backend", "etcd")


@pytest.mark.parametrize("other", [("--hosts", "n1,n2"), ("--via", "mpi")])
def test_endpoint_is_left_out_where_nodes_are_started(other: tuple[str, str]) -> None:
    ctx = command.make_context(
        "run", [*other, "--rdzv_backend=c10d", "--rdzv_endpoint=n1:29500", "train.py"]
    )
    with pytest.raises(SettingError) as caught:
        prepare(ctx)
    assert f"with {other[0]}, Paceline starts the nodes and makes the rendezvous itself" in (
        caught.value.found
    )
    assert caught.value.remedy.startswith("Leave out the --rdzv options; or leave out")


@pytest.mark.parametrize(("argument", "expected"), [("gpu", "gpu"), ("cpu", "cpu"), ("4", 4)])
def test_parses_processes_per_node(argument: str, expected: object) -> None:
    assert parse("-p", argument)["nproc_per_node"] == expected
    Path("paceline.toml").write_text(f'[run]\nnproc_per_node = "{argument}"\n')
    assert parse()["nproc_per_node"] == expected
    with pytest.raises(click.BadParameter, match="auto, gpu, cpu"):
        parse("-p", "xpu")


def test_torchrun_aliases_are_hidden() -> None:
    hidden = [p for p in command.params if isinstance(p, click.Option) and p.hidden]
    assert len(hidden) == len(torchrun.UNSUPPORTED) + len(torchrun.UNSUPPORTED_FLAGS) + 2
    assert not any(option.envvar for option in hidden)
