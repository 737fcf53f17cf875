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
    cpu_calibrator = posthoc.build_calibrator(name).fit(logits, labels)
    gpu_calibrator = posthoc.build_calibrator(name).fit(logits.cuda(), labels.cuda())
    calibrated = gpu_calibrator.transform(logits.cuda())
    assert calibrated.device.type == "cuda"
    # Probabilities, because an isotonic curve that starts at zero has logarithms that a last digit decides.
    expected = cpu_calibrator.transform(logits).softmax(1)
    torch.testing.assert_close(calibrated.cpu().softmax(1), expected, atol=1e-3, rtol=1e-3)
    # Fitted on one device, used on the other.
    torch.testing.assert_close(gpu_calibrator.transform(logits).softmax(1), expected, atol=1e-3, rtol=1e-3)


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
    for cpu_state, gpu_state in zip(*(report.states for report in reports), strict=True):
        for name, result in cpu_state.results.items():
            assert float(gpu_state[name]) == pytest.approx(float(result), rel=1e-4, abs=1e-6), name
        assert gpu_state.detection["noise"]["entropy"].auroc == pytest.approx(
            cpu_state.detection["noise"]["entropy"].auroc
        )
