"""On a GPU, calibrators equal the CPU and keep logits on the device."""

import pytest
import torch
from calibrator_cases import problem

from fedlas import evaluation, posthoc
from fedlas.predictions import Predictions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NAMES = [record.name for record in posthoc.list_calibrators() if record.name not in {"platt", "probmetrics"}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_gpu_fit_matches_the_cpu(name: str, dtype: torch.dtype):
    logits, labels = problem(2000)
    logits = logits.to(dtype)
    here = posthoc.build_calibrator(name).fit(logits, labels)
    there = posthoc.build_calibrator(name).fit(logits.cuda(), labels.cuda())
    found = there.transform(logits.cuda())
    assert found.device.type == "cuda"
    # Probabilities, because an isotonic curve that starts at zero has logarithms that a last digit decides.
    wanted = here.transform(logits).softmax(1)
    torch.testing.assert_close(found.cpu().softmax(1), wanted, atol=1e-3, rtol=1e-3)
    # Fitted on one device, used on the other.
    torch.testing.assert_close(there.transform(logits).softmax(1), wanted, atol=1e-3, rtol=1e-3)


def test_evaluate_on_the_gpu_matches_the_cpu():
    logits, labels = problem(2000)
    ood_logits = torch.randn(500, 4)
    reports = [
        evaluation.evaluate(
            Predictions(logits.float().to(device), labels.to(device)),
            ood={"noise": ood_logits.to(device)},
            posthoc=["temperature"],
            resamples=200,
        )
        for device in ("cpu", "cuda")
    ]
    for here, there in zip(*(report.states for report in reports), strict=True):
        for name, result in here.results.items():
            assert float(there[name]) == pytest.approx(float(result), rel=1e-4, abs=1e-6), name
        assert there.detection["noise"]["entropy"].auroc == pytest.approx(here.detection["noise"]["entropy"].auroc)
