"""Runs and resumes the scripts of the page on trainers, on two hosts without a shared disk."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import Ended, Site, on, paceline
from transports import PARTS

from warm_agents import warm_agents

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
import tiny_language_model

pytestmark = [pytest.mark.lab, pytest.mark.slow]
PAGE = Path(__file__).parents[2] / "docs/how-to/trainers.md"
FRAMEWORKS = PARTS / "frameworks"
SCRIPTS = dict(re.findall(r"^```python file=(\S+)\n(.*?)^```$", PAGE.read_text("utf-8"),
                          re.MULTILINE | re.DOTALL))  # fmt: skip
# script → package that the environment lacks, last checkpoint, and output of resumed ranks
CASES = {
    "trainer.py": ("", "out/trainer/checkpoint-{}/model.safetensors", "resumes from out"),
    "sft.py": ("trl", "out/sft/checkpoint-{}/adapter_model.safetensors", "resumes from out"),
    "with_lightning.py": ("lightning", "out/lightning/epoch=0-step={}.ckpt", "Restored all states"),
    "with_accelerate.py": ("", "out/accelerate/step_{}/model.safetensors", "starts at step 20"),
}


@pytest.fixture(scope="module")
def site(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    project = tmp_path_factory.mktemp("trainers") / "project"
    tiny_language_model.save(project / "HuggingFaceTB/SmolLM2-135M-Instruct")
    tiny_language_model.write_jsonl(project / "chat.jsonl", tiny_language_model.chats(24))
    site = Site(new_lab(hosts=2), project)
    with warm_agents(tmp_path_factory.mktemp("cache"), *on(site.lab), "--no-torch"):
        yield site


@pytest.mark.parametrize("name", CASES)
def test_script_trains_and_resumes_on_two_hosts(site: Site, name: str) -> None:
    package, checkpoint, resumed = CASES[name]
    if package and not (FRAMEWORKS / package).is_dir():
        pytest.skip(f"{package} is not in {FRAMEWORKS}: tools/system-parts.sh all")
    script, directory = site.project / name, site.fresh()
    args = ["run", "-H", "n1,n2", "--ssh-config", str(site.lab.ssh_config), "--run-dir",
             str(directory), "--communication", "int8", "--env", "HF_HUB_OFFLINE=1",
             *(["--env", f"PYTHONPATH={FRAMEWORKS}"] if package else []), name]  # fmt: skip
    for step in (20, 30):
        text = SCRIPTS[name].replace("max_steps=20", f"max_steps={step}")
        script.write_text(text.replace("step == 20", f"step == {step}"))
        result = paceline(*args, cwd=site.project)
        ended = Ended(result.returncode, result.stdout, result.stderr, directory)
        assert ended.code == 0, ended.out + ended.err
        assert len(ended.events("world joined")) % 2 == 0
        assert "exchanged nothing" not in ended.err
        assert (site.project / checkpoint.format(step)).is_file(), ended.err
        assert (resumed in ended.out + ended.err) == (step == 30), ended.out + ended.err
    if "resumes" in resumed or "starts" in resumed:
        assert ended.out.count(resumed) == 2
