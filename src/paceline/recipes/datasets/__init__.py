"""Image data sets by name. This registry needs neither numpy nor torch; the readers do.

A new named set is one entry here; a new format is one reader module with
``matches(folder) -> bool`` and ``read(folder, request) -> ImageData``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ASSETS = Path(__file__).parent.parent / "assets"
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
        reader: Module under ``paceline.recipes.datasets`` that understands its files.
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
            (str(ASSETS / "digits"),),
            "1,797 handwritten digits, 8×8 grey (bundled)",
            "install paceline again: the files come with it",
            _DIGITS,
        ),
        Named(
            "fashion-mnist",
            "idx",
            ("fashion-mnist", "FashionMNIST/raw", "fashion_mnist"),
            "70,000 pieces of clothing, 28×28 grey",
            "apt install dataset-fashion-mnist, or --data-dir FOLDER with the four IDX files",
            _CLOTHES,
        ),
        Named(
            "mnist",
            "idx",
            ("mnist", "MNIST/raw", "MNIST"),
            "70,000 handwritten digits, 28×28 grey",
            "--data-dir FOLDER with the four IDX files (train-images-idx3-ubyte.gz, …)",
            _DIGITS,
        ),
        Named(
            "cifar10",
            "cifar",
            ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar10", "cifar-10"),
            "60,000 photos in ten classes, 32×32 colour",
            "--data-dir FOLDER with data_batch_1 … test_batch (Python or binary version)",
        ),
        Named("dummy", "made_images", (), "random images, for measuring speed", ""),
    )
}
READERS = ("idx", "cifar", "hub_images", "folder")
"""Formats that a path is tried as, in this order."""
PLACES = ("~/.cache/paceline/datasets", "/usr/share/datasets", "/usr/local/share/datasets", "data")
"""Folders under which the files of named sets are looked for, after ``--data-dir``."""
