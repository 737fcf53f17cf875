"""The samples that a page shows, and their pictures.

The paths in an untrusted file may point to any file of this machine. Image files are opened only inside of the allowed
folders, and pictures are re-encoded (`thumbnails.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlas.errors import UserError
from fedlas.report.model import Model
from fedlas.report.page_data import Plain, text_data
from fedlas.report.thumbnails import picture_of

PICTURE_BYTES = 1_500_000  # total size of all pictures on a page


@dataclass(frozen=True)
class Samples:
    """Names, image files and images of the samples of a model.

    Args:
        key: prefix of the picture keys, which makes them unique on the page.
        ids: one name per sample.
        paths: one image file per sample.
        images: one image per sample.
        folders: folders that may contain the image files; None if paths are trusted and used unchanged.
    """

    key: str
    ids: Sequence[object] | None
    paths: Sequence[str | Path] | None
    images: Any
    folders: Sequence[Path] | None = None

    def identification(self, row: int) -> Plain:
        """Return the name, path and picture key of a sample."""
        names = {"id": self.ids, "path": self.paths}
        identification = {field: text_data(values[row]) for field, values in names.items() if values is not None}
        return identification | {"picture": f"{self.key}{row}"}

    @property
    def pictured(self) -> bool:
        """Whether the samples have images."""
        return self.images is not None or self.paths is not None

    def outside(self, row: int) -> bool:
        """Return whether the image file of a sample lies outside of the allowed folders."""
        return self.images is None and self.paths is not None and self._file(self.paths[row]) is None

    def picture(self, row: int) -> str | None:
        """Return the thumbnail of a sample as a data URL; None if there is no image or its file cannot be read."""
        if self.images is not None:
            return picture_of(self.images[row])
        file = None if self.paths is None else self._file(self.paths[row])
        if file is None:
            return None
        try:
            return picture_of(file)
        except Exception:  # the page reports pictures of missing or damaged files as left out
            return None

    def _file(self, path: str | Path) -> Path | None:
        """Resolve the path of an image file; None if it, with links resolved, is outside of the allowed folders."""
        if self.folders is None:
            return Path(path)
        try:
            roots = [folder.resolve() for folder in self.folders]
            candidates = [(root / path).resolve() for root in roots]
            inside = [candidate for candidate in candidates if any(candidate.is_relative_to(root) for root in roots)]
            return next((candidate for candidate in inside if candidate.is_file()), inside[0] if inside else None)
        except (OSError, ValueError, RuntimeError):  # an invalid file name, or a loop of symbolic links
            return None


def samples_by_model(
    models_by_name: Mapping[str, Model], ids: Sequence[object] | None, paths: Sequence[str | Path] | None, images: Any
) -> dict[str, Samples]:
    """Return the ids, paths and images of the samples; arguments take precedence over those of each model."""
    for argument, values in {"ids": ids, "paths": paths, "images": images}.items():
        for name, model in models_by_name.items():
            if values is not None and model.predictions is not None and len(values) != len(model.predictions):
                raise UserError(f"{argument} has {len(values)} entries, {name} has {len(model.predictions)} samples")
    samples: dict[str, Samples] = {}
    sources: list[object] = []
    for name, model in models_by_name.items():
        predictions = model.predictions
        sample_ids = ids if ids is not None else None if predictions is None else predictions.ids
        if images is not None or paths is not None or predictions is None or predictions.paths is None:
            samples[name] = Samples("", sample_ids, paths, images)
            continue
        source = (predictions.paths, model.image_folders)
        if source not in sources:
            sources.append(source)
        # Models with the same image files share their pictures.
        samples[name] = Samples(f"{sources.index(source)}-", sample_ids, predictions.paths, None, model.image_folders)
    return samples


class Pictures:
    """The pictures of a page, up to a total size.

    Attributes:
        by_key: data URLs by the key of the sample.
        left_out: number of samples whose picture is missing, damaged or beyond the total size.
        outside: number of samples whose image file lies outside of the allowed folders.
    """

    def __init__(self) -> None:
        self.by_key: dict[str, str] = {}
        self.left_out = self.outside = 0

    def add(self, samples: Samples, sample: Plain) -> None:
        """Add the picture of a sample, if it has one."""
        if not samples.pictured or sample["picture"] in self.by_key:
            return
        picture = samples.picture(sample["row"])
        if picture is not None and sum(map(len, self.by_key.values())) + len(picture) <= PICTURE_BYTES:
            self.by_key[sample["picture"]] = picture
        elif samples.outside(sample["row"]):
            self.outside += 1
        else:
            self.left_out += 1
