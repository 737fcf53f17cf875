"""Models and pages that the tests of reports share, and a browser tab that shows one of these pages."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fedlas.evaluation import evaluate
from fedlas.predictions import Predictions
from fedlas.report.model import Model

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

NARROW, WIDE = 375, 1440  # pixels of a window
ATTACK_SCRIPT = "window.ran = true"
HOSTILE = (
    f"</script><script>{ATTACK_SCRIPT}</script>",
    f'"><img src=x onerror="{ATTACK_SCRIPT}">',
    f"<!--<script>{ATTACK_SCRIPT}//-->",
    f"' onmouseover='{ATTACK_SCRIPT}",
    f"javascript:{ATTACK_SCRIPT}",
    "{{ 7 * 7 }}{% raw %}${7*7}",
    "مرحبا بالعالم \u202eتجربة",
    "line\u2028separator\u2029and\x00zero\ud800",
    "&lt;b&gt; &amp; <b>bold</b>",
    "長い名前" * 2_500,
)


def sample_predictions(
    n: int = 700, classes: int = 10, scale: float = 2.0, seed: int = 0, **options: Any
) -> Predictions:
    """Predictions whose logits are `scale` times those that the labels were drawn from, with features."""
    random = torch.Generator().manual_seed(0)  # the same samples for every seed
    logits = 2.5 * torch.randn(n, classes, generator=random)
    labels = torch.multinomial(logits.softmax(1), 1, generator=random)[:, 0]
    features = torch.rand(n, 6, generator=random) * (1 + logits.softmax(1).amax(1, keepdim=True))
    noise = torch.randn(n, classes, generator=torch.Generator().manual_seed(seed)) if seed else 0.0
    options = {"features": features, "split": "val"} | options
    return Predictions(scale * (logits + 0.3 * noise), labels, **options)


def ood_predictions(n: int = 300, classes: int = 10, scale: float = 1.5) -> Predictions:
    random = torch.Generator().manual_seed(1)
    return Predictions(scale * torch.randn(n, classes, generator=random), features=torch.rand(n, 6, generator=random))


def training_log(epochs: int = 12) -> list[dict[str, Any]]:
    """The log of a run with a gate, as `fedlas.training` writes it."""
    counts = [round(200 * math.exp(-((index - 8.5) ** 2) / 8)) for index in range(18)]
    return [
        {
            "epoch": epoch,
            "train": {"loss": 2 / epoch},
            "val": {"accuracy": 0.9 - 0.5 / epoch, "ece": 0.02 + 0.05 / epoch},
            "gate": {
                "positive": 0.5 + 0.02 * epoch,
                "negative": 0.5 - 0.02 * epoch,
                "flip_rate": None if epoch == 1 else 0.4 / epoch,
                "alpha_ratio": 1 - 0.03 * epoch,
                "against_gamma": 0.5 + 0.03 * epoch,
                "gamma_histogram": {"edges": [-4 + 0.5 * n for n in range(17)], "counts": counts},
            },
        }
        for epoch in range(1, epochs + 1)
    ]


@cache
def models() -> dict[str, Model]:
    """Three models on the same samples, the first with everything that a page can show."""
    first = sample_predictions(class_names=CIFAR10)
    ood = {"street numbers": ood_predictions(), "noise": ood_predictions(200, scale=0.5)}
    options: dict[str, Any] = {"resamples": 100}
    recipe = {"data": "cifar10", "loss": "fedlas_ls", "loss_options": {"alpha": 0.05, "beta": 4.0}}
    return {
        "sure": Model(
            predictions=first,
            report=evaluate(first, ood=ood, posthoc=["temperature", "isotonic"], **options),
            ood=ood,
            log=training_log(),
            recipe=recipe,
            environment={"device": "cpu"},
        ),
        "unsure": Model(
            predictions=(second := sample_predictions(scale=0.4, class_names=CIFAR10, features=None)),
            report=evaluate(second, posthoc="temperature", **options),
        ),
        "other": Model(predictions=(third := sample_predictions(seed=5)), report=evaluate(third, **options)),
    }


def images(n: int = 700) -> torch.Tensor:
    return torch.randint(0, 256, (n, 8, 8, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@cache
def thousand_class_model() -> Model:
    """Five thousand samples of a thousand classes."""
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 1000, (5_000,), generator=random)
    logits = 2.5 * torch.randn(5_000, 1000, generator=random)
    logits[torch.arange(5_000), labels] += 10
    predictions = Predictions(logits, labels, class_names=[f"kind {k} of things" for k in range(1000)])
    return Model(predictions=predictions, report=evaluate(predictions, intervals=False))


@cache
def hostile_models() -> tuple[dict[str, Model], dict[str, Any]]:
    """A model, and the options of a page, in which every text is an attack."""
    metadata = {HOSTILE[3]: [HOSTILE[row % 10] for row in range(300)]}
    predictions = sample_predictions(300, class_names=HOSTILE, split=HOSTILE[0], metadata=metadata)
    ood = {name: ood_predictions(50) for name in (HOSTILE[0], HOSTILE[1], HOSTILE[6])}
    report = evaluate(predictions, ood=ood, posthoc="temperature", resamples=50)
    first_model = Model(
        predictions=predictions,
        report=report,
        ood=ood,
        recipe={HOSTILE[0]: HOSTILE[1], "nested": {HOSTILE[2]: [HOSTILE[0], HOSTILE[9]]}},
        environment={HOSTILE[1]: HOSTILE[0]},
        log=training_log(),
    )
    second_model = Model(predictions=predictions, report=report)
    options = {
        "title": HOSTILE[0],
        "command": HOSTILE[1] + HOSTILE[0],
        "ids": [HOSTILE[row % 10] for row in range(300)],
        "paths": [f"/nowhere/{HOSTILE[(row + 3) % 10]}" for row in range(300)],
        "environment": {HOSTILE[0]: HOSTILE[1]},
        "resamples": 50,
    }
    return {HOSTILE[0]: first_model, HOSTILE[9]: second_model}, options


class BrowserTab:
    """A browser tab with an open page, and the errors that the page caused."""

    def __init__(self, browser: Any, path: Path, width: int = WIDE, scheme: str = "light", **options: Any) -> None:
        options = {
            "viewport": {"width": width, "height": 900},
            "color_scheme": scheme,
            "reduced_motion": "reduce",
        } | options
        self.context = browser.new_context(**options)
        self.errors: list[str] = []
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.errors.append(f"console: {message.text}"))
        self.page.on("pageerror", lambda error: self.errors.append(f"error: {error}"))
        self.page.on("request", self._check_request)
        self.page.on("requestfailed", lambda request: self.errors.append(f"failed: {request.url} {request.failure}"))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]")

    def _check_request(self, request: Any) -> None:
        if not request.url.startswith(("data:", "file:")) or request.resource_type not in {"document", "image"}:
            self.errors.append(f"request: {request.url}")

    def data(self) -> dict[str, Any]:
        return dict(self.page.evaluate("JSON.parse(document.getElementById('page-data').textContent)"))

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).first.inner_text())

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())

    def open_all(self) -> None:
        self.page.locator("details").evaluate_all("all => all.forEach((details) => { details.open = true; })")

    def overflow(self) -> int:
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def close(self) -> None:
        self.context.close()
        assert self.errors == []
