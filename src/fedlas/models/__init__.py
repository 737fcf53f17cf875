"""Networks, one file per family, and wrappers that return the features of any classifier."""

from typing import Any

from torch import nn

from fedlas.catalog import Catalog, CatalogRecord, keywords, nearest
from fedlas.errors import UserError
from fedlas.models.base import AbstractLibrary, AbstractNetwork, Output, WithFeatures, WithLoss, closest

__all__ = [
    "AbstractLibrary",
    "AbstractNetwork",
    "Output",
    "WithFeatures",
    "WithLoss",
    "build_model",
    "check_model",
    "list_models",
]

CATALOG: Catalog[AbstractNetwork] = Catalog("fedlas.models", AbstractNetwork, "network")  # type: ignore[type-abstract]


def build_model(name: str, num_classes: int, **options: Any) -> nn.Module:
    """Build a network that maps images to logits.

    Weights are initialised from the global random state of torch, so equal seeds give equal networks.

    Args:
        name: a name of the catalogue, "timm:NAME" or "torchvision:NAME", or NAME if only one of them has it.
        num_classes: number of logits.
        options: keywords of the network, such as `in_channels` or `pretrained`; unknown keywords of a library network
            are passed to the library.
    """
    entry, library = _entry(name)
    known = keywords(CATALOG.find(entry))
    if "settings" in known:
        settings = {option: value for option, value in options.items() if option not in known}
        options = {option: value for option, value in options.items() if option in known}
        options["settings"] = {**options.get("settings", {}), **settings}
    return CATALOG.build(entry, num_classes=num_classes, **library, **options).build()


def check_model(name: str, **options: Any) -> None:
    """Raise if a network is neither in the catalogue nor in an installed library, or if keywords are wrong.

    Args:
        name: as for `build_model`.
        options: as for `build_model`; keywords that are passed to a library are not checked.
    """
    entry, library = _entry(name)
    known = keywords(CATALOG.find(entry))
    network_options = {option: value for option, value in options.items() if option in known or "settings" not in known}
    CATALOG.check(entry, **{"num_classes": 2, **library, **network_options})


def list_models() -> list[CatalogRecord[AbstractNetwork]]:
    """List the networks of the catalogue, except the networks of timm and torchvision."""
    return [record for record in CATALOG.records() if not issubclass(record.cls, AbstractLibrary)]


def _entry(name: str) -> tuple[str, dict[str, str]]:
    """Return the catalogue entry of a name, and options that select a network of a library."""
    libraries = {library: cls for library, cls in CATALOG.entries.items() if issubclass(cls, AbstractLibrary)}
    first, colon, network = name.partition(":")
    if first in libraries and not network:
        raise UserError(f"{first} is a library of networks; choose one: '{first}:NAME'")
    if first in libraries and colon:
        return first, {"network": network}
    if name in CATALOG.entries:
        return name, {}
    installed = {library: cls for library, cls in libraries.items() if cls.is_installed()}
    owners = [library for library, cls in installed.items() if cls.has(name)]
    if len(owners) == 1:
        return owners[0], {"network": name}
    if owners:
        choices = " or ".join(repr(f"{library}:{name}") for library in owners)
        raise UserError(f"{' and '.join(owners)} both have a network {name!r}; write {choices}")
    hint = nearest(name, [record.name for record in list_models()])
    if not hint.startswith("did you mean"):
        others = closest(name, sorted({other for cls in installed.values() for other in cls.networks()}))
        hint = f"{others.removeprefix('; ')} {hint[0].upper()}{hint[1:]}" if others else hint
    forms = [f"'{library}:NAME'" + ("" if library in installed else " (not installed)") for library in libraries]
    raise UserError(f"no network is called {name!r}; {hint} Those of libraries: {', '.join(forms)}.")
