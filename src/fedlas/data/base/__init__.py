"""Building blocks of data sets: base classes, file formats, downloads, transforms and counter-based random numbers."""

from fedlas.catalog import one_of
from fedlas.data.base.dataset import (
    AbstractDataset,
    Common,
    Images,
    NormalisationName,
    Part,
    Sample,
    Selection,
    Split,
    as_images,
    as_labels,
    data_root,
    held_out,
    held_out_of_each_class,
    large_transform,
    part_of_batch,
    require_files,
)

__all__ = [
    "AbstractDataset",
    "Common",
    "Images",
    "NormalisationName",
    "Part",
    "Sample",
    "Selection",
    "Split",
    "as_images",
    "as_labels",
    "data_root",
    "held_out",
    "held_out_of_each_class",
    "large_transform",
    "one_of",
    "part_of_batch",
    "require_files",
]
