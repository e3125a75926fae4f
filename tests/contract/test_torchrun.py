"""Every option of torchrun, in both spellings: understood, or refused with what to type."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import click
import pytest

from each_case import each_case
from paceline.cli import torchrun
from paceline.cli.verbs.run import command
from paceline.spec.errors import SettingError
from paceline.spec.job import NodeRange

# what is typed for the options that take a value, where it is not free
VALUES = {"--nnodes": "2", "--nproc-per-node": "auto", "--rdzv-backend": "c10d",
          "--max-restarts": "3", "--node-rank": "1", "--master-port": "29400"}  # fmt: skip
# torchrun's option → the parameter of ours that it means
MEANS = {
    "--nnodes": "nnodes", "--nproc-per-node": "nproc_per_node", "--max-restarts": "max_restarts",
    "--rdzv-endpoint": "rdzv", "--rdzv-id": "rdzv_id", "--node-rank": "node_rank",
    "--master-port": "master_port", "--module": "module", "--no-python": "no_python",
}  # fmt: skip
UNDERSTOOD = {"--rdzv-backend", "--standalone"}  # true here without a setting of ours


def options() -> list[tuple[str, bool]]:
    """Every spelling of torchrun's own parser, and whether a value follows it."""
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


def typed(*words: str) -> dict[str, Any]:
    return command.make_context("run", [*words, "train.py"]).params


@each_case(("spelling", "valued"), options())
def test_an_option_of_torchrun(spelling: str, valued: bool) -> None:
    plain = spelling.replace("_", "-")
    words = [spelling, VALUES.get(plain, "word")] if valued else [spelling]
    if plain in torchrun.UNSUPPORTED | torchrun.UNSUPPORTED_FLAGS:
        with pytest.raises(SettingError) as caught:
            typed(*words)
        assert plain in caught.value.message
        assert caught.value.remedy
        for flag in [word for word in caught.value.remedy.split() if word.startswith("--")]:
            assert any(flag.strip(",:") in p.opts for p in command.params) or flag == "--rank"
        return
    params = typed(*words)
    if plain in MEANS:
        assert params[MEANS[plain]] not in (None, 0, False)
    else:
        assert plain in UNDERSTOOD


def test_standalone_is_this_machine() -> None:
    assert typed("--standalone", "--nproc_per_node=2")["hosts"] == "local"
    Path("paceline.toml").write_text('[run]\nhosts = "n1,n2"\n')
    assert typed("--standalone")["hosts"] == "local"
    with pytest.raises(SettingError, match="standalone"):
        typed("--standalone", "-H", "n1,n2")


def test_a_range_of_nodes() -> None:
    assert typed("--nnodes=1:4")["nnodes"] == NodeRange(1, 4)
    assert typed("--nnodes", "2:")["nnodes"] == NodeRange(2)
    Path("paceline.toml").write_text('[run]\nnnodes = "2:2"\nwait-for-nodes = "1h30m"\n')
    assert typed()["nnodes"] == NodeRange(2, 2)
    assert typed()["wait_for_nodes"] == 5400
    for wrong in ("many", "4:1", "0:2", ":3", "1:2:3", "-1:2"):
        with pytest.raises(click.BadParameter):
            typed("--nnodes", wrong)
    for wrong in ("-1", "1x", "m", "inf", "1h30"):
        with pytest.raises(click.BadParameter):
            typed("--wait-for-nodes", wrong)


def test_another_store_is_refused() -> None:
    with pytest.raises(SettingError, match="etcd"):
        typed("--rdzv_backend", "etcd")


@pytest.mark.parametrize(("given", "taken"), [("gpu", "gpu"), ("cpu", "cpu"), ("4", 4)])
def test_processes_a_node(given: str, taken: object) -> None:
    assert typed("-p", given)["nproc_per_node"] == taken
    Path("paceline.toml").write_text(f'[run]\nnproc_per_node = "{given}"\n')
    assert typed()["nproc_per_node"] == taken
    with pytest.raises(click.BadParameter, match="auto, gpu, cpu"):
        typed("-p", "xpu")


def test_no_alias_stands_in_the_help_or_in_the_environment() -> None:
    hidden = [p for p in command.params if isinstance(p, click.Option) and p.hidden]
    assert len(hidden) == len(torchrun.UNSUPPORTED) + len(torchrun.UNSUPPORTED_FLAGS) + 2
    assert not any(option.envvar for option in hidden)
