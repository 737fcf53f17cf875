"""The table of out-of-distribution detection: the AUROC of OOD scores."""

from collections.abc import Sequence
from dataclasses import replace

from fedlas.experiments import paper
from fedlas.experiments.base import FOR, Choice
from fedlas.experiments.grid import AbstractGrid, Measured
from fedlas.experiments.ledger import TEST, Ledger
from fedlas.report.tables import Table
from fedlas.training import official_preprocessing_differs
from fedlas.training.recipe import PUBLISHED


class OutOfDistribution(AbstractGrid):
    """AUROC of entropy and of the largest probability, CIFAR-10 and CIFAR-100 against SVHN and each other."""

    name = "ood"
    title = "Out-of-distribution detection"
    one_network = True  # the paper does not say; ResNet-50 is presumed

    def measured(self, data: str, choice: Choice) -> Sequence[Measured]:
        scores = {"entropy": "entropy", "max_probability": "largest probability"}
        return tuple(
            Measured(
                "auroc", f"AUROC % {paper.data_name(ood)}, {shown}", higher_is_better=True, score=score,
                ood=self._preprocessed(ood, choice), printed_as=ood, printed=score == "entropy",
            )
            for ood in paper.ood_data(self.name, data)
            for score, shown in scores.items()
        )  # fmt: skip

    def _preprocessed(self, ood: str, choice: Choice) -> str:
        """Return the name of an OOD data set, with a suffix if the official code preprocesses it differently."""
        return f"{ood}{PUBLISHED}" if choice.split != TEST and official_preprocessing_differs(ood) else ood

    def ood_data(self, data: str, choice: Choice) -> tuple[str, ...]:
        """Return the OOD data sets; those with the official preprocessing also with ours.

        So a ledger line that is written again keeps all values of the previous one.
        """
        names = super().ood_data(data, choice)
        return tuple(sorted({*names, *(name.removesuffix(PUBLISHED) for name in names)}))

    def uses_official_ood(self, data: str, choice: Choice) -> bool:
        return any(name.endswith(PUBLISHED) for name in self.ood_data(data, choice))

    def tables(self, ledger: Ledger, choice: Choice) -> list[Table]:
        said = {
            f"{FOR}{paper.data_name(name)}: {title}."
            for wanted in self.plan(choice, ledger)
            if (line := ledger.find(wanted.recipe, None, wanted.split)) is not None
            for name, title in line.environment.get("titles", {}).items()
            if title != paper.data_name(name)
        }
        made = super().tables(ledger, choice)
        return [replace(table, notes=(*table.notes, *sorted(said))) for table in made]

    def notes(self, choice: Choice) -> tuple[str, ...]:
        theirs = "Every data set is normalised by itself, as in the published code: CIFAR-100 by other constants."
        ours = "OOD images pass through the transform of the training data."
        return (*super().notes(choice), ours if choice.split == TEST else theirs)
