"""Networks, one file for each family, and what makes any network fit for a loss that looks at features."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from fedlas.catalog import Catalog, keywords, nearest, summary
from fedlas.errors import UserError
from fedlas.models.base import AbstractLibrary, AbstractNetwork, Output, WithFeatures, WithLoss, closest

__all__ = [
    "AbstractLibrary",
    "AbstractNetwork",
    "ModelRecord",
    "Output",
    "WithFeatures",
    "WithLoss",
    "build_model",
    "check_model",
    "list_models",
]

CATALOG: Catalog[AbstractNetwork] = Catalog("fedlas.models", AbstractNetwork, "network")  # type: ignore[type-abstract]


@dataclass(frozen=True)
class ModelRecord:
    """What the catalogue tells about one network.

    Args:
        name: what `build_model` takes.
        summary: the network in a sentence.
        citation: where it was published.
        image_size: height and width of the images that it is made for; None if it takes any.
        keywords: what it can be built with.
    """

    name: str
    summary: str
    citation: str
    image_size: int | None
    keywords: tuple[str, ...]


def build_model(name: str, num_classes: int, **options: Any) -> nn.Module:
    """Build a network that maps images to logits.

    Weights are drawn from torch's own random state, so equal seeds give equal networks.

    Args:
        name: a name of the catalogue, "timm:NAME" or "torchvision:NAME", or NAME alone if only one of them has it.
        num_classes: number of logits.
        options: keywords of the network, such as `in_channels` or `pretrained`; those of a library's network that this
            package does not know go to the library.
    """
    entry, library = _entry(name)
    known = keywords(CATALOG.find(entry))
    if "settings" in known:
        settings = {word: value for word, value in options.items() if word not in known}
        options = {word: value for word, value in options.items() if word in known}
        options["settings"] = {**options.get("settings", {}), **settings}
    return CATALOG.build(entry, num_classes=num_classes, **library, **options).build()


def check_model(name: str, **options: Any) -> None:
    """Refuse a name that no network has, neither here nor in a library that is installed, and wrong keywords.

    Args:
        name: as for `build_model`.
        options: likewise; those of a library's network that this package does not know are the library's own matter.
    """
    entry, library = _entry(name)
    known = keywords(CATALOG.find(entry))
    own = {word: value for word, value in options.items() if word in known or "settings" not in known}
    CATALOG.check(entry, **{"num_classes": 2, **library, **own})


def list_models() -> list[ModelRecord]:
    """List the networks of the catalogue; those of timm and torchvision can be built too, and are not listed here."""
    return [
        ModelRecord(name, summary(cls), cls.citation, cls.image_size, tuple(keywords(cls)))
        for name, cls in CATALOG.entries.items()
        if not issubclass(cls, AbstractLibrary)
    ]


def _entry(name: str) -> tuple[str, dict[str, str]]:
    """Find the entry that a name means, and for a library's entry the network in it."""
    libraries = {word: cls for word, cls in CATALOG.entries.items() if issubclass(cls, AbstractLibrary)}
    first, colon, network = name.partition(":")
    if first in libraries and not network:
        raise UserError(f"{first} is a library of networks; say which of them: '{first}:NAME'")
    if first in libraries and colon:
        return first, {"network": network}
    if name in CATALOG.entries:
        return name, {}
    installed = {word: cls for word, cls in libraries.items() if cls.is_installed()}
    owners = [word for word, cls in installed.items() if cls.has(name)]
    if len(owners) == 1:
        return owners[0], {"network": name}
    if owners:
        choices = " or ".join(repr(f"{word}:{name}") for word in owners)
        raise UserError(f"{' and '.join(owners)} both have a network {name!r}; write {choices}")
    hint = nearest(name, [record.name for record in list_models()])
    if not hint.startswith("did you mean"):
        others = closest(name, sorted({other for cls in installed.values() for other in cls.networks()}))
        hint = f"{others.removeprefix('; ')} {hint}".lstrip()
    words = [f"'{word}:NAME'" + ("" if word in installed else " (not installed)") for word in libraries]
    raise UserError(f"no network is called {name!r}; {hint} Those of libraries: {', '.join(words)}.")
