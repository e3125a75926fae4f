"""Tests signed checkpoints: the reports of ``paceline verify``, and what no start resumes from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from paceline.cli import program
from paceline.rundir import signature_file, signatures, signed_model
from paceline.rundir.detached_file import LineSeals
from paceline.rundir.signature_file import SignatureFile
from paceline.rundir.signatures import Signer
from paceline.spec.errors import SettingError
from paceline.spec.rundir import BEST, CHECKPOINTS, MANIFEST, MODEL, SIGNATURES, WEIGHTS
from paceline.spec.training.checkpoint_manifest import FileEntry, Manifest, sha256


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer(tmp_path / "run")


@pytest.fixture
def run(tmp_path: Path, signer: Signer, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "events.jsonl").touch()
    for step in (10, 20, 30):
        write_checkpoint(folder, step)
        if step > 10:  # the first was written by an earlier version
            signer.sign_step(step)
    return folder


def write_checkpoint(run: Path, step: int, content: bytes = b"weights", **fields: Any) -> None:
    folder = run / CHECKPOINTS / str(step)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights.safetensors").write_bytes(content)
    previous_manifest = run / CHECKPOINTS / str(step - 10) / MANIFEST
    if previous_manifest.exists():
        fields["previous"] = {"checkpoint": str(step - 10), "sha256": sha256(previous_manifest)}
    entry = FileEntry(hashlib.sha256(content).hexdigest(), len(content))
    (folder / MANIFEST).write_bytes(Manifest(step, {"weights.safetensors": entry}, fields).encode())


def statuses(run: Path) -> list[str]:
    return [checkpoint.status for checkpoint in signatures.verify(run)]


def run_cli(arguments: Sequence[str]) -> Result:
    return CliRunner().invoke(program, arguments)


def test_reports_signed_and_unsigned_checkpoints(run: Path) -> None:
    assert statuses(run) == ["signed", "signed", "unsigned"]
    result = run_cli(["verify", str(run)])
    assert result.exit_code == 0
    assert [line.split()[:2] for line in result.output.splitlines()] == [
        ["30", "signed"], ["20", "signed"], ["10", "unsigned"],
    ]  # fmt: skip
    signatures.require_unchanged(run)


def test_detects_changed_file(run: Path) -> None:
    (run / CHECKPOINTS / "20" / "weights.safetensors").write_bytes(b"Weights")
    assert statuses(run) == ["signed", "changed", "unsigned"]
    result = run_cli(["verify", str(run)])
    assert result.exit_code == 1
    assert "weights.safetensors is not the file that was written" in result.output
    signatures.require_unchanged(run)  # ranks detect this and skip the checkpoint


def test_detects_file_missing_from_manifest(run: Path) -> None:
    """Otherwise readers would take it for the shard of another rank."""
    (run / CHECKPOINTS / "20" / "weights").mkdir()
    (run / CHECKPOINTS / "20" / "weights" / "00001.safetensors").write_bytes(b"others")
    assert statuses(run) == ["signed", "changed", "unsigned"]
    result = run_cli(["verify", str(run)])
    assert "'weights/00001.safetensors' is not in its manifest" in result.output


def test_rejects_forged_manifest(run: Path) -> None:
    """The manifest matches the files, so a rank would load the checkpoint."""
    write_checkpoint(run, 20, b"other weights")
    successor, forged, _ = signatures.verify(run)
    assert (forged.status, forged.is_signed) == ("changed", False)
    assert forged.problem == "its manifest was replaced after you signed it"
    assert successor.problem == "its predecessor 20 was replaced"
    with pytest.raises(SettingError, match="checkpoint 20 was replaced") as caught:
        signatures.require_unchanged(run)
    assert "paceline verify" in str(caught.value.remedy)


def test_detects_replaced_unsigned_predecessor(run: Path) -> None:
    write_checkpoint(run, 10, b"other weights")
    assert statuses(run) == ["signed", "changed", "unsigned"]


def test_damaged_manifest_does_not_count_as_forged(run: Path) -> None:
    with (run / CHECKPOINTS / "30" / MANIFEST).open("ab") as file:
        file.write(b" ")
    assert statuses(run) == ["changed", "signed", "unsigned"]
    signatures.require_unchanged(run)


def test_accepts_removed_and_re_signed_checkpoints(run: Path, signer: Signer) -> None:
    (run / CHECKPOINTS / "10" / MANIFEST).unlink()
    write_checkpoint(run, 30, best=True)  # the same state, now marked as best
    signer.sign("30")
    assert statuses(run) == ["signed", "signed"]
    with (run / SIGNATURES).open("ab") as file:
        file.write(b'{"checkpoint": "30", "manifest": "' + b"0" * 64 + b'"}\n{"che')  # incomplete
    assert statuses(run) == ["signed", "signed"]
    write_checkpoint(run, 40)
    signer.sign_step(None)
    assert statuses(run) == ["signed"] * 3


def test_does_not_sign_checkpoint_that_was_replaced(run: Path, signer: Signer) -> None:
    """A host may report a checkpoint again that it has replaced."""
    write_checkpoint(run, 20, b"other weights")
    signer.sign_step(20)
    signer.sign("20")
    assert statuses(run)[1] == "changed"
    with pytest.raises(SettingError, match="checkpoint 20 was replaced"):
        signatures.require_unchanged(run)


def test_signs_again_only_newest_that_it_signed(run: Path, signer: Signer) -> None:
    """A host may write an optimizer of its own into an earlier checkpoint with the same weights."""
    write_checkpoint(run, 20, best=True)
    signer.sign("20")
    assert statuses(run)[1] == "changed"
    write_checkpoint(run, 30, best=True)
    Signer(run).sign("30")  # of a later start
    assert statuses(run)[0] == "changed"
    signer.sign("30")
    assert statuses(run)[0] == "signed"


@pytest.mark.parametrize("name", ["extra.pt", "deep/er/file.json"])
def test_reports_any_file_missing_from_manifest(run: Path, name: str) -> None:
    file = run / CHECKPOINTS / "20" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    (_, changed, _) = signatures.verify(run)
    assert (changed.status, changed.problem) == ("changed", f"{name!r} is not in its manifest")


def test_reports_link_to_equal_content(run: Path, tmp_path: Path) -> None:
    file = run / CHECKPOINTS / "20" / "weights.safetensors"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    (_, changed, _) = signatures.verify(run)
    assert (changed.status, changed.problem) == ("changed", "'weights.safetensors' is a link")


def test_reports_link_to_folder(run: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (run / CHECKPOINTS / "20" / "weights").symlink_to(tmp_path / "elsewhere")
    (_, changed, _) = signatures.verify(run)
    assert (changed.status, changed.problem) == ("changed", "'weights' is a link")


def test_checkpoint_may_reuse_name_of_removed_checkpoint(run: Path) -> None:
    for file in (run / CHECKPOINTS / "30").iterdir():
        file.unlink()
    signatures.forget_removed(run)
    write_checkpoint(run, 30, b"of a later start")  # its launcher was killed before it signed
    assert statuses(run) == ["unsigned", "signed", "unsigned"]
    signatures.require_unchanged(run)


def test_ignores_signatures_of_another_user_or_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = run.rename(tmp_path / "moved")
    assert statuses(moved) == ["unsigned"] * 3
    moved.rename(run)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "of another user"))
    assert statuses(run) == ["unsigned"] * 3


def test_verify_without_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    result = run_cli(["verify", str(tmp_path)])
    assert (result.exit_code, result.output) == (0, f"no model and no checkpoints in {tmp_path}\n")


def test_reports_only_newest_signed_checkpoint_as_missing(run: Path, signer: Signer) -> None:
    write_checkpoint(run, 40)
    signer.sign_step(40)
    for name in ("10", "20", "30"):
        shutil.rmtree(run / CHECKPOINTS / name)
    assert statuses(run) == ["signed"]  # runs remove older ones
    shutil.rmtree(run / CHECKPOINTS / "40")
    result = run_cli(["verify", str(run)])
    assert (result.exit_code, result.output.split()[:2]) == (1, ["40", "missing"])
    (note,) = signatures.forget_removed(run)
    assert "40, which you signed, is missing" in note
    assert statuses(run) == []
    assert signatures.forget_removed(run) == []


def test_start_after_removal_of_newest_checkpoint_says_so(run: Path) -> None:
    shutil.rmtree(run / CHECKPOINTS / "30")
    assert statuses(run) == ["missing", "signed", "unsigned"]
    signatures.require_unchanged(run)  # you may go back to an earlier one
    note = "checkpoint 30, which you signed, is missing or has no manifest;"
    assert signatures.forget_removed(run) == [f"{note} the newest complete one is 20"]


def remove_manifest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()


def replace_manifest_by_pipe(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()
    os.mkfifo(checkpoint / MANIFEST)


def replace_folder_by_link(folder: Path) -> None:
    elsewhere = folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(elsewhere)


@pytest.mark.parametrize("name", ["20", "30"])
@pytest.mark.parametrize(
    "attack", [remove_manifest, replace_manifest_by_pipe, replace_folder_by_link]
)
def test_reports_signed_checkpoint_without_its_manifest(
    run: Path, name: str, attack: Callable[[Path], None]
) -> None:
    attack(run / CHECKPOINTS / name)
    (changed,) = [item for item in signatures.verify(run) if item.name == name]
    assert changed.status == "changed"
    assert run_cli(["verify", str(run)]).exit_code == 1


def test_reports_link_in_place_of_all_checkpoints(run: Path) -> None:
    replace_folder_by_link(run / CHECKPOINTS)
    assert statuses(run) == ["changed"] * 3


@pytest.mark.parametrize("content", [b"\n" * (signature_file.MAX_BYTES + 1), None])
def test_rejects_signatures_that_it_cannot_read(
    run: Path, signer: Signer, content: bytes | None
) -> None:
    """They do not look as if nothing had been signed."""
    file = run / SIGNATURES
    if content is None:
        file.unlink()
        os.mkfifo(file)
    else:
        file.write_bytes(file.read_bytes() + content)
    for check in (statuses, signatures.require_unchanged):
        with pytest.raises(SettingError, match="cannot be read"):
            check(run)
    write_checkpoint(run, 40)
    signer.sign("40")  # does nothing, and a running job continues
    assert not signer.may_arrive("40", Manifest(40, {}, {}))


def signed_lines(run: Path) -> list[bytes]:
    return [line for line in (run / SIGNATURES).read_bytes().split(b"\n") if line]


def write_lines(run: Path, lines: Sequence[bytes]) -> None:
    (run / SIGNATURES).write_bytes(b"\n".join(lines) + b"\n")


def remove_newest_with_its_line(run: Path) -> None:
    shutil.rmtree(run / CHECKPOINTS / "40")
    write_lines(run, signed_lines(run)[:-1])


def remove_line_in_the_middle(run: Path) -> None:
    first, _, *later = signed_lines(run)
    write_lines(run, [first, *later])


def move_first_line_last(run: Path) -> None:
    first, *later = signed_lines(run)
    write_lines(run, [*later, first])


def repeat_line(run: Path) -> None:
    write_lines(run, [*signed_lines(run), signed_lines(run)[1]])


def remove_all_lines(run: Path) -> None:
    (run / SIGNATURES).unlink()


LINE_ATTACKS = [
    remove_newest_with_its_line,
    remove_line_in_the_middle,
    move_first_line_last,
    repeat_line,
    remove_all_lines,
]


@pytest.mark.parametrize("attack", LINE_ATTACKS)
def test_reports_removed_moved_and_added_signatures(
    run: Path, signer: Signer, attack: Callable[[Path], None]
) -> None:
    write_checkpoint(run, 40)
    signer.sign("40")
    assert run_cli(["verify", str(run)]).exit_code == 0
    attack(run)
    result = run_cli(["verify", str(run)])
    assert result.exit_code == 1
    assert f"{SIGNATURES} was changed: the l" in result.output
    assert any(
        "signatures in the run directory were changed" in n for n in signatures.forget_removed(run)
    )
    write_checkpoint(run, 50)  # neither a start nor a later signature hides it
    signer.sign("50")
    assert statuses(run)[0] == "signed"
    assert run_cli(["verify", str(run)]).exit_code == 1


@pytest.mark.parametrize("attack", LINE_ATTACKS)
def test_later_signature_does_not_hide_attack(
    run: Path, signer: Signer, attack: Callable[[Path], None]
) -> None:
    write_checkpoint(run, 40)
    signer.sign("40")
    attack(run)
    write_checkpoint(run, 50)
    signer.sign("50")
    assert run_cli(["verify", str(run)]).exit_code == 1


def test_remedy_makes_checkpoints_unsigned(run: Path) -> None:
    remove_line_in_the_middle(run)
    for word in SignatureFile(run).remedy.split()[-2:]:
        Path(word).unlink()
    assert statuses(run) == ["unsigned"] * 3
    assert run_cli(["verify", str(run)]).exit_code == 0


def test_restored_manifest_with_its_former_line_counts_as_replaced(
    run: Path, signer: Signer
) -> None:
    former = (run / CHECKPOINTS / "30" / MANIFEST).read_bytes()
    write_checkpoint(run, 30, b"other weights")
    signer.sign("30")
    (run / CHECKPOINTS / "30" / MANIFEST).write_bytes(former)
    (run / CHECKPOINTS / "30" / "weights.safetensors").write_bytes(b"weights")
    first, second, third = signed_lines(run)
    write_lines(run, [first, third, second])
    assert statuses(run)[0] == "changed"
    assert run_cli(["verify", str(run)]).exit_code == 1
    with pytest.raises(SettingError, match="checkpoint 30 was replaced"):
        signatures.require_unchanged(run)


def test_does_not_sign_earlier_checkpoint_again_after_its_line_was_removed(
    run: Path, signer: Signer
) -> None:
    write_lines(run, signed_lines(run)[1:])
    write_checkpoint(run, 20, b"other weights")
    signer.sign("20")
    assert statuses(run)[1] != "signed"


def test_reports_unsigned_checkpoint_after_signed_one(run: Path) -> None:
    write_checkpoint(run, 25, b"other weights")
    assert statuses(run) == ["signed", "unsigned", "signed", "unsigned"]
    result = run_cli(["verify", str(run)])
    assert result.exit_code == 1
    assert f"remove it: rm -r {run / CHECKPOINTS / '25'}" in result.output
    (note,) = signatures.forget_removed(run)
    assert note.startswith("checkpoint 25 is not signed, although an earlier one is; see: pacel")


def test_signatures_without_chain_count_until_chain_begins(run: Path, signer: Signer) -> None:
    """Earlier versions wrote them."""
    seals = LineSeals(run)
    contents = [
        {"checkpoint": name, "manifest": sha256(run / CHECKPOINTS / name / MANIFEST)}
        for name in ("20", "30")
    ]
    lines = [json.dumps(seals.sealed(content)).encode() for content in contents]
    write_lines(run, lines)
    SignatureFile(run).remove_record()
    result = run_cli(["verify", str(run)])
    assert statuses(run) == ["signed", "signed", "unsigned"]
    assert result.exit_code == 0
    assert "no record of the last signature" in result.output
    assert signatures.forget_removed(run) == []
    assert "no record" not in run_cli(["verify", str(run)]).output
    write_checkpoint(run, 30, b"other weights")
    signer.newest = "30"
    signer.sign("30")
    write_lines(run, [*signed_lines(run), lines[-1]])  # restored from before the chain
    assert statuses(run) == ["signed", "signed", "unsigned"]


def test_record_of_removed_run_does_not_concern_next_one(run: Path, signer: Signer) -> None:
    shutil.rmtree(run)
    run.mkdir()
    (run / "events.jsonl").touch()
    assert signatures.forget_removed(run) == []
    write_checkpoint(run, 10)
    signer.sign("10")
    assert run_cli(["verify", str(run)]).output.split()[:2] == ["10", "signed"]
    assert run_cli(["verify", str(run)]).exit_code == 0


def test_record_sealed_with_another_key_is_ignored(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config" / "paceline" / "seal").write_bytes(bytes(32))
    assert statuses(run) == ["unsigned"] * 3
    assert run_cli(["verify", str(run)]).exit_code == 0


def test_keeps_limited_number_of_records(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signature_file, "MAX_RECORDS", 2)
    for name in ("a", "b", "c"):
        write_checkpoint(tmp_path / name, 10)
        Signer(tmp_path / name).sign("10")
    folder = tmp_path / "config" / "paceline" / "signed"
    assert len([path for path in folder.iterdir() if path.is_file()]) == 2
    assert SignatureFile(tmp_path / "c").read().is_recorded
    assert not SignatureFile(run).read().is_recorded


def test_manifest_of_another_step_is_damaged(run: Path) -> None:
    shutil.copytree(run / CHECKPOINTS / "10", run / CHECKPOINTS / "70")
    (checkpoint, *_) = signatures.verify(run)
    assert checkpoint.status == "changed"
    assert checkpoint.problem == "manifest.json is damaged: it belongs to step 10"


def test_lists_files_that_nfs_keeps_as_not_covered(run: Path) -> None:
    (run / CHECKPOINTS / "20" / ".nfs0000000001").write_bytes(b"anything")
    result = run_cli(["verify", str(run)])
    assert result.exit_code == 0
    assert "20           signed    1 file, 0 MiB; not covered: .nfs0000000001\n" in result.output


# --- the final model, and which checkpoint is the best


def write_model(run: Path, weights: bytes = b"trained") -> str:
    """Writes a model as ranks do; returns the SHA-256 of its weights."""
    digest = hashlib.sha256(weights).hexdigest()
    (run / MODEL).mkdir(exist_ok=True)
    (run / WEIGHTS).write_bytes(weights)
    (run / MODEL / "config.json").write_text(json.dumps({"task": "image", "sha256": digest}))
    (run / MODEL / "tokenizer.json").write_text("{}")
    return digest


@pytest.fixture
def trained(run: Path) -> Path:
    signed_model.sign(run, write_model(run))
    return run


def model_status(run: Path) -> str:
    model = signed_model.verify_model(run)
    return model.status if model else ""


def replace_weights_and_their_hash(run: Path) -> None:
    write_model(run, b"negated")


def replace_weights(run: Path) -> None:
    (run / WEIGHTS).write_bytes(b"negated")


def change_tokenizer(run: Path) -> None:
    (run / MODEL / "tokenizer.json").write_text("[]")


def add_template(run: Path) -> None:
    (run / MODEL / "chat_template.jinja").touch()


def remove_description(run: Path) -> None:
    """Then a checkpoint is used."""
    (run / MODEL / "config.json").unlink()


def replace_weights_by_link(run: Path) -> None:
    (run / WEIGHTS).rename(run / "elsewhere")
    (run / WEIGHTS).symlink_to(run / "elsewhere")


def replace_model_by_link(run: Path) -> None:
    replace_folder_by_link(run / MODEL)


def replace_tokenizer_by_pipe(run: Path) -> None:
    (run / MODEL / "tokenizer.json").unlink()
    os.mkfifo(run / MODEL / "tokenizer.json")


def test_reports_signed_model(trained: Path) -> None:
    result = run_cli(["verify", str(trained)])
    assert result.exit_code == 0
    assert result.output.splitlines()[0] == "model        signed    3 files, 0 MiB"
    assert signed_model.forget_removed(trained) == []


@pytest.mark.parametrize(
    ("attack", "problem"),
    [
        (replace_weights_and_their_hash, "'model/config.json' is not the file that was written"),
        (replace_weights, "'model/model.safetensors' is not the file that was written"),
        (change_tokenizer, "'model/tokenizer.json' is not the file that was written"),
        (add_template, "'model/chat_template.jinja' was added"),
        (remove_description, "'model/config.json' is gone"),
        (replace_weights_by_link, "'model/model.safetensors' is no plain file"),
        (replace_model_by_link, "model is a link"),
        (replace_tokenizer_by_pipe, "'model/tokenizer.json' is no plain file"),
    ],
)
def test_reports_changed_model(trained: Path, attack: Callable[[Path], None], problem: str) -> None:
    attack(trained)
    result = run_cli(["verify", str(trained)])
    assert result.exit_code == 1
    assert result.output.splitlines()[0].startswith(f"model        changed   {problem}")


def test_reports_missing_model_until_next_start(trained: Path) -> None:
    shutil.rmtree(trained / MODEL)
    result = run_cli(["verify", str(trained)])
    assert (result.exit_code, result.output.split()[:2]) == (1, ["model", "missing"])
    assert signed_model.forget_removed(trained) == ["the final model, which you signed, is missing"]
    assert run_cli(["verify", str(trained)]).exit_code == 0
    assert statuses(trained) == ["signed", "signed", "unsigned"]


def test_reports_unsigned_model(run: Path) -> None:
    """It is of an earlier version, or of another user."""
    write_model(run)
    result = run_cli(["verify", str(run)])
    assert (result.exit_code, result.output.split()[:2]) == (0, ["model", "unsigned"])
    replace_weights(run)
    assert run_cli(["verify", str(run)]).exit_code == 1


def test_removed_signature_of_model_is_noticed(trained: Path) -> None:
    write_lines(trained, signed_lines(trained)[:-1])
    write_model(trained, b"negated")
    result = run_cli(["verify", str(trained)])
    assert result.exit_code == 1
    assert "the last line, of the final model, is missing" in result.output


def test_model_added_to_interrupted_run_is_noticed(run: Path) -> None:
    (run / MODEL).mkdir()
    for content in ("{}", "[]"):  # each start writes the tokenizer
        (run / MODEL / "tokenizer.json").write_text(content)
        signed_model.sign(run, "")
        assert model_status(run) == "signed"
    write_model(run)
    assert model_status(run) == "changed"


def test_start_that_saved_no_model_does_not_sign_changed_one(trained: Path) -> None:
    digest = write_model(trained, b"negated")
    (note,) = signed_model.forget_removed(trained)
    assert note.startswith("the final model was changed: 'model/config.json' is not the file")
    signed_model.sign(trained, "")
    signed_model.sign(trained, "0" * 64)  # it has saved other weights
    assert model_status(trained) == "changed"
    signed_model.sign(trained, digest)
    assert model_status(trained) == "signed"


def test_signature_of_model_survives_rewritten_lines(trained: Path) -> None:
    shutil.rmtree(trained / CHECKPOINTS / "30")
    signatures.forget_removed(trained)
    assert model_status(trained) == "signed"
    assert run_cli(["verify", str(trained)]).exit_code == 0


def test_folder_of_project_is_not_signed_as_model(run: Path) -> None:
    (run / MODEL).mkdir()
    (run / MODEL / "net.py").write_text("import torch")
    signed_model.sign(run, "")
    (run / MODEL / "net.py").write_text("import torch.nn")
    assert model_status(run) == ""
    assert run_cli(["verify", str(run)]).exit_code == 0


def test_model_of_script_is_not_signed_and_not_read(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed_model.sign(run, "")  # a start that was interrupted
    write_model(run)
    (run / MODEL / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr(signed_model, "hash_file", lambda path: pytest.fail(f"reads {path}"))
    signed_model.sign(run, "")
    assert signed_model.forget_removed(run) == []
    assert model_status(run) == ""
    assert run_cli(["verify", str(run)]).exit_code == 0


def test_machines_of_one_home_sign_in_turn(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("a", "a", "c", "a"):
        monkeypatch.setattr(signature_file.socket, "gethostname", lambda host=host: host)
        assert signatures.forget_removed(trained) == []
        assert signed_model.forget_removed(trained) == []
        signed_model.sign(trained, write_model(trained, host.encode()))
    assert run_cli(["verify", str(trained)]).exit_code == 0


def test_job_without_checkpoints_and_model_signs_nothing(tmp_path: Path) -> None:
    signed_model.sign(tmp_path, "")
    assert list(tmp_path.iterdir()) == []


def test_pointer_to_other_than_best_checkpoint_is_reported(run: Path, signer: Signer) -> None:
    for step in (40, 50):
        write_checkpoint(run, step, **({"best": True} if step == 40 else {}))
        signer.sign_step(step)
    pointer = run / CHECKPOINTS / BEST
    assert run_cli(["verify", str(run)]).exit_code == 0
    for name in ("40", "999"):
        pointer.write_text(json.dumps({"step": int(name), "checkpoint": name}))
        assert run_cli(["verify", str(run)]).exit_code == 0
    pointer.write_text(json.dumps({"step": 20, "checkpoint": "20"}))
    result = run_cli(["verify", str(run)])
    assert result.exit_code == 1
    line = "best.json    changed   it names 20, but according to the manifests, 40 is the best."
    assert result.output.startswith(line)


def test_pointer_without_best_manifest_is_reported(run: Path) -> None:
    (run / CHECKPOINTS / BEST).write_text(json.dumps({"step": 20, "checkpoint": "20"}))
    result = run_cli(["verify", str(run)])
    assert result.exit_code == 1
    assert "it names 20, but no manifest says that its checkpoint was the best" in result.output
