"""Every command of every page runs, as it stands, in a lab.

A page is typed from top to bottom on ``n1``, in a folder with the files that pages speak of, with
``n2`` and ``n3`` reachable by SSH. A command that is new in a page is typed, too, without a word
here; one that cannot be stands in ``ELSEWHERE`` with what runs it instead. Only the length of
trainings is cut.
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

# by the beginning of a command: what runs it, or why nothing does
ELSEWHERE = {
    "make ": "tools/fresh-machine.sh, on a machine made from nothing",
    "git clone": "tools/fresh-machine.sh",
    "cd paceline": "tools/fresh-machine.sh",
    "sudo apt ": "tools/fresh-machine.sh",
    ". .venv/bin/activate": "every command here finds paceline as it does after that line",
    "paceline lab ": "test_lab_commands_run",
    "paceline run --hosts hostfile --fastest": "tests/unit/test_cli_forecast.py, after a forecast",
    "paceline run --rdzv": "tests/lab/test_by_hand.py, for it is typed on several nodes at once",
    "paceline train image --device cuda": "bench/gpu, for it needs a GPU",
    f"{SETUP_ENV} --offline": "tests/lab/test_setup.py, with a wheel that is shipped",
    "paceline completion ": "tests/contract/test_completion.py, in the shells that it is for",
    "paceline forecast ": "tests/lab/test_forecast.py, for it tries several runs",
    "paceline evaluate runs/chat --tasks": "tests/unit/test_language_tasks.py, without lm-eval",
    "paceline report ": "tests/unit/test_report_page.py, for it is about other runs",
    "paceline run -H hostfile --image": "tests/lab/test_docker.py, with an image made there",
}
PAGES_ELSEWHERE = {
    "first-run.md": "tests/lab/test_first_run.py, in its order",
    "coming-from.md": "tests/lab/test_coming_from.py",
    "trainers.md": "tests/lab/test_trainers.py, with packages that the environment lacks",
    "options.md": "the help of every command, whose examples have placeholders",
}

# by pattern: what is added, so that it takes seconds
FEW = "--val-fraction 0.02"  # an untrained model translates each sentence to the last token
SHORTER = [
    (r"paceline train image .*--preset imagenet", "--steps 1 --global-batch 4"),
    (r"paceline train .*fashion-mnist", "--steps 2 --data-dir fewer"),
    (r"paceline train translation", f"--steps 2 --model tiny --score-every 1000 {FEW}"),
    (r"paceline train language", "--steps 2 --depth 1 --max-length 32"),
    (r"paceline generate ", "--max-tokens 4"),
    (r"paceline train .* --find-lr", ""),  # its own hundred steps
    (r"paceline train ", "--steps 2"),
    (r"paceline run my_text.py", "--epochs 1 --data reviews.csv"),
    (r"paceline bench collectives", "-e 64K -n 2"),
    (r"paceline check (?!.*--quick)", "--no-trial"),
    (r"paceline benchmark ", "--iterations 3 --warm-up 1"),
]
# what stands for something of the reader's own
FILLED_IN = {r"\bRUN\b": RUN, r"INPUT…": "photo.png", r"\bNAME\b": "image", r"/mnt/data": "$PWD"}
# of what fails on purpose
STATUS = {
    ("describe-hosts.md", "paceline hosts hostfile"): 2,  # shows how an error looks
    ("README.md", "paceline check -H lab"): 1,  # n2 is unplugged
}


def to_type() -> dict[str, list[Shown]]:
    """By page, the commands that are typed here: all in blocks, and complete ones in tables.

    What an earlier page shows is not typed twice, even if it names other hosts and runs there.
    """
    found: dict[str, list[Shown]] = {}
    seen = set()
    for page in PAGES:
        if page.name in PAGES_ELSEWHERE or page.parent.name == "rules":
            continue
        whole = [s for s in in_blocks(page) if not re.search(r"…|\[", s.text)]
        complete = [s for s in inline(page) if len(s.words) > 2 and not filled(s).template]
        for shown in (*whole, *complete):
            key = form(shown) if page.name != "describe-hosts.md" else shown
            if not elsewhere(shown) and key not in seen:
                found.setdefault(page.name, []).append(shown)
                seen.add(key)
    return found


def form(shown: Shown) -> str:
    """The command without names of hosts and runs, and without the length of a training."""
    text = re.sub(r" --(epochs|run-dir) \S+", "", " ".join(shown.words))
    text = re.sub(r"(--hosts|-H) \S+", "-H hosts", text)
    return re.sub(r"\b(runs/\S+|RUN)", "RUN", text)


def elsewhere(shown: Shown) -> str:
    """What else runs it; empty when it is typed here."""
    named = next((why for start, why in ELSEWHERE.items() if shown.text.startswith(start)), "")
    return named or ("test_lab_commands_run" if "-H lab" in shown.text else "")


def filled(shown: Shown) -> Shown:
    """With what a reader would put in."""
    text = shown.text
    values = FILLED_IN
    if "translate" in shown.words:
        values = {**values, r"\bRUN\b": TRANSLATION, '"sentence"…': '"forty-two"'}
    for pattern, value in values.items():
        text = re.sub(pattern, value, text)
    return Shown(shown.page, text, shown.output, shown.inline)


def shortened(text: str) -> str:
    text = text.partition(" #")[0].rstrip()
    more = next((words for pattern, words in SHORTER if re.search(pattern, text)), "")
    return f"{text} {more}"


def wanted(shown: Shown) -> int:
    """Its exit status."""
    return STATUS.get((shown.page, shown.text.partition(" #")[0].rstrip()), 0)


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
        furnish(project)
        with_runs(lab, project, session=folder.parents["PYTEST_XDIST_WORKER" in os.environ])
        yield lab, project


def with_runs(lab: Lab, project: Path, session: Path) -> None:
    """The runs that pages speak of; made once for all workers, in whichever lab."""
    made = session / "documented-runs"
    with (session / "documented-runs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if made.is_symlink():
            shutil.copytree(made, project / "runs")
            return
        for run in (
            f"image --run-dir {RUN}",
            f"translation --run-dir {TRANSLATION} --model tiny {FEW}",
        ):
            done = typed(lab, project, f"paceline train {run} --steps 2")
            assert done.returncode == 0, done.stderr
        failing = "paceline run --run-dir runs/train-20260301-101500 --no-torch broken.py"
        assert typed(lab, project, failing).returncode == 1
        made.symlink_to(project / "runs")


def typed(lab: Lab, folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Types a line on n1, where paceline is installed."""
    programs = Path(sys.executable).parent
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(SOURCE), "COLUMNS": "80",
           "HF_HUB_OFFLINE": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMP_NUM_THREADS": "1",
           "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
           "OMPI_MCA_rmaps_base_oversubscribe": "1",
           "PACELINE_OPT_REPORT": "no"}  # fmt: skip
    if re.match("paceline (run|train) ", text) and "--detach" not in text:  # others refuse it
        env["PACELINE_OPT_KEEP_WARM"] = "2m"  # hosts import torch once, not for each command
    return lab.exec("n1", ["bash", "-c", text], env=env, cwd=str(folder), timeout=100)


def is_reference(page: str) -> bool:
    """Whether ``test_reference_runs.py`` types it, which has a lab of its own."""
    return any(path.name == page and path.parent.name == "reference" for path in PAGES)


@pytest.mark.parametrize("page", [page for page in to_type() if not is_reference(page)])
def test_page_runs(page: str, place: tuple[Lab, Path]) -> None:
    type_page(page, *place)


def type_page(page: str, lab: Lab, project: Path) -> None:
    folder = Path(shutil.copytree(project, project.parent / page.removesuffix(".md")))
    write_files_of(page, folder)
    failed = []
    for shown in to_type()[page]:
        done = typed(lab, folder, shortened(filled(shown).text))
        if done.returncode != wanted(shown):
            failed.append(f"{shown.text}\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
        said = (done.stdout + done.stderr).splitlines()
        failed += [
            f"{shown.text}\nnot said: {line}" for line in promised(shown) if line not in said
        ]
    assert not failed, "\n\n".join(failed)


def promised(shown: Shown) -> list[str]:
    """Lines that the page shows below a command, and that do not depend on the moment."""
    return [line for line in shown.output if shown.page == "describe-hosts.md" and line]


def test_every_command_that_is_run_elsewhere_is_still_shown() -> None:
    texts = [s.text for page in PAGES for s in (*in_blocks(page), *inline(page))]
    shown = {start for start in ELSEWHERE if any(text.startswith(start) for text in texts)}
    optional = {"git clone", "cd paceline", "sudo apt ", ". .venv/bin/activate"}
    assert ELSEWHERE.keys() - optional <= shown


def test_lab_commands_run(tmp_path: Path) -> None:
    """On this machine, page by page; the folder of labs is ours, and no lab in it is left up."""
    reason = Lab.available()
    if reason is not None:
        pytest.skip(reason)
    project = tmp_path / "project"  # the lab's own logs are no code
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
                if page.name in PAGES_ELSEWHERE or elsewhere(shown) != "test_lab_commands_run":
                    continue
                text = shortened(
                    shown.text.replace("/tmp/paceline-lab-1000", str(tmp_path / "paceline-lab"))
                )
                if text.startswith("paceline lab shell"):
                    text += " -- hostname"  # nobody types here
                done = run(text)
                if done.returncode != wanted(shown):
                    failed.append(f"{shown}\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    finally:
        down = run("paceline lab down --all")
    assert down.returncode == 0, down.stderr
    assert not failed, "\n\n".join(failed)


# --- the folder that pages speak of

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
MACHINES = "n1:2\nme@n2:50022 slots=4\n"
MISSPELT = "n1\nn2 slotz=4\n"


def furnish(folder: Path) -> None:
    """The files that the pages speak of."""
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "__init__.py").write_text("")
    for name in ("train.py", "package/train.py"):
        (folder / name).write_text(SCRIPT)
    (folder / "script.py").write_text("print('hello')\n")
    (folder / "broken.py").write_text("import wheels\n")
    (folder / "requirements.txt").write_text("# nothing, because a lab has no way out\n")
    for name in ("hostfile", "hosts"):
        (folder / name).write_text("n1\nn2\n")
    for name in ("torchrun.log", "slurm-812.out"):
        (folder / name).write_text(LOG)
    (folder / "tables").mkdir()
    torch.save(torch.randn(64, 8), folder / "tables" / "table.pt")
    pictures(folder)
    texts(folder)
    fewer_garments(folder / "fewer")


def pictures(folder: Path) -> None:
    from PIL import Image

    for place, part in (
        ("my-images", ""),
        ("photos", ""),
        ("imagenet", "train"),
        ("imagenet", "val"),
    ):
        for label in ("cats", "dogs"):
            where = folder / place / part / label
            where.mkdir(parents=True)
            for number in range(6):
                Image.new("RGB", (16, 16), (40 * number, 9, 99)).save(where / f"{number}.png")
    Image.new("L", (8, 8), 7).save(folder / "photo.png")
    # a folder of that name answers to what would be an id
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
    (folder / "pairs.tsv").write_text("".join(f"{one}\t{other}\n" for one, other in pairs))
    for at, name in enumerate(("europarl.de", "europarl.en")):
        (folder / name).write_text("".join(f"{pair[at]}\n" for pair in pairs))
    (folder / "sentences").write_text("forty-two\nseven\n")
    books = folder / "USER" / "opus_books"
    books.mkdir(parents=True)
    lines = [json.dumps({"translation": {"en": one, "it": other}}) for one, other in pairs]
    (books / "train.jsonl").write_text("\n".join(lines) + "\n")


def fewer_garments(folder: Path) -> None:
    """Fashion-MNIST with 600 and 200 pictures, in files of the same form."""
    import gzip

    folder.mkdir()
    for name, count, start, each in (
        ("train-images-idx3", 600, 16, 784), ("train-labels-idx1", 600, 8, 1),
        ("t10k-images-idx3", 200, 16, 784), ("t10k-labels-idx1", 200, 8, 1),
    ):  # fmt: skip
        shape = [0x800 + start // 4 - 1, count, *([28, 28] if each > 1 else [])]
        content = b"".join(number.to_bytes(4, "big") for number in shape)
        content += bytes(number % 10 for number in range(count * each))
        (folder / f"{name}-ubyte.gz").write_bytes(gzip.compress(content))


def write_files_of(page: str, folder: Path) -> None:
    """Files that the page itself spells out (``file=NAME``), the last form of each."""
    if page == "describe-hosts.md":
        (folder / "machines.txt").write_text(MACHINES)
        (folder / "hostfile").write_text(MISSPELT)
    if page == "run.md":
        (folder / "paceline.toml").write_text("[run]\nlease = 20.0\n")
    path = next(path for path in PAGES if path.name == page)  # the README's own comes first
    blocks = re.findall(
        r"^```(\w+) file=(\S+)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL
    )
    for language, name, text in blocks:
        file = folder / name
        lines = text.splitlines()
        if language == "diff":
            lines, _ = applied(file.read_text().splitlines(), lines)
        file.write_text("\n".join(lines) + "\n")
