"""Tests the text recipe: readers of data, metrics, and whole trainings of tiny models."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_folders import bert
from recipe_tools import config, hub_variables, one_thread, records  # noqa: F401 - fixtures
from safetensors.torch import load_file, save_file

from paceline.recipes import parse_options, pretrained, text
from paceline.recipes.data import tables
from paceline.recipes.data.tables import read_jsonl, read_lines
from paceline.recipes.data.texts import Recorded, TextData, load_texts
from paceline.recipes.options import TextOptions
from paceline.recipes.pretrained import stages_of
from paceline.recipes.text import macro_f1
from paceline.recipes.tokens import saved_encoding
from paceline.recipes.use import evaluate, predict
from paceline.recipes.use import text as use_text
from paceline.spec import jobenv
from paceline.spec.errors import DataError, SettingError

ROWS = [(label, f"text {n}, of {label}") for n in range(20) for label in ("no", "yes")]


def read(name: Path | str, labels: tuple[str, ...] = (), **overrides: Any) -> TextData:
    return load_texts(TextOptions(data=str(name), **overrides), labels)


def write_csv(path: Path, rows: Sequence[Sequence[object]], delimiter: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


# -- data ----------------------------------------------------------------------------------


def test_formats_have_equal_fingerprint(tmp_path: Path) -> None:
    named = [("id", "sentence", "label"), *((n, t, c) for n, (c, t) in enumerate(ROWS))]
    custom_header = [("topic id", "body"), *ROWS]
    named_columns = {"label_column": "topic id", "text_column": "body"}
    lines = (json.dumps({"text": t, "label": c}) for c, t in ROWS)
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    data_sets = [
        read(write_csv(tmp_path / "a.csv", ROWS)),
        read(write_csv(tmp_path / "b.csv", named)),
        read(write_csv(tmp_path / "c.csv", custom_header, ";"), delimiter=";", **named_columns),
        read(tmp_path / "d.jsonl"),
        read(write_csv(tmp_path / "e.tsv", ROWS, "\t")),
    ]
    assert len({item.fingerprint for item in data_sets}) == 1
    assert data_sets[0].classes == ("no", "yes")
    assert {name: len(labels) for name, (_, labels) in data_sets[0].splits.items()} == {
        "train": 36,
        "test": 4,
    }


def test_columns_are_chosen_by_priority_of_their_names(tmp_path: Path) -> None:
    rows = [{"topic": "x", "title": "y", "text": t, "n": 1, "label": c} for c, t in ROWS]
    table = [[*rows[0]], *([*row.values()] for row in rows)]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / "d.jsonl").write_text(lines)
    saved = pytest.importorskip("datasets").Dataset.from_list(rows)
    saved.to_parquet(tmp_path / "d.parquet")
    saved.save_to_disk(str(tmp_path / "saved"))
    expected = read(write_csv(tmp_path / "expected.csv", ROWS)).fingerprint
    paths = [write_csv(tmp_path / "d.csv", table), tmp_path / "saved"]
    for path in (*paths, tmp_path / "d.jsonl", tmp_path / "d.parquet"):
        data = read(path)
        assert data.fingerprint == expected
        assert data.columns == ("label", "text")
        assert data.unused == ("topic", "title", "n")


def test_test_part_is_read_from_columns_of_training_part(tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv", [("class", "review"), *ROWS])
    write_csv(tmp_path / "test.csv", [("label", "text", "class", "review"), ("a", "b", "no", "c")])
    assert read(tmp_path).splits["test"] == (["c"], [0])
    by_file = read(tmp_path / "train.csv", test_data=str(tmp_path / "test.csv"))
    assert by_file.splits["test"] == (["c"], [0])


def test_header_tells_delimiter(tmp_path: Path) -> None:
    rows = [("Label", "Text"), *((label, f"{text}, it says") for label, text in ROWS)]
    expected = read(write_csv(tmp_path / "a.csv", rows)).fingerprint
    for delimiter in ";\t|":
        path = write_csv(tmp_path / "b.csv", rows, delimiter)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert read(path).fingerprint == expected


@pytest.mark.parametrize("place", range(0, 41, 4))
def test_only_row_of_a_class_is_for_training(tmp_path: Path, place: int) -> None:
    rows = [*ROWS[:place], ("neutral", "so so"), *ROWS[place:]]
    data = read(write_csv(tmp_path / "d.csv", [("label", "text"), *rows]), test_fraction=0.5)
    texts, labels = data.splits["train"]
    trained = [(data.classes[label], text) for text, label in zip(texts, labels, strict=True)]
    assert ("neutral", "so so") in trained
    assert trained == [row for row in rows if row in trained]
    assert sum(len(labels) for _, labels in data.splits.values()) == len(rows)


def test_copy_of_training_data_is_divided_in_the_same_way(tmp_path: Path) -> None:
    rows = [(f"class {n // 2}", f"text {n}") for n in range(20)]
    path = write_csv(tmp_path / "d.csv", rows)
    data = read(path, test_fraction=0.5)
    assert read(path, data.labels, test_fraction=0.5).fingerprint == data.fingerprint


@pytest.mark.parametrize("header", ["topic,label,text", "label,title,text"])
def test_refuses_usual_columns_of_which_the_run_records_none(tmp_path: Path, header: str) -> None:
    """An older version read the leftmost ones, and recorded only options."""
    path = tmp_path / "d.csv"
    path.write_text(f"{header}\na,b,c\nb,a,c\n")
    options = TextOptions(data=str(path))
    with pytest.raises(DataError, match="has 2 columns that may hold a") as error:
        load_texts(options, ("a", "b"), Recorded(("", "")))
    assert error.value.found.startswith(("topic, label;", "title, text;"))
    assert "read the leftmost one" in error.value.remedy
    load_texts(options, ("a", "b", "c"), Recorded(("label", "text")))


def test_each_file_is_read_with_the_delimiter_of_the_training(tmp_path: Path) -> None:
    rows = [("no", "bad, it says"), ("yes", "good, it says")]
    write_csv(tmp_path / "train.csv", rows, ";")
    write_csv(tmp_path / "test.tsv", rows, "\t")
    recorded = Recorded(("", ""), ";", "one.csv")
    for name in (tmp_path, tmp_path / "train.csv", tmp_path / "test.tsv"):
        data = load_texts(TextOptions(data=str(name)), ("no", "yes"), recorded)
        texts = [text for texts, _ in data.splits.values() for text in texts]
        assert {*texts} == {text for _, text in rows}
    assert Recorded(("", ""), ";").delimiter_of(tmp_path / "test.tsv") == ";"
    assert Recorded(("", ""), ";", "data.v2").delimiter_of(tmp_path / "train.csv") == ";"


def test_remedy_of_an_evaluation_does_not_change_the_training(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "d.csv", ROWS)
    with pytest.raises(DataError) as error:
        load_texts(TextOptions(data=str(path)), ("no", "perhaps"), Recorded(("", "")))
    assert error.value.remedy == "correct or remove such rows (each row: label, text)"
    path.write_text("no\nyes\n")
    with pytest.raises(DataError) as error:
        load_texts(TextOptions(data=str(path)), ("no", "yes"), Recorded(("", "")))
    assert error.value.remedy == "each row: label, text"


def test_description_holds_any_label_of_a_training() -> None:
    labels = ["short", "long " * 999]
    data = {"source": "", "config": "", "fingerprint": "", "split": {"method": ""}}
    data |= {"test": "", "columns": ["", ""], "delimiter": ""}
    names = {"classes": labels, "labels": labels}
    use_text._DESCRIPTION({**names, "max_length": 8, "data": data, "number_format": "fp16"}, "")


def test_part_to_train_on_is_required(tmp_path: Path) -> None:
    write_csv(tmp_path / "test.csv", ROWS)
    with pytest.raises(DataError, match="has no part to train on"):
        read(tmp_path)
    assert read(tmp_path, labels=("no", "yes")).splits.keys() == {"test"}


def test_only_line_feeds_end_a_row(tmp_path: Path) -> None:
    rows = [(label, f"a\u2028b\x85c\x0b {n}") for n in range(20) for label in ("no", "yes")]
    (tmp_path / "a.csv").write_text("".join(f"{label},{text}\n" for label, text in rows))
    objects = [{"label": label, "text": text} for label, text in rows]
    lines = (json.dumps(item, ensure_ascii=False) + "\n" for item in objects)
    (tmp_path / "a.jsonl").write_text("".join(lines))
    for name in ("a.csv", "a.jsonl"):
        splits = read(tmp_path / name).splits
        assert sorted(t for texts, _ in splits.values() for t in texts) == sorted(
            t for _, t in rows
        )


def test_label_with_two_dashes_is_no_number(tmp_path: Path) -> None:
    rows = [(label, f"text {n}") for n in range(20) for label in ("--5", "3")]
    assert read(write_csv(tmp_path / "a.csv", rows)).classes == ("--5", "3")


def test_lone_surrogate_error_names_line(tmp_path: Path) -> None:
    whole, half = ({"label": "a", "text": text} for text in ("\U0001f6b4", "\ud83d"))
    (tmp_path / "d.jsonl").write_text(f"{json.dumps(whole)}\n{json.dumps(half)}\n")
    with pytest.raises(DataError, match=r"d\.jsonl line 2 is not valid JSON"):
        read(tmp_path / "d.jsonl")


@pytest.mark.parametrize(("end", "is_valid"), [("\n", True), (" \n\n", True), ("\n{}\n", False)])
def test_empty_lines_end_jsonl_file(tmp_path: Path, end: str, is_valid: bool) -> None:
    row = json.dumps({"label": "a", "text": "one"})
    (tmp_path / "d.jsonl").write_text(f"{row}\n{end}")
    if is_valid:
        assert read_jsonl(tmp_path / "d.jsonl") == [json.loads(row)]
    else:
        with pytest.raises(DataError, match=r"d\.jsonl line 2 is not valid JSON"):
            read_jsonl(tmp_path / "d.jsonl")


def test_numbered_labels_from_one_with_names_and_test_file(tmp_path: Path) -> None:
    rows = [(n % 3 + 1, f"headline {n}") for n in range(9)]
    write_csv(tmp_path / "train.csv", rows)
    write_csv(tmp_path / "test.csv", rows[:3])
    data = read(tmp_path, class_names=("world", "sport", "business"))
    assert data.classes == ("world", "sport", "business")
    assert data.splits["test"] == ([text for _, text in rows[:3]], [0, 1, 2])
    by_file = read(tmp_path / "train.csv", test_data=str(tmp_path / "test.csv"))
    assert by_file.classes == ("1", "2", "3")


@pytest.mark.parametrize(
    ("rows", "overrides", "message"),
    [
        ([], {}, "is empty"),
        ([("label", "text", "text"), (1, "a", "b")], {}, "line 1 names two columns text"),
        ([("label", "text"), (1, "a", "b")], {}, "row 2 has more columns than the header"),
        ([("label", "text")], {}, "has a header and no rows"),
        ([("one column",)], {}, "row 1 has one column only"),
        ([("a", "x"), ("a", "y")], {}, "has 1 class\n"),
        (ROWS, {"label_column": "label"}, "no column label"),
        ([(0, "x"), (5, "y")] * 4, {"class_names": ("a", "b")}, "label 5, outside the range"),
        (ROWS, {"class_names": ("a", "b")}, "do not fit"),
        (ROWS, {"labels": ("no", "perhaps")}, "label 'yes' of t"),
    ],
)
def test_invalid_csv_error_names_file(
    tmp_path: Path, rows: list[Any], overrides: dict[str, Any], message: str
) -> None:
    path = write_csv(tmp_path / "d.csv", rows)
    with pytest.raises(DataError, match=message) as error:
        read(path, **overrides)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model=smal"], "did you mean --model small"),
        (["--freeze"], "would keep random weights"),
        (["--unfreeze-every=1"], "needs something frozen"),
        (["--model=./x", "--weights=y"], "brings its own weights"),
        (["--delimiter=ab"], "one character"),
    ],
)
def test_rejects_invalid_settings(flags: list[str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        parse_options("text", flags)


def test_macro_f1() -> None:
    confusion = torch.tensor([[3.0, 1.0, 0.0], [1.0, 5.0, 0.0], [0.0, 0.0, 0.0]])
    assert macro_f1(confusion) == pytest.approx((6 / 8 + 10 / 12) / 2)


# -- whole trainings -----------------------------------------------------------------------


def train(folder: Path, *flags: str) -> int:
    return text.main([f"--run-dir={folder}", "--device=cpu", "--checkpoint-every=never", *flags])


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "run"
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert train(folder, "--epochs=3", "--dropout=0") == 0
    torch.set_num_threads(before)
    return folder


def test_model_learns_word_order(trained_run: Path, tmp_path: Path) -> None:
    assert config(trained_run)["metrics"]["test"]["accuracy"] >= 0.9
    assert train(tmp_path / "words", "--epochs=2", "--model=words") == 0
    assert config(tmp_path / "words")["metrics"]["test"]["accuracy"] < 0.65


def test_evaluate_and_predict(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    assert evaluate.main([f"--run={trained_run}", f"--figures={report}"]) == 0
    recorded = config(trained_run)["metrics"]["test"]
    assert json.loads(report.read_text()) == {"split": "test", **recorded}
    capsys.readouterr()
    rows = [("id", "text"), (1, "the food was awful and the music was great")]
    path = write_csv(tmp_path / "in.csv", rows)
    said = "the music was awful and the food was great"
    assert predict.main([f"--run={trained_run}", "--json", said, str(path)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["class"] for line in lines] == ["praised", "blamed"]
    assert sum(lines[0]["probabilities"].values()) == pytest.approx(1)


def test_evaluates_columns_of_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("kind", "title", "text", "n"), *((c, t, "x", n) for n, (c, t) in enumerate(ROWS))]
    path, run = write_csv(tmp_path / "d.csv", rows), tmp_path / "run"
    flags = ["--label-column=kind", "--text-column=title", "--steps=1"]
    assert train(run, f"--data={path}", *flags) == 0
    said = "labels from column kind, texts from column title; unused: text, n"
    assert said in capsys.readouterr().out
    assert config(run)["data"]["columns"] == ["kind", "title"]
    assert evaluate.main([f"--run={run}"]) == 0
    write_csv(path, rows, ";")
    assert evaluate.main([f"--run={run}", f"--data={path}", "--split=train"]) == 0
    assert "36 train texts" in capsys.readouterr().out


def test_skips_and_counts_incomplete_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("label", "text"), *ROWS, ("", "no label"), ("yes", " "), ("", "")]
    path = write_csv(tmp_path / "d.csv", rows)
    assert text.main([f"--run-dir={tmp_path / 'run'}", f"--data={path}", "--steps=1"]) == 0
    assert "2 rows of" in capsys.readouterr().out
    assert evaluate.main([f"--run={tmp_path / 'run'}"]) == 0
    assert "2 rows of" in capsys.readouterr().out
    assert "" not in config(tmp_path / "run")["classes"]


@pytest.mark.parametrize(
    ("header", "extra_flags", "remedy"),
    [
        ("Ergebnis,Bewertung Text", [], "--label-column Ergebnis --text-column 'Bewertung Text'"),
        ("ID;Text;Ergebnis", ["--label-column=Ergebnis"], "--delimiter ';'"),
        ("Ergebnis,Text", ["--label-column=ergebnis"], "--label-column Ergebnis"),
    ],
)
def test_unknown_header_suggests_options(
    header: str,
    extra_flags: list[str],
    remedy: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "d.csv"
    path.write_text("\n".join([header, *["gut,toll", "mies,schlecht"] * 9]))
    assert text.main([f"--run-dir={tmp_path / 'run'}", f"--data={path}", *extra_flags]) == 1
    assert remedy in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--text-column=Kommentar"]])
@pytest.mark.parametrize("header", ["Kommentar;Bewertung", '"Kommentar";"Bewertung"'])
@pytest.mark.parametrize("first", ["Sehr gut;gut", '"Sehr gut; wirklich";gut'])
def test_other_delimiter_is_suggested(
    header: str, first: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d.csv"
    path.write_text("\n".join([header, first, "Schlecht;übel", "Toll;gut", "Mies;übel"]))
    assert text.main([f"--run-dir={tmp_path / 'run'}", f"--data={path}", *flags]) == 1
    assert "remedy: --delimiter ';': that is" in capsys.readouterr().err


def test_unknown_header_with_label_last_suggests_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(n, f"some words number {n}", n % 2) for n in range(30)]
    path = write_csv(tmp_path / "d.csv", [("id", "comment", "stars"), *rows])
    assert text.main([f"--run-dir={tmp_path / 'run'}", f"--data={path}"]) == 1
    error = capsys.readouterr().err
    assert "--label-column stars --text-column comment" in error
    assert "no other row has the label 'stars'" in error


def test_unknown_label_error_lists_few_labels(tmp_path: Path) -> None:
    rows = [(f"{n} {'long ' * 99}", "text") for n in range(90)]
    with pytest.raises(DataError, match="is not among the training labels") as caught:
        read(write_csv(tmp_path / "d.csv", rows))
    assert len(caught.value.found) < 1000
    assert "each row: label, text" in caught.value.remedy


def test_predict_uses_training_table_format(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run / "model", run / "model")
    run_config = config(run)
    run_config["data"] |= {"delimiter": ";", "source": "train.csv", "columns": ["label", "words"]}
    (run / "model/config.json").write_text(json.dumps(run_config))
    (tmp_path / "in.csv").write_text("id;words\n1;the food was awful, the music great\n")
    assert predict.main([f"--run={run}", "--json", str(tmp_path / "in.csv")]) == 0
    assert json.loads(capsys.readouterr().out)["input"] == "the food was awful, the music great"
    assert predict.main([f"--run={run}", "missing.csv"]) == 1
    assert "there is no file missing.csv" in capsys.readouterr().err


def test_refused_start_leaves_run_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = tmp_path / "run", write_csv(tmp_path / "d.csv", ROWS)
    flags = [f"--run-dir={run}", "--device=cpu", "--steps=1"]
    assert text.main([*flags, f"--data={path}"]) == 0
    names = ("config.json", "model/config.json", "model/tokenizer.json")
    before = [(run / name).read_bytes() for name in names]
    assert text.main([*flags, "--seed=5"]) == 2
    assert "seed: 0 then, 5 now" in capsys.readouterr().err
    assert [(run / name).read_bytes() for name in names] == before
    assert text.main([*flags, f"--data={path}", "--epochs=2", "--steps=2"]) == 0
    assert json.loads((run / "config.json").read_text())["options"]["steps"] == 2


def test_rejects_data_with_unknown_labels(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_csv(tmp_path / "d.csv", ROWS)
    assert evaluate.main([f"--run={trained_run}", f"--data={path}"]) == 1
    assert "is not among the training labels" in capsys.readouterr().err


def test_fine_tuning_keeps_frozen_backbone(trained_run: Path, tmp_path: Path) -> None:
    flags = ["--steps=10", f"--weights={trained_run}", "--freeze", "--seed=3", "--vocab-size=25"]
    assert train(tmp_path / "run", *flags) == 0
    old, new = (
        load_file(run / "model/model.safetensors") for run in (trained_run, tmp_path / "run")
    )
    same = {name for name in old if torch.equal(old[name], new[name])}
    assert {name for name in old if name.startswith("backbone.")} == same
    assert config(tmp_path / "run")["metrics"]["test"]["accuracy"] >= 0.9


def test_pretrained_model_from_folder(tmp_path: Path) -> None:
    folder = bert(tmp_path / "bert")
    flags = [f"--model={folder}", "--freeze", "--unfreeze-every=1", "--lr=1e-3", "--steps=120"]
    assert train(tmp_path / "run", *flags) == 0
    import transformers

    before = transformers.BertForSequenceClassification.from_pretrained(folder).state_dict()
    after = load_file(tmp_path / "run/model/model.safetensors")
    moved = {n for n in before if not torch.equal(before[n], after[f"model.{n}"])}
    # An epoch has 113 steps; after it, the pooler, the last stage with parameters, is trained too.
    assert {name.split(".")[0] for name in moved} == {"bert", "classifier"}
    assert {name.split(".")[1] for name in moved if name.startswith("bert")} == {"pooler"}
    assert evaluate.main([f"--run={tmp_path / 'run'}"]) == 0


def test_missing_weights_are_not_frozen(tmp_path: Path) -> None:
    """The weights of a language model have no pooler and no head."""
    folder = bert(tmp_path / "bert")
    path = folder / "model.safetensors"
    state = {n: t for n, t in load_file(path).items() if "pooler" not in n and "class" not in n}
    save_file(state, path, {"format": "pt"})
    model, origin = pretrained.load_model(pretrained.HubModel("text", str(folder)), ("a", "b"))
    assert origin.missing == ("bert.pooler.dense.bias", "bert.pooler.dense.weight")
    assert (origin.head_is_reset, model.training) == (True, True)
    with pytest.raises(SettingError, match=r"has no bert\.pooler\.dense\.bias"):
        origin.is_frozen(True)
    labels = bert(tmp_path / "other")
    same = pretrained.load_model(pretrained.HubModel("text", str(labels)), ("LABEL_0", "LABEL_1"))
    assert not same[1].head_is_reset


def test_does_not_run_code_of_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds even if standard input answers yes to the question of transformers."""
    marker, folder = tmp_path / "it ran", tmp_path / "model"
    monkeypatch.setattr("builtins.input", lambda _: "yes")
    folder.mkdir()
    classes = {
        name: f"cfg.{name}"
        for name in ("AutoConfig", "AutoTokenizer", "AutoModelForSequenceClassification")
    }
    (folder / "cfg.py").write_text(
        f"open({str(marker)!r}, 'w')\n" + "".join(f"class {name}: pass\n" for name in classes)
    )
    classes["AutoTokenizer"] = ["cfg.AutoTokenizer", None]  # type: ignore[assignment]
    description = json.dumps({"model_type": "evil", "auto_map": classes})
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text(description)
    hub_model = pretrained.HubModel("text", str(folder))
    for load in (
        lambda: saved_encoding(tmp_path, hub=True),
        lambda: pretrained.load_tokenizer(hub_model),
        lambda: pretrained.load_model(hub_model, ("a", "b")),
        lambda: pretrained.load_model(replace(hub_model, from_scratch=True), ("a", "b")),
    ):
        with pytest.raises(DataError, match="code that comes with it, which Paceline does not run"):
            load()
    bert_description = {"model_type": "bert", "auto_map": classes, "hidden_size": 12}
    assert pretrained.build_from_description("text", bert_description)
    assert not marker.exists()


def test_stages_of_a_list_of_layers() -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
    backbone = torch.nn.ModuleDict({"first": torch.nn.Linear(2, 2), "rest": layers})
    assert stages_of([backbone]) == [backbone["first"], *layers]


def test_model_and_checkpoint_are_found_where_the_launcher_put_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bert(tmp_path / "bert")
    monkeypatch.setenv(jobenv.INPUTS, json.dumps({"/home/me": str(tmp_path)}))
    flags = ["--model=/home/me/bert", "--no-fast", "--max-length=8", "--seed=3"]
    assert train(tmp_path / "first", *flags, "--steps=1", "--checkpoint-every=1") == 0
    assert config(tmp_path / "first")["network"]["config"]["model_type"] == "bert"
    assert train(tmp_path / "second", *flags, "--steps=2", "--resume=/home/me/first") == 0
    assert "resumed after step 1 from" in capsys.readouterr().out


def test_unknown_model_folder_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", f"--model={tmp_path}/none") == 1
    said = capsys.readouterr().err
    assert f"--model {tmp_path}/none could not be loaded" in said
    assert f"there is no folder {tmp_path}/none" in said


@pytest.mark.parametrize(
    ("table", "column", "expected"),
    [
        ("id,review,sentiment\n1,good,pos\n", "", ["good"]),  # as in the training data
        ("Review,id\ngood,1\n", "", ["good"]),
        ("a,b\n1,2\n", "a", ["1"]),
        ("pos,good\nneg,bad\n", "", ["good", "bad"]),
        ("good\nbad\n", "", ["good", "bad"]),
        ("title,text\nnews,good\n", "words", ["good"]),
        ("text,title\nnews,good\n", "title", ["good"]),
        ("pos,good,day\n", "", ["good day"]),
        ('"yes, good"\n"no, bad"\n', "words", ["yes, good", "no, bad"]),
        ('id;Text\n1;good, "and" cheap\n2;\n', "", ['good, "and" cheap', ""]),
        ("id;words\n1;good, cheap\n", "words", ["good, cheap"]),
        ("Review; it is good\nbad thing\n", "", ["Review; it is good", "bad thing"]),
        ("Content | a\nb | c\nd\n", "", ["Content | a", "b | c", "d"]),
        ("Title\tit is good\nbad\n", "", ["Title\tit is good", "bad"]),
        ("Review; it is good\n", "", ["Review; it is good"]),
        ("Good; cheap\nBad; dear\n", "", ["Good; cheap", "Bad; dear"]),
        ("Good | :D\nBad | :(\n", "", ["Good | :D", "Bad | :("]),
        ("comment,Nice work\nquestion,What is it?\n", "", ["Nice work", "What is it?"]),
        ("comment,label\nNice work,x\n", "", ["Nice work"]),
        ("comment,id\nNice work,1\n", "comment", ["Nice work"]),
    ],
)
def test_predict_selects_text_column(
    tmp_path: Path, table: str, column: str, expected: list[str]
) -> None:
    (tmp_path / "t.csv").write_text(table, encoding="utf-8-sig")
    assert predicted_texts(tmp_path / "t.csv", column) == expected


def predicted_texts(path: Path, column: str) -> list[str]:
    """Reads texts for a model with a class named like a column."""
    trained_on = {"source": "", "delimiter": "", "columns": ["", column]}
    return [*use_text._texts([str(path)], trained_on, ["comment", "question"])]


def test_predict_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line is a text, and the dash is none."""
    content = io.BytesIO("\ufeffgood\r\n\r\n- übel\r\n".encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(content, encoding="ascii"))
    assert predicted_texts(Path("-"), "") == ["good", "- übel"]
    monkeypatch.setattr(
        "sys.stdin",
        io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="ascii", errors="surrogateescape"),
    )
    with pytest.raises(DataError, match="convert it: iconv"):
        predicted_texts(Path("-"), "")


def test_predict_reads_punctuation_in_tsv_file(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("Great,food\nNice,place\n")
    assert predicted_texts(tmp_path / "t.tsv", "") == ["Great,food", "Nice,place"]


def test_predict_reads_file_that_the_csv_module_rejects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(*_: object, **__: object) -> None:
        raise csv.Error("line contains NUL")  # from Python 3.10

    monkeypatch.setattr(tables, "parse_rows", lambda *_: [["good"], ["bad"]])
    monkeypatch.setattr(csv, "reader", reject)
    (tmp_path / "t.csv").write_text("good\nbad\n")
    assert predicted_texts(tmp_path / "t.csv", "") == ["good", "bad"]


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        ("t.csv", b"id,text\n1,good\n2\n", "", "row 3 has fewer columns than the header"),
        ("t.csv", b"pos,good\nneg\n", "", "row 2 has one column only"),
        ("t.csv", b"text\nyes, good\n", "", "row 2 has more columns than the header"),
        ("t.csv", b"Review, this is good\nbad\n", "", "row 2 has fewer columns than the header"),
        ("t.csv", b"nr;words\n1;good\n", "", "write text over the column of texts"),
        ("t.csv", b"nr,stars\n1,good\n", "words", "write words over the column of texts"),
        ("t.csv", b"text\ncaf\xe9\n", "", "convert it: iconv"),
        ("t.txt", b"caf\xe9\n", "", "convert it: iconv"),
        ("t.jsonl", b'{"words": "good"}\n', "", "rename it to text"),
        ("t.csv", b"title,text\nnews,good\n", "", "older version .* read the leftmost one"),
        ("t.csv", b"label;text\npos;good\nneg\n", "", "row 3 lacks text"),
    ],
)
def test_predict_refuses_files_without_a_text_in_each_row(
    tmp_path: Path, name: str, content: bytes, column: str, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        predicted_texts(tmp_path / name, column)


def test_wrong_encoding_error_names_line(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_bytes(b"label,text\n1,good\n0,caf\xe9\n")
    with pytest.raises(DataError) as caught:
        read_lines(path)
    assert caught.value.found.startswith("line 3: ")
    assert caught.value.remedy.startswith("convert it: iconv")
