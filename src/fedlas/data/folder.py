"""Custom images: a directory per class, or a CSV file with paths and labels.

    PATH/cat/1.png, PATH/dog/2.png ...          a fixed tenth of each class is for testing, another for validation
    PATH/train/cat/1.png, PATH/test/dog/2.png   predefined splits; without `val/` a tenth of `train/` is held out
    PATH/1.png, PATH/2.png ...                  one class with the name of the folder: for predictions only
    PATH.csv with columns path, label and optionally split; paths are relative to the file

Classes are numbered in the order of their names, or of `class_names` if set. The split "all" contains every image.
"""

import csv
import warnings
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple, Unpack

import torch

from fedlas.data.base import (
    AbstractDataset,
    Common,
    NormalisationName,
    Part,
    Split,
    as_labels,
    held_out_of_each_class,
    large_transform,
    one_of,
)
from fedlas.data.base.fetching import DamagedFileError, MissingFileError
from fedlas.errors import UserError

IMAGES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
GIVEN = ("train", "val", "test")
ALSO = {"training": "train", "valid": "val", "validation": "val", "testing": "test"}  # other common names
SHOWN = 8  # classes listed in a message


class _Row(NamedTuple):
    path: Path
    label: str
    split: str


class Folder(AbstractDataset):
    """Custom images: a directory per class, or a CSV file with the columns path and label.

    Args:
        path: the directory or the CSV file; a relative path is searched in the working directory, then below the root.
        class_names: class names in the order of the class numbers (a list or a comma-separated string), needed for a
            network with more classes than the images have.
        image_size: side of the square that the network sees.
        resize: side of the square that images are resized to before they are cropped; by default a little larger.
        normalisation: "imagenet", or "half" for networks that expect values from -1 to 1.
        flip: whether to flip images horizontally with probability 0.5 in training.
        antialias: whether to apply antialiasing when an image is downsized.
        common: root, seed, download and progress, as for every data set.
    """

    name = "folder"
    citation = "Your own data."
    splits = (*GIVEN, "all")
    resident = False
    stratified: ClassVar[bool] = True

    def __init__(
        self,
        *,
        path: str | Path,
        class_names: str | Sequence[str] | None = None,
        image_size: int = 224,
        resize: int | None = None,
        normalisation: NormalisationName = "imagenet",
        flip: bool = True,
        antialias: bool = True,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(**common)
        self._here = Path(path).expanduser().absolute()
        self.path = self._here if self._here.exists() else self.root / Path(path).expanduser()
        self.transform = large_transform(image_size, resize, normalisation, antialias, flip)
        self._names = None if class_names is None else _names(class_names)

    @property
    def title(self) -> str:  # type: ignore[override]
        """The name in tables."""
        return self.path.stem

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        """The number of class names."""
        return len(self.class_names)

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """The option `class_names`, or else the sorted names in the directory or file."""
        if self._names is not None and not self.path.exists():  # for a trained network whose training images are gone
            return self._names
        labels = {row.label for row in self._rows}
        if self._names is None:
            return tuple(sorted(labels, key=int) if all(name.isdecimal() for name in labels) else sorted(labels))
        unknown = sorted(labels - set(self._names))
        if unknown:
            raise UserError(f"{self.path} has classes that class_names lacks: {', '.join(unknown)}")
        return self._names

    @cached_property
    def _rows(self) -> list[_Row]:
        if not self.path.exists():
            both = " nor ".join(map(str, dict.fromkeys((self._here, self.path))))
            gone = f"{both} is not there" if self._here == self.path else f"neither {both} is there"
            raise MissingFileError(f"{gone}: give a directory with one directory per class, or a CSV file")
        rows = _rows_of_table(self.path) if self.path.is_file() else _rows_of_directory(self.path)
        if not rows and self.path.is_file():
            raise DamagedFileError(f"{self.path} has no rows below its header")
        if not rows:
            raise MissingFileError(f"{self.path} has no images in it: put them into a directory for each class")
        missing = [row.path for row in rows if not row.path.exists()]
        if missing:
            raise MissingFileError(f"{len(missing)} images of {self.path} are not there, such as {missing[0]}")
        others = [row.path for row in rows if not row.path.is_file()]
        if others:
            raise DamagedFileError(
                f"{len(others)} images of {self.path} are folders, devices or pipes, such as {others[0]}"
            )
        return rows

    def read(self, part: str) -> Part:
        """Read the rows of one split, or all rows."""
        chosen = [n for n, row in enumerate(self._rows) if part in {row.split, "all"}]
        numbers = {name: number for number, name in enumerate(self.class_names)}
        labels = as_labels([numbers[self._rows[n].label] for n in chosen])
        return Part(tuple(self._rows[n].path for n in chosen), labels, torch.tensor(chosen, dtype=torch.int64))

    def split(self, name: str) -> Split:
        one_of("split", name, self.splits)
        splits = {row.split for row in self._rows}
        pooled = splits == {""}
        part_name = "all" if pooled or name == "all" else "train" if name == "val" and "val" not in splits else name
        if not pooled and part_name != "all" and part_name not in splits:
            raise MissingFileError(f"{self.path} has no {part_name} split; it has {', '.join(sorted(splits))}")
        part = self.part(part_name)
        assert part.index is not None
        if part_name == "train":
            _warn_of_empty_classes(self.path, self.class_names, part.labels)
        full_part = Split(name, part.images, part.labels, part.index, self.class_names, self.name)
        if name == "all" or part_name in {"val", "test"} or (part_name == "train" and "val" in splits):
            return full_part
        rest = full_part
        if pooled:
            # The test split does not depend on the seed.
            positions, test = held_out_of_each_class(full_part.labels, 0, self.val_fraction)
            if name == "test":
                return self._not_empty(full_part.picked(test), full_part)
            rest = full_part.picked(positions)
        train, val = self.halves(rest.labels)
        return self._not_empty(rest.picked(train if name == "train" else val), full_part)

    def _not_empty(self, chosen: Split, full_part: Split) -> Split:
        """Return the split; raise if no class has enough images for it."""
        if len(chosen):
            return chosen
        counts = zip(
            self.class_names, torch.bincount(full_part.labels, minlength=self.num_classes).tolist(), strict=True
        )
        shown = ", ".join(f"{name} {count}" for name, count in list(counts)[:SHOWN])
        more_classes = f" and {self.num_classes - SHOWN} more classes" if self.num_classes > SHOWN else ""
        raise UserError(
            f"{self.path} has too few images for its {chosen.name} split, which is a tenth of each class: "
            f"{shown}{more_classes}; add images, or divide them yourself into train/, val/ and test/"
        )


def _warn_of_empty_classes(path: Path, names: tuple[str, ...], labels: torch.Tensor) -> None:
    """Warn of classes without training images."""
    counts = torch.bincount(labels, minlength=len(names)).tolist()
    missing = [name for name, count in zip(names, counts, strict=True) if not count]
    if missing:
        warnings.warn(f"{path} has no training images of: {', '.join(missing)}", stacklevel=3)


def _rows_of_directory(folder: Path) -> list[_Row]:
    directories = _directories(folder)
    divided = [directory for directory in directories if _directories(directory)]
    for directory in divided:
        split = ALSO.get(directory.name.lower(), directory.name.lower())
        if split in GIVEN and directory.name != split:
            raise UserError(f"{directory} contains directories like a split; rename it to {split} to use it as one")
    if any(directory.name in GIVEN for directory in divided):
        others = [directory.name for directory in directories if directory.name not in GIVEN]
        if others:
            warnings.warn(f"{folder} is divided into splits; ignored: {', '.join(others)}", stacklevel=2)
        return [row._replace(split=name) for name in GIVEN for row in _rows_below(folder / name)]
    flat = [path for path in _seen(folder.glob("*"), folder) if path.suffix.lower() in IMAGES and path.is_file()]
    return _rows_below(folder) or [_Row(path, folder.name, "") for path in flat]


def _directories(folder: Path) -> list[Path]:
    return [inside for inside in _seen(folder.glob("*"), folder) if inside.is_dir()]


def _seen(paths: Iterable[Path], folder: Path) -> list[Path]:
    """Sort paths and skip hidden ones, such as backups of editors and metadata of operating systems."""
    return sorted(path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def _rows_below(folder: Path) -> list[_Row]:
    classes = _directories(folder)
    files = [(path, inside.name) for inside in classes for path in _seen(inside.rglob("*"), inside)]
    rows = [_Row(path, label, "") for path, label in files if path.suffix.lower() in IMAGES and _may_be_image(path)]
    empty = sorted({inside.name for inside in classes} - {row.label for row in rows})
    if rows and empty:
        warnings.warn(
            f"{folder} has directories without images, which are not classes: {', '.join(empty)}", stacklevel=2
        )
    return rows


def _may_be_image(path: Path) -> bool:
    """Return whether a path is a file or a broken link, which is reported as a missing image later."""
    return path.is_file() or not path.exists()


def _rows_of_table(file: Path) -> list[_Row]:
    try:
        return _rows_of_text(file)
    except UnicodeDecodeError as error:
        raise DamagedFileError(f"{file} is not text in UTF-8; save it in that encoding") from error
    except csv.Error as error:
        raise DamagedFileError(f"{file} is not a CSV file: {error}") from error


def _rows_of_text(file: Path) -> list[_Row]:
    with file.open(newline="", encoding="utf-8-sig") as text:
        table = csv.DictReader(text, skipinitialspace=True)
        columns = table.fieldnames or []
        if not {"path", "label"} <= set(columns):
            raise DamagedFileError(f"{file} needs the columns path and label; it has {', '.join(columns) or 'none'}")
        rows = []
        for number, row in enumerate(table, 2):
            path, label, split = row["path"], row["label"], (row.get("split") or "").strip()
            if path is None or label is None or None in row:
                raise DamagedFileError(f"{file}: line {number} does not have a cell for each column")
            if not path.strip() or not label.strip():
                raise DamagedFileError(f"{file}: line {number} has an empty {'label' if path.strip() else 'path'}")
            rows.append(_Row(file.parent / path.strip(), label.strip(), split))
    unknown = sorted({row.split for row in rows} - {*GIVEN, ""})
    if unknown or len({bool(row.split) for row in rows}) > 1:
        raise DamagedFileError(
            f"{file}: split is train, val or test in every row, or in none; found {unknown or 'gaps'}"
        )
    return rows


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    """Parse class names; raise if one is empty or occurs twice."""
    parts = names.strip("[]() ").split(",") if isinstance(names, str) else names
    names = tuple(str(part).strip() for part in parts)
    if not all(names):
        raise UserError(f"class_names has an empty name: {names!r}")
    if len(set(names)) < len(names):
        raise UserError(f"class_names has a name twice: {', '.join(names)}")
    return names
