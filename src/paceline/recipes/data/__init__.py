"""Named data sets, and how ``--data`` finds files, folders and data sets of Hugging Face.

Needs neither numpy nor torch. A new named data set is an entry here. A new image format is a reader
module with ``matches(folder) -> bool`` and ``read(folder, options) -> ImageData``.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from paceline.spec import jobenv

_DIGITS = tuple("0123456789")
_CLOTHES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


@dataclass(frozen=True, slots=True)
class Remote:
    """A file that can be downloaded.

    Attributes:
        digest: Published ``sha256:HEX`` or ``md5:HEX``.
        sources: URLs of folders that hold it, in order of preference.
        size: Size in bytes; 0 if unknown.
    """

    name: str
    digest: str
    sources: tuple[str, ...]
    size: int = 0


def _remotes(sources: tuple[str, ...], *files: tuple[str, int, str]) -> tuple[Remote, ...]:
    """Lists files of the same sources, given as (name, size, digest)."""
    return tuple(Remote(name, digest, sources, size) for name, size, digest in files)


@dataclass(frozen=True, slots=True)
class NamedDataset:
    """A data set with a name.

    Attributes:
        reader: Module under ``paceline.recipes.data`` that reads its files.
        folders: Names of its folder under each search folder; none for a generated set. Downloaded
            files go to the first.
        get: How to get the files by hand.
        classes: Class names, if the files do not hold them.
        remote: Files to download; archives (``.tar.gz``) are unpacked without their folders.
    """

    name: str
    reader: str
    folders: tuple[str, ...]
    summary: str
    get: str
    classes: tuple[str, ...] = ()
    remote: tuple[Remote, ...] = ()


_MNIST = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_FASHION = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
)
_CIFAR = ("https://www.cs.toronto.edu/~kriz/",)
_AG_NEWS = ("https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/",)
_MULTI30K = ("https://raw.githubusercontent.com/neychev/small_DL_repo/master/datasets/Multi30k/",)

IMAGE_SETS: dict[str, NamedDataset] = {
    dataset.name: dataset
    for dataset in (
        NamedDataset("digits", "idx", (str(Path(__file__).parent / "digits"),),
            "1,797 handwritten digits, 8×8 greyscale (bundled)",
            "install paceline again: the files come with it",
            _DIGITS,
        ),
        NamedDataset("fashion-mnist", "idx", ("fashion-mnist", "FashionMNIST/raw", "fashion_mnist"),
            "70,000 photos of clothing, 28×28 greyscale",
            "apt install dataset-fashion-mnist, or --data-dir FOLDER with the four IDX files",
            _CLOTHES,
            _remotes(_FASHION, ("train-images-idx3-ubyte.gz", 26_421_880,
                 "sha256:3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
                ("train-labels-idx1-ubyte.gz", 29_515,
                 "sha256:a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
                ("t10k-images-idx3-ubyte.gz", 4_422_102,
                 "sha256:346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
                ("t10k-labels-idx1-ubyte.gz", 5_148,
                 "sha256:67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
            ),
        ),
        NamedDataset("mnist", "idx", ("mnist", "MNIST/raw", "MNIST"),
            "70,000 handwritten digits, 28×28 greyscale",
            "--data-dir FOLDER with the four IDX files (train-images-idx3-ubyte.gz, …)",
            _DIGITS,
            _remotes(_MNIST, ("train-images-idx3-ubyte.gz", 9_912_422,
                 "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
                ("train-labels-idx1-ubyte.gz", 28_881,
                 "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
                ("t10k-images-idx3-ubyte.gz", 1_648_877,
                 "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
                ("t10k-labels-idx1-ubyte.gz", 4_542,
                 "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
            ),
        ),
        NamedDataset("cifar10", "cifar",
            ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar10", "cifar-10"),
            "60,000 photos in ten classes, 32×32 in colour",
            "--data-dir FOLDER with data_batch_1 … test_batch (Python or binary version)",
            remote=_remotes(_CIFAR, ("cifar-10-python.tar.gz", 170_498_071,
                 "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"),
            ),
        ),
        NamedDataset("cifar100", "cifar", ("cifar-100-python", "cifar100", "cifar-100"),
            "60,000 photos in a hundred classes, 32×32 in colour",
            "--data-dir FOLDER with train, test and meta (Python version)",
            remote=_remotes(_CIFAR, ("cifar-100-python.tar.gz", 169_001_437,
                 "sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"),
            ),
        ),
        NamedDataset("dummy", "", (), "random images, for measuring speed", ""),
    )
}  # fmt: skip
TEXT_SETS: dict[str, NamedDataset] = {
    "ag-news": NamedDataset("ag-news", "texts", ("ag_news_csv", "ag-news", "AG_NEWS"),
        "127,600 news in four classes, in English",
        "--data FOLDER with train.csv and test.csv",
        ("World", "Sports", "Business", "Sci/Tech"),
        _remotes(_AG_NEWS, ("train.csv", 0, "md5:b1a00f826fdfbd249f79597b59e1dc12"),
            ("test.csv", 0, "md5:d52ea96a97a2d943681189a97654912d"),
        ),
    ),
}  # fmt: skip
"""Named sets of labelled texts."""
PAIR_SETS: dict[str, NamedDataset] = {
    "multi30k": NamedDataset("multi30k", "pairs", ("multi30k", "Multi30k"),
        "31,000 captions of pictures, in German and English",
        "--data FOLDER with train.de, train.en, val.de, val.en, test.de and test.en",
        remote=_remotes(_MULTI30K, ("training.tar.gz", 0,
             "sha256:20140d013d05dd9a72dfde46478663ba05737ce983f478f960c1123c6671be5e"),
            ("validation.tar.gz", 0,
             "sha256:a7aa20e9ebd5ba5adce7909498b94410996040857154dab029851af3a866da8c"),
            ("mmt16_task1_test.tar.gz", 0,
             "sha256:6d1ca1dba99e2c5dd54cae1226ff11c2551e6ce63527ebb072a1f70f72a5cd36"),
        ),
    ),
}  # fmt: skip
"""Named parallel corpora."""
READERS = ("idx", "cifar", "tars", "hub_images", "folder")
"""Readers of image folders, in the order in which they are tried."""
SEARCH_FOLDERS = ("/usr/share/datasets", "/usr/local/share/datasets", "data")
"""Folders in which named data sets are looked for, after the cache."""


TABLE_SUFFIXES = (".csv", ".tsv", ".txt", ".jsonl", ".parquet")
"""Suffixes of data files."""


def is_hub_id(name: str) -> bool:
    """Tells whether a name can only be an id of the hub: ``user/name``, and no existing path."""
    path = Path(name)
    local = path.exists() or path.parent.is_dir() or path.suffix.lower() in TABLE_SUFFIXES
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None and not local


def find_data(name: str, data_dir: str) -> Path:
    """Returns the path of a data file or folder: its copy in ``data_dir`` if there is one.

    On the launching machine the copy is a link to the file, whose own path is returned.
    """
    path = local_path(Path(name).expanduser())
    copy = Path(data_dir).expanduser() / path.name
    if not data_dir or not copy.is_file():
        return path
    return path if path.is_file() and path.samefile(copy) else copy


def local_path(path: Path) -> Path:
    """Returns where the launcher has put a path of the launching machine on this host."""
    data_dir, data_home = os.environ.get(jobenv.DATA_DIR), os.environ.get(jobenv.LAUNCHER_DATA_DIR)
    if data_dir and str(path) == data_home:
        return Path(data_dir)
    for source, target in json.loads(os.environ.get(jobenv.INPUTS, "{}")).items():
        if path.is_relative_to(source):
            return Path(target) / path.relative_to(source)
    return path


def is_path(data: str) -> bool:
    """Tells whether a name is a path or an id of the hub, not a short name."""
    return "/" in data or "." in data or data.startswith("~") or Path(data).exists()


SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Names of the parts in files, in folders and on the hub; the first that is there counts."""


def files_by_name(folder: Path) -> dict[str, Path]:
    """Returns the files of a folder by their names in lower case."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []  # capitals first: others count
    return {path.name.lower(): path for path in paths if path.is_file()}


def splits_in_name(name: str) -> list[str]:
    """Returns the parts that words of a file's name name: ``test`` for ``test-00000-of-00002``."""
    words = re.split(r"[\W\d_]+", name.lower())
    return [split for split, names in SPLIT_NAMES.items() if not {*names}.isdisjoint(words)]
