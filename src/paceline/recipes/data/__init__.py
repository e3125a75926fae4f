"""Where data come from: image sets by name, files, folders, ids of a hub.

Nothing in this module needs numpy or torch; the readers do. A new named set is one entry here; a
new format is one reader module with ``matches(folder) -> bool`` and
``read(folder, request) -> ImageData``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_DIGITS = tuple("0123456789")
_CLOTHES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


@dataclass(frozen=True, slots=True)
class Named:
    """A data set that has a name.

    Attributes:
        name: As in ``--data NAME``.
        reader: Module under ``paceline.recipes.data`` that understands its files.
        folders: Where the files are looked for, under each of the usual places; none for a set
            that is generated.
        summary: One line for people.
        get: How to get the files.
        classes: Class names, where the files do not hold them.
    """

    name: str
    reader: str
    folders: tuple[str, ...]
    summary: str
    get: str
    classes: tuple[str, ...] = ()


NAMED: dict[str, Named] = {
    named.name: named
    for named in (
        Named(
            "digits",
            "idx",
            (str(Path(__file__).parent / "digits"),),
            "1,797 handwritten digits, 8×8 greyscale (bundled)",
            "install paceline again: the files come with it",
            _DIGITS,
        ),
        Named(
            "fashion-mnist",
            "idx",
            ("fashion-mnist", "FashionMNIST/raw", "fashion_mnist"),
            "70,000 photos of clothing, 28×28 greyscale",
            "apt install dataset-fashion-mnist, or --data-dir FOLDER with the four IDX files",
            _CLOTHES,
        ),
        Named(
            "mnist",
            "idx",
            ("mnist", "MNIST/raw", "MNIST"),
            "70,000 handwritten digits, 28×28 greyscale",
            "--data-dir FOLDER with the four IDX files (train-images-idx3-ubyte.gz, …)",
            _DIGITS,
        ),
        Named(
            "cifar10",
            "cifar",
            ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar10", "cifar-10"),
            "60,000 photos in ten classes, 32×32 in colour",
            "--data-dir FOLDER with data_batch_1 … test_batch (Python or binary version)",
        ),
        Named("dummy", "", (), "random images, for measuring speed", ""),
    )
}
READERS = ("idx", "cifar", "hub_images", "folder")
"""Formats that a path is tried as, in this order."""
PLACES = ("~/.cache/paceline/datasets", "/usr/share/datasets", "/usr/local/share/datasets", "data")
"""Folders under which the files of named sets are looked for, after ``--data-dir``."""


@dataclass(frozen=True, slots=True)
class HubSource:
    """A Hugging Face data set.

    Attributes:
        name: Id (``user/name``) or folder.
        config: Its configuration; empty for the only one.
        offline: Whether the network must not be touched.
    """

    name: str
    config: str = ""
    offline: bool = False


FILES = (".csv", ".tsv", ".txt", ".jsonl")
"""Endings of data files."""


def is_hub_id(name: str) -> bool:
    """True for what can only be an id of a hub: ``user/name``, and no path that is there."""
    path = Path(name)
    local = path.exists() or path.parent.is_dir() or path.suffix.lower() in FILES
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None and not local


def located(name: str, data_dir: str) -> Path:
    """A data file or folder: the file of that name in ``data_dir`` if it is there, else itself.

    On the launching machine the one there is a link to the named file, which is the one to tell of.
    """
    path = Path(name).expanduser()
    sent = Path(data_dir).expanduser() / path.name
    if not data_dir or not sent.is_file():
        return path
    return path if path.is_file() and path.samefile(sent) else sent


def is_path(data: str) -> bool:
    """True for what is no short name: a path, or an id of a hub."""
    return "/" in data or "." in data or data.startswith("~") or Path(data).exists()


SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
"""Names of the parts in files, folders and on hubs."""
