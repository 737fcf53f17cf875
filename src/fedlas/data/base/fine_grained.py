"""The shared part of data sets of large natural images that have no official validation split."""

from typing import ClassVar, Unpack, cast, get_args

from fedlas.catalog import one_of
from fedlas.data.base.dataset import AbstractDataset, Common, Selection, large_transform


class AbstractFineGrained(AbstractDataset):
    """Large natural images; by default a tenth of each training class is held out for validation.

    Args:
        selection: "held_out", or "official": validate on the test split, as the official code does, which biases the
            test results.
        image_size: side of the square that the network sees; 384 for the ViT of the paper, 224 for its ResNet.
        resize: side of the square that images are resized to before they are cropped; by default as in the paper.
        normalisation: "imagenet", or "half" for networks that expect values from -1 to 1.
        antialias: whether to apply antialiasing when an image is downsized.
        common: root, seed, download and progress, as for every data set.
    """

    official_options: ClassVar = {"selection": "official", "antialias": False}
    resident = False
    stratified = True

    def __init__(
        self,
        *,
        selection: str = "held_out",
        image_size: int = 384,
        resize: int | None = None,
        normalisation: str = "imagenet",
        antialias: bool = True,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(**common)
        self.selection = cast("Selection", one_of("selection", selection, get_args(Selection)))
        self.transform = large_transform(image_size, resize, normalisation, antialias)
