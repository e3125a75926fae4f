"""Tests that folders of Hugging Face data sets name only files of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recipe_tools import hub_variables  # noqa: F401 - fixture

from paceline.recipes.data.hub import check_named_files, load_rows
from paceline.spec.errors import DataError

OUTSIDE = {
    "text": "data_files: /private/x.parquet",
    "list": "data_files: [train.parquet, ../x.parquet]",
    "splits": "data_files: [{split: train, path: 'data/../../x.parquet'}]",
    "paths": "data_files: [{split: train, path: [train.parquet, /private/*]}]",
    "dictionary": "data_files: {train: /private/x.parquet}",
    "folder": "data_dir: ../private",
    "http": "data_files: http://127.0.0.1:9/x.parquet",
    "ftp": "data_files: [{split: train, path: ftp://127.0.0.1:9/x.parquet}]",
    "file": "data_files: file:/private/x.parquet",
    "archive": "data_files: 'x.parquet::ftp://127.0.0.1:9/x.zip'",
}


@pytest.mark.parametrize("config", OUTSIDE.values(), ids=OUTSIDE)
@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml"])
@pytest.mark.usefixtures("hub_variables")
def test_card_that_names_data_elsewhere_is_refused(name: str, config: str, tmp_path: Path) -> None:
    write_description(tmp_path / name, f"{{config_name: b, {config}}}")
    with pytest.raises(DataError, match=r"names data outside of its folder"):
        load_rows(str(tmp_path))


@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml"])
@pytest.mark.usefixtures("hub_variables")
def test_card_that_names_files_of_its_folder_is_accepted(name: str, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"")
    (tmp_path / "d").mkdir()
    (tmp_path / "d/train.parquet").symlink_to(tmp_path / "blob")
    files = "&a [{split: train, path: ['train/**.parquet', train-0..9.csv]}, *a]"
    write_description(
        tmp_path / "d" / name, f"{{config_name: b, data_dir: ./train, data_files: {files}}}"
    )
    check_named_files(tmp_path / "d")


def test_large_card_is_refused(tmp_path: Path) -> None:
    write_description(tmp_path / "README.md", "[" + "?," * (1 << 20) + "]")
    with pytest.raises(DataError, match="cannot be read") as caught:
        check_named_files(tmp_path)
    assert "more than 2 MiB" in caught.value.found


@pytest.mark.usefixtures("hub_variables")
def test_card_without_description_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Meals\n")
    check_named_files(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("dataset_dict.json", {"splits": ["../private"]}),
        ("state.json", {"_data_files": [{"filename": "/private/x.arrow"}]}),
        ("train/state.json", {"_data_files": [{"filename": "../../x.arrow"}]}),
    ],
)
@pytest.mark.usefixtures("hub_variables")
def test_saved_data_set_that_names_data_elsewhere_is_refused(
    name: str, content: object, tmp_path: Path
) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "train").mkdir()
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"names data outside of its folder"):
        load_rows(str(tmp_path))


def write_description(path: Path, config: str) -> None:
    text = f"configs:\n- {{config_name: a, data_files: train.parquet}}\n- {config}\n"
    path.write_text(text if path.suffix == ".yaml" else f"---\r\n{text}---\n# Data\n")
