"""Tests that every command in the documentation runs in a lab as it is printed.

The commands of a page are typed in order on ``n1``, which reaches ``n2`` and ``n3`` by SSH, in a
folder with the files that pages mention. New commands in a page are run without a change here. A
table in this module lists the commands that cannot run here, with what runs them instead. Only
trainings are shortened.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
import hub_folders
import tiny_language_model
from launches import SOURCE
from test_tutorial import applied

from documents import PAGES, Shown, in_blocks, inline
from paceline.lab import Lab, LabOptions

pytestmark = [pytest.mark.lab, pytest.mark.slow]

RUN = "runs/image-20261120-101500"
TRANSLATION = "runs/translation-20261120-111500"

SETUP_ENV = "paceline setup env -H n1,n2,n3 --requirements requirements.txt"

# start of a command → what runs it instead, or why nothing does
COVERED_BY = {
    "make ": "tools/fresh-machine.sh, on a machine made from nothing",
    "git clone": "tools/fresh-machine.sh",
    "cd paceline": "tools/fresh-machine.sh",
    "sudo apt ": "tools/fresh-machine.sh",
    ". .venv/bin/activate": "every command here finds paceline as it does after that line",
    "paceline lab ": "test_lab_commands_run",
    "paceline run --hosts hostfile --fastest": "tests/unit/test_cli_forecast.py, after a forecast",
    "paceline run --rdzv": "tests/lab/test_by_hand.py, for it is typed on several nodes at once",
    f"{SETUP_ENV} --offline": "tests/lab/test_setup.py, with a wheel that is shipped",
    "paceline completion ": "tests/contract/test_completion.py, in the shells that it is for",
    "paceline forecast ": "tests/lab/test_forecast.py, for it tries several runs",
    "paceline evaluate runs/reviews": "tests/unit/test_recipe_evaluation.py, with a new file",
    "paceline evaluate runs/chat --tasks": "tests/unit/test_language_tasks.py, without lm-eval",
    "paceline report ": "tests/unit/test_report_page.py, for it is about other runs",
    "paceline run -H hostfile --image": "tests/lab/test_docker.py, with an image made there",
}
PAGES_COVERED_BY = {
    "first-run.md": "tests/lab/test_first_run.py, in its order",
    "coming-from.md": "tests/lab/test_coming_from.py",
    "trainers.md": "tests/lab/test_trainers.py, with packages that the environment lacks",
    "options.md": "the help of every command, whose examples have placeholders",
}

# pattern of a command → options that shorten it to seconds
SMALL_VALIDATION = (
    "--val-fraction 0.02"  # few, because an untrained model generates as many tokens as allowed
)
SHORTENING_FLAGS = [
    (r"paceline train image .*--preset imagenet", "--steps 1 --global-batch 4"),
    (r"paceline train .*fashion-mnist", "--steps 2 --data-dir fewer"),
    (
        r"paceline train translation",
        f"--steps 2 --model tiny --score-every 1000 {SMALL_VALIDATION}",
    ),
    (r"paceline train language", "--steps 2 --depth 1 --max-length 32"),
    (r"paceline generate ", "--max-tokens 4"),
    (r"paceline train .* --find-lr", ""),  # takes a hundred steps of its own
    (r"paceline train ", "--steps 2"),
    (r"paceline run my_text.py", "--epochs 1 --data reviews.csv"),
    (r"paceline bench collectives", "-e 64K -n 2"),
    (r"paceline check (?!.*--quick)", "--no-trial"),
    (r"paceline benchmark ", "--iterations 3 --warm-up 1"),
]
# values for the placeholders that a reader replaces
PLACEHOLDER_VALUES = {
    r"\bRUN\b": RUN,
    r"INPUT…": "photo.png",
    r"\bNAME\b": "image",
    r"/mnt/data": "$PWD",
}
# exit status of commands that fail on purpose
EXPECTED_STATUS = {
    ("describe-hosts.md", "paceline hosts hostfile"): 2,  # shows how an error looks
    ("README.md", "paceline check -H lab"): 1,  # n2 is unplugged
}


def to_type() -> dict[str, list[Shown]]:
    """Returns the commands to type by page: those in code blocks, and complete ones in tables.

    A command that an earlier page shows is not typed again, even if it names other hosts and runs.
    """
    commands: dict[str, list[Shown]] = {}
    seen = set()
    for page in PAGES:
        if page.name in PAGES_COVERED_BY or page.parent.name == "rules":
            continue
        block_commands = [s for s in in_blocks(page) if not re.search(r"…|\[", s.text)]
        inline_commands = [
            s for s in inline(page) if len(s.words) > 2 and not fill_placeholders(s).template
        ]
        for shown in (*block_commands, *inline_commands):
            key = normalize_command(shown) if page.name != "describe-hosts.md" else shown
            if not covering_test(shown) and key not in seen:
                commands.setdefault(page.name, []).append(shown)
                seen.add(key)
    return commands


def normalize_command(shown: Shown) -> str:
    """Returns the command without names of hosts and runs, and without the length of a training."""
    text = re.sub(r" --(epochs|run-dir) \S+", "", " ".join(shown.words))
    text = re.sub(r"(--hosts|-H) \S+", "-H hosts", text)
    return re.sub(r"\b(runs/\S+|RUN)", "RUN", text)


def covering_test(shown: Shown) -> str:
    """Returns what else runs the command; "" if it is typed here."""
    covered_by = next(
        (why for start, why in COVERED_BY.items() if shown.text.startswith(start)), ""
    )
    return covered_by or ("test_lab_commands_run" if "-H lab" in shown.text else "")


def fill_placeholders(shown: Shown) -> Shown:
    """Replaces placeholders with values that a reader would use."""
    text = shown.text
    values = PLACEHOLDER_VALUES
    if "translate" in shown.words:
        values = {**values, r"\bRUN\b": TRANSLATION, '"sentence"…': '"forty-two"'}
    for pattern, value in values.items():
        text = re.sub(pattern, value, text)
    return Shown(shown.page, text, shown.output, shown.inline)


def shorten(text: str) -> str:
    text = text.partition(" #")[0].rstrip()
    extra_flags = next(
        (flags for pattern, flags in SHORTENING_FLAGS if re.search(pattern, text)), ""
    )
    return f"{text} {extra_flags}"


def expected_status(shown: Shown) -> int:
    """Returns the expected exit status of a command."""
    return EXPECTED_STATUS.get((shown.page, shown.text.partition(" #")[0].rstrip()), 0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, Path]]:
    reason = Lab.available()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("documents")
    with Lab(LabOptions(hosts=3, share=(str(folder),))) as lab:
        ssh = lab.home("n1") / ".ssh"
        ssh.mkdir(exist_ok=True, mode=0o700)
        shutil.copy(lab.ssh_config, ssh / "config")
        project = folder / "project"
        write_project_files(project)
        prepare_runs(lab, project, session=folder.parents["PYTEST_XDIST_WORKER" in os.environ])
        yield lab, project


def prepare_runs(lab: Lab, project: Path, session: Path) -> None:
    """Copies the runs that pages mention to the project; one pytest worker makes them for all."""
    cached_runs = session / "documented-runs"
    with (session / "documented-runs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if cached_runs.is_symlink():
            shutil.copytree(cached_runs, project / "runs")
            return
        for run in (
            f"image --run-dir {RUN}",
            f"translation --run-dir {TRANSLATION} --model tiny {SMALL_VALIDATION}",
        ):
            result = run_on_n1(lab, project, f"paceline train {run} --steps 2")
            assert result.returncode == 0, result.stderr
        failing = "paceline run --run-dir runs/train-20260301-101500 --no-torch broken.py"
        assert run_on_n1(lab, project, failing).returncode == 1
        cached_runs.symlink_to(project / "runs")


def run_on_n1(lab: Lab, folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Runs a command on n1, where paceline is installed."""
    programs = Path(sys.executable).parent
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(SOURCE), "COLUMNS": "80",
           "HF_HUB_OFFLINE": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMP_NUM_THREADS": "1",
           "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
           "OMPI_MCA_rmaps_base_oversubscribe": "1",
           "PACELINE_OPT_REPORT": "no"}  # fmt: skip
    if re.match("paceline (run|train) ", text) and "--detach" not in text:  # others reject it
        env["PACELINE_OPT_KEEP_WARM"] = "2m"  # hosts import torch once, not once per command
    return lab.exec("n1", ["bash", "-c", text], env=env, cwd=str(folder), timeout=100)


def is_reference(page: str) -> bool:
    """Returns whether ``test_reference_runs.py`` runs the page in a lab of its own."""
    return any(path.name == page and path.parent.name == "reference" for path in PAGES)


@pytest.mark.parametrize("page", [page for page in to_type() if not is_reference(page)])
def test_page_runs(page: str, place: tuple[Lab, Path]) -> None:
    type_page(page, *place)


def type_page(page: str, lab: Lab, project: Path) -> None:
    folder = Path(shutil.copytree(project, project.parent / page.removesuffix(".md")))
    write_page_files(page, folder)
    failed = []
    for shown in to_type()[page]:
        result = run_on_n1(lab, folder, shorten(fill_placeholders(shown).text))
        if result.returncode != expected_status(shown):
            failed.append(f"{shown.text}\n{result.stdout[-1500:]}{result.stderr[-1500:]}")
        output_lines = (result.stdout + result.stderr).splitlines()
        failed += [
            f"{shown.text}\nnot said: {line}"
            for line in expected_output(shown)
            if line not in output_lines
        ]
    assert not failed, "\n\n".join(failed)


def expected_output(shown: Shown) -> list[str]:
    """Returns the lines of a command's shown output that are the same in each run."""
    return [line for line in shown.output if shown.page == "describe-hosts.md" and line]


def test_skipped_commands_appear_in_pages() -> None:
    texts = [s.text for page in PAGES for s in (*in_blocks(page), *inline(page))]
    shown = {start for start in COVERED_BY if any(text.startswith(start) for text in texts)}
    optional = {"git clone", "cd paceline", "sudo apt ", ". .venv/bin/activate"}
    assert COVERED_BY.keys() - optional <= shown


def test_lab_commands_run(tmp_path: Path) -> None:
    """Runs the commands on this machine, page by page; checks that no lab is left running."""
    reason = Lab.available()
    if reason is not None:
        pytest.skip(reason)
    project = tmp_path / "project"  # a folder of its own: the lab's logs are not code
    project.mkdir()
    (project / "train.py").write_text(SCRIPT)
    programs = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(SOURCE),
           "XDG_RUNTIME_DIR": str(tmp_path)}  # fmt: skip

    def run(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", text], capture_output=True, text=True, timeout=100, check=False,
            env=env, cwd=project,
        )  # fmt: skip

    failed = []
    try:
        for page in PAGES:
            for shown in in_blocks(page):
                if page.name in PAGES_COVERED_BY or covering_test(shown) != "test_lab_commands_run":
                    continue
                text = shorten(
                    shown.text.replace("/tmp/paceline-lab-1000", str(tmp_path / "paceline-lab"))
                )
                if text.startswith("paceline lab shell"):
                    text += " -- hostname"  # the shell would wait for input
                result = run(text)
                if result.returncode != expected_status(shown):
                    failed.append(f"{shown}\n{result.stdout[-1000:]}{result.stderr[-1000:]}")
    finally:
        down = run("paceline lab down --all")
    assert down.returncode == 0, down.stderr
    assert not failed, "\n\n".join(failed)


# --- the folder that pages mention

SCRIPT = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""
LOG = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/work/train.py", line 3, in <module>
[rank1]:     import wheels
[rank1]: ModuleNotFoundError: No module named 'wheels'
"""
HOSTFILE = "n1:2\nme@n2:50022 slots=4\n"
MISSPELLED_HOSTFILE = "n1\nn2 slotz=4\n"


def write_project_files(folder: Path) -> None:
    """Writes the files that the pages mention."""
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "__init__.py").write_text("")
    for name in ("train.py", "package/train.py"):
        (folder / name).write_text(SCRIPT)
    (folder / "script.py").write_text("print('hello')\n")
    (folder / "train.sh").write_text("exec python script.py\n")
    (folder / "broken.py").write_text("import wheels\n")
    (folder / "requirements.txt").write_text("# nothing, because a lab has no way out\n")
    for name in ("hostfile", "hosts"):
        (folder / name).write_text("n1\nn2\n")
    for name in ("torchrun.log", "slurm-812.out"):
        (folder / name).write_text(LOG)
    (folder / "tables").mkdir()
    torch.save(torch.randn(64, 8), folder / "tables" / "table.pt")
    write_images(folder)
    texts(folder)
    write_small_fashion_mnist(folder / "fewer")


def write_images(folder: Path) -> None:
    from PIL import Image

    for place, part in (
        ("my-images", ""),
        ("photos", ""),
        ("imagenet", "train"),
        ("imagenet", "val"),
    ):
        for label in ("cats", "dogs"):
            label_dir = folder / place / part / label
            label_dir.mkdir(parents=True)
            for number in range(6):
                Image.new("RGB", (16, 16), (40 * number, 9, 99)).save(label_dir / f"{number}.png")
    Image.new("L", (8, 8), 7).save(folder / "photo.png")
    # a local folder with an id's name is used instead of the hub
    hub_folders.vit(folder / "google" / "vit-base-patch16-224")


def texts(folder: Path) -> None:
    hub_folders.bert(folder / "bert")
    rows = [
        f"{('bad', 'good')[n % 2]},the soup was {('cold', 'fine')[n % 2]} {n}" for n in range(40)
    ]
    tiny_language_model.save(folder / "HuggingFaceTB" / "SmolLM2-135M-Instruct")
    tiny_language_model.write_jsonl(folder / "chat.jsonl", tiny_language_model.chats(24))
    tiny_language_model.write_jsonl(folder / "pairs.jsonl", tiny_language_model.preferences(24))
    prose = "It was a dark and stormy night.\n" * 200
    (folder / "notes").mkdir()
    for name in ("book.txt", "other.txt", "start.txt", "notes/today.md"):
        (folder / name).write_text(prose[:32] if name == "start.txt" else prose)
    (folder / "corpus.jsonl").write_text(json.dumps({"text": prose}) + "\n")
    (folder / "reviews.csv").write_text("label,text\n" + "\n".join(rows) + "\n")
    for part in ("train", "test"):
        news = [f"{n % 4 + 1},title {n},body of number {n}" for n in range(40)]
        (folder / "ag_news").mkdir(exist_ok=True)
        (folder / "ag_news" / f"{part}.csv").write_text("\n".join(news) + "\n")
    pairs = [(f"number {n} in words", f"numero {n} in parole") for n in range(60)]
    (folder / "pairs.tsv").write_text(
        "".join(f"{english}\t{italian}\n" for english, italian in pairs)
    )
    for at, name in enumerate(("europarl.de", "europarl.en")):
        (folder / name).write_text("".join(f"{pair[at]}\n" for pair in pairs))
    (folder / "sentences").write_text("forty-two\nseven\n")
    books = folder / "Helsinki-NLP" / "opus_books"
    books.mkdir(parents=True)
    lines = [
        json.dumps({"translation": {"en": english, "it": italian}}) for english, italian in pairs
    ]
    (books / "train.jsonl").write_text("\n".join(lines) + "\n")


def write_small_fashion_mnist(folder: Path) -> None:
    """Writes 600 and 200 pictures of Fashion-MNIST in the original file format."""
    import gzip

    folder.mkdir()
    for name, count, start, item_bytes in (
        ("train-images-idx3", 600, 16, 784), ("train-labels-idx1", 600, 8, 1),
        ("t10k-images-idx3", 200, 16, 784), ("t10k-labels-idx1", 200, 8, 1),
    ):  # fmt: skip
        shape = [0x800 + start // 4 - 1, count, *([28, 28] if item_bytes > 1 else [])]
        content = b"".join(number.to_bytes(4, "big") for number in shape)
        content += bytes(number % 10 for number in range(count * item_bytes))
        (folder / f"{name}-ubyte.gz").write_bytes(gzip.compress(content))


def write_page_files(page: str, folder: Path) -> None:
    """Writes the last version of each file that the page shows (``file=NAME``)."""
    if page == "describe-hosts.md":
        (folder / "machines.txt").write_text(HOSTFILE)
        (folder / "hostfile").write_text(MISSPELLED_HOSTFILE)
    if page == "run.md":
        (folder / "paceline.toml").write_text("[run]\nlease = 20.0\n")
    path = next(path for path in PAGES if path.name == page)  # the main README comes first
    blocks = re.findall(
        r"^```(\w+) file=(\S+)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL
    )
    for language, name, text in blocks:
        file = folder / name
        lines = text.splitlines()
        if language == "diff":
            lines, _ = applied(file.read_text().splitlines(), lines)
        file.write_text("\n".join(lines) + "\n")
