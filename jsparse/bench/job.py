"""The job of ``jsparse bench network``, which travels to the workers as JSON."""

import dataclasses
import json


@dataclasses.dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
      hosts, size, density: P, n and k / n.
      rates: the links' rates, measured one after the other.
      repeats: timed steps of each form.
      forms: names of the forms to measure; None for all of them.
    """

    hosts: int
    size: int
    density: float
    rates: tuple[str, ...]
    repeats: int
    forms: tuple[str, ...] | None = None

    def wants(self, name: str) -> bool:
        """Whether the form of this name is to be measured."""
        return self.forms is None or name in self.forms

    def written(self) -> str:
        """The job as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def read(text: str) -> "Job":
        """The job that :meth:`written` wrote."""
        read = json.loads(text)
        forms = None if read["forms"] is None else tuple(read["forms"])
        return Job(**read | {"rates": tuple(read["rates"]), "forms": forms})
