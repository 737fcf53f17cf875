"""Training: from a recipe to predictions on disk."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlas.training.callbacks import AbstractCallback as AbstractCallback
    from fedlas.training.loop import DivergedError as DivergedError
    from fedlas.training.loop import fit as fit
    from fedlas.training.loop import fit_many as fit_many
    from fedlas.training.protocols import check_parts as check_parts
    from fedlas.training.protocols import list_recipes as list_recipes
    from fedlas.training.protocols import official_preprocessing_differs as official_preprocessing_differs
    from fedlas.training.protocols import protocol_named as protocol_named
    from fedlas.training.protocols import published_models as published_models
    from fedlas.training.protocols import recipe_for as recipe_for
    from fedlas.training.recipe import Recipe as Recipe
    from fedlas.training.run_folder import Run as Run
    from fedlas.training.run_folder import RunError as RunError
    from fedlas.training.signals import StoppedError as StoppedError
    from fedlas.training.signals import StopSignals as StopSignals

# Imported on first use: recipes and run folders can be used without importing data sets and networks.
_MODULES = {
    "AbstractCallback": "callbacks",
    "DivergedError": "loop",
    "Recipe": "recipe",
    "Run": "run_folder",
    "RunError": "run_folder",
    "StopSignals": "signals",
    "StoppedError": "signals",
    "check_parts": "protocols",
    "fit": "loop",
    "fit_many": "loop",
    "list_recipes": "protocols",
    "protocol_named": "protocols",
    "published_models": "protocols",
    "recipe_for": "protocols",
    "official_preprocessing_differs": "protocols",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Load a name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'fedlas.training' has no attribute {name!r}")
    return getattr(import_module(f"fedlas.training.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
