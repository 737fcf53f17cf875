"""Training: from a recipe to predictions on disk."""

from typing import TYPE_CHECKING

from fedlas.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from fedlas.training.build import check_parts as check_parts
    from fedlas.training.callbacks import AbstractCallback as AbstractCallback
    from fedlas.training.loop import DivergedError as DivergedError
    from fedlas.training.loop import fit as fit
    from fedlas.training.loop import fit_many as fit_many
    from fedlas.training.predict_run import load_network as load_network
    from fedlas.training.protocols import list_recipes as list_recipes
    from fedlas.training.protocols import official_preprocessing_differs as official_preprocessing_differs
    from fedlas.training.protocols import paper_models as paper_models
    from fedlas.training.protocols import protocol_named as protocol_named
    from fedlas.training.protocols import recipe_for as recipe_for
    from fedlas.training.recipe import Recipe as Recipe
    from fedlas.training.run_folder import Run as Run
    from fedlas.training.run_folder import RunError as RunError
    from fedlas.training.signals import StoppedError as StoppedError
    from fedlas.training.signals import StopSignals as StopSignals

# Recipes and run folders can be used without importing data sets and networks.
__getattr__, __dir__, __all__ = lazy_attributes(
    __name__,
    {
        "build": ["check_parts"],
        "callbacks": ["AbstractCallback"],
        "loop": ["DivergedError", "fit", "fit_many"],
        "predict_run": ["load_network"],
        "protocols": ["list_recipes", "official_preprocessing_differs", "paper_models", "protocol_named", "recipe_for"],
        "recipe": ["Recipe"],
        "run_folder": ["Run", "RunError"],
        "signals": ["StopSignals", "StoppedError"],
    },
)
