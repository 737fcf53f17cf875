"""Fit the temperature of logits that are off by a known factor, with every library that is installed.

    python benchmarks/temperature.py

The labels are drawn from the softmax of the unscaled logits, so the best temperature is the factor times a number near
one that is the same in every row: the optimum of a bounded search in log T, in float64, stands in the second column.
"""

import importlib.util
import warnings
from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp, softmax
from torch import Tensor

from fedlas.posthoc import Temperature

SCALES = (0.01, 0.05, 1, 3, 30, 300, 1000)
Fit = Callable[[Tensor, Tensor], float]


def optimum(logits: Tensor, labels: Tensor) -> float:
    """Search for the temperature with the smallest negative log-likelihood."""
    table, truth = logits.double().numpy(), labels.numpy()

    def nll(log_temperature: float) -> float:
        scaled = table / np.exp(log_temperature)
        return float((logsumexp(scaled, axis=1) - scaled[np.arange(len(truth)), truth]).mean())

    return float(np.exp(minimize_scalar(nll, bounds=(-9, 9), method="bounded", options={"xatol": 1e-10}).x))


def fits() -> dict[str, Fit]:
    """Return the functions that fit a temperature, by library."""
    fits_of: dict[str, Fit] = {
        "fedlas": lambda logits, labels: Temperature().fit(logits, labels).temperature,
        "the paper's grid": lambda logits, labels: (
            Temperature(objective="ece", search="grid").fit(logits, labels).temperature
        ),
    }
    if importlib.util.find_spec("probmetrics"):
        from probmetrics.calibrators import TemperatureScalingCalibrator
        from probmetrics.distributions import CategoricalLogits

        fits_of["probmetrics"] = lambda logits, labels: (
            1 / float(TemperatureScalingCalibrator().fit_torch(CategoricalLogits(logits), labels).invtemp_)
        )
    if importlib.util.find_spec("netcal"):
        from netcal.scaling import TemperatureScaling

        def netcal(logits: Tensor, labels: Tensor) -> float:
            probs = softmax(logits.double().numpy(), axis=1)
            return 1 / float(TemperatureScaling().fit(probs, labels.numpy()).temperature[0])

        fits_of["netcal"] = netcal
    if importlib.util.find_spec("torch_uncertainty"):
        from torch.utils.data import DataLoader, TensorDataset
        from torch_uncertainty.post_processing import TemperatureScaler

        def uncertainty(logits: Tensor, labels: Tensor) -> float:
            scaler = TemperatureScaler(model=torch.nn.Identity())
            scaler.fit(DataLoader(TensorDataset(logits.float(), labels), batch_size=len(logits)), progress=False)
            return float(scaler.temperature[0])

        fits_of["torch-uncertainty"] = uncertainty
    return fits_of


def main() -> None:
    """Print one row for every factor."""
    warnings.simplefilter("ignore")
    random = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(5000, 10, generator=random, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=random)[:, 0]
    libraries = fits()
    print(f"| true T | optimum | {' | '.join(libraries)} |\n|---:|---:|{'---:|' * len(libraries)}")
    for scale in SCALES:
        cells = []
        for fit in libraries.values():
            try:
                cells.append(f"{fit(scale * logits, labels):.5g}")
            except Exception as error:
                cells.append(type(error).__name__)
        print(f"| {scale:g} | {optimum(scale * logits, labels):.5g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
