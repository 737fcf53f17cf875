"""The table of out-of-distribution detection: the AUROC of OOD scores."""

from collections.abc import Sequence
from dataclasses import replace

from fedlas.experiments import paper
from fedlas.experiments.base import SUBSTITUTED, Choice
from fedlas.experiments.grid import AbstractGrid, Measured
from fedlas.experiments.ledger import TEST, Ledger
from fedlas.report.tables import Table
from fedlas.training import official_preprocessing_differs
from fedlas.training.recipe import OFFICIAL_SUFFIX


class OutOfDistribution(AbstractGrid):
    """AUROC of entropy and of the largest probability, CIFAR-10 and CIFAR-100 against SVHN and each other."""

    name = "ood"
    title = "Out-of-distribution detection"
    one_network = True  # not stated in the paper; presumably ResNet-50

    def measured(self, data: str, choice: Choice) -> Sequence[Measured]:
        scores = {"entropy": "entropy", "max_probability": "largest probability"}
        return tuple(
            Measured(
                "auroc", f"AUROC % {paper.data_name(ood)}, {title}", higher_is_better=True, score=score,
                ood=self._preprocessed(ood, choice), ood_in_paper=ood, in_paper=score == "entropy",
            )
            for ood in paper.ood_data(self.name, data)
            for score, title in scores.items()
        )  # fmt: skip

    def _preprocessed(self, ood: str, choice: Choice) -> str:
        """Return the name of an OOD data set, with a suffix if the official code preprocesses it differently."""
        return f"{ood}{OFFICIAL_SUFFIX}" if choice.split != TEST and official_preprocessing_differs(ood) else ood

    def ood_data(self, data: str, choice: Choice) -> tuple[str, ...]:
        """Return the OOD data sets; data sets with official preprocessing are included with default preprocessing too.

        A ledger line that is written again then keeps all values of the previous line.
        """
        names = super().ood_data(data, choice)
        return tuple(sorted({*names, *(name.removesuffix(OFFICIAL_SUFFIX) for name in names)}))

    def tables(self, ledger: Ledger, choice: Choice) -> list[Table]:
        replacements = {
            f"{SUBSTITUTED}{paper.data_name(name)}: {title}."
            for planned in self.plan(choice, ledger)
            if (line := ledger.find(planned.recipe, None, planned.split)) is not None
            for name, title in line.environment.get("titles", {}).items()
            if title != paper.data_name(name)
        }
        tables = super().tables(ledger, choice)
        return [replace(table, notes=(*table.notes, *sorted(replacements))) for table in tables]

    def notes(self, choice: Choice) -> tuple[str, ...]:
        theirs = "Every data set is normalised by itself, as in the official code: CIFAR-100 by other constants."
        ours = "OOD images pass through the transform of the training data."
        return (*super().notes(choice), ours if choice.split == TEST else theirs)
