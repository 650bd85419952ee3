"""The jobs of ``jsparse bench network`` and ``train``, which travel to the workers as JSON."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Self

from .._vector.density import check_density
from .forms import Form
from .hosts import MOST_HOSTS, bits_per_second
from .options import whole


@dataclasses.dataclass(frozen=True)
class Job:
    """What to measure, in several forms at several rates.

    Attributes:
      hosts, density: P and k / n.
      rates: the links' rates, measured one after the other.
      forms: names of the forms to measure.
    """

    hosts: int
    density: float
    rates: Sequence[str]
    forms: Sequence[str]

    @classmethod
    def chosen(cls, args: argparse.Namespace, names: Sequence[str], default: Sequence[str]) -> Self:
        """The job that options ask for, of the same names as the job's fields.

        Args:
          args: the options, among them those of :func:`add_job_options`.
          names: the forms that there are.
          default: those to measure where ``--form`` is not given.

        Raises:
          ValueError: one of the options of :func:`add_job_options` is wrong.
        """
        check_density(args.density)
        for rate in args.rates:
            bits_per_second(rate)
        forms = list(dict.fromkeys(["dense", *(args.forms or default)]))
        for name in forms:
            if name not in names:
                raise ValueError(f"--form is {name!r}; choose from {'; '.join(names)}")
        fields = {field.name for field in dataclasses.fields(cls)}
        options: dict[str, Any] = {name: option for name, option in vars(args).items() if name in fields}
        options["forms"] = forms
        return cls(**options)

    def written(self) -> str:
        """The job as JSON."""
        return json.dumps(vars(self))

    @classmethod
    def read(cls, text: str) -> Self:
        """The job that :meth:`written` wrote."""
        return cls(**json.loads(text))


@dataclasses.dataclass(frozen=True)
class NetworkJob(Job):
    """What ``jsparse bench network`` measures.

    Attributes:
      size: n.
      repeats: timed steps of each form.
      devices: workers on each host.
    """

    size: int
    repeats: int
    devices: int = 1

    @property
    def group(self) -> int:
        """How many workers share the faster of two networks.

        They are a host's devices. Where it has one, they are a pair of hosts.
        """
        return self.devices if self.devices > 1 else 2 - self.hosts % 2

    def fits(self, form: Form) -> bool:
        """Whether the workers can be grouped as a form needs it."""
        return (self.group > 1 or not form.levels) and (self.hosts * self.devices % 2 == 0 or not form.pairs)


def add_job_options(parser: argparse.ArgumentParser, *, form: str) -> None:
    """Adds ``--hosts``, ``--rate``, ``--density``, ``--form`` and ``--resume``.

    Args:
      parser: the command's parser.
      form: the help text of ``--form``.
    """
    parser.add_argument(
        "--hosts", type=whole(2, MOST_HOSTS), default=4, metavar="P", help="number of hosts (default 4)"
    )
    parser.add_argument(
        "--rate",
        dest="rates",
        nargs="+",
        default=["1gbit"],
        metavar="RATE",
        help="rates of the links, in either direction, such as 100mbit; measured one after the other (default 1gbit)",
    )
    parser.add_argument("--density", type=float, default=0.01, help="k / n (default 0.01)")
    parser.add_argument("--form", dest="forms", action="append", metavar="NAME", help=form)
    parser.add_argument("--resume", action="store_true", help="measure only the forms that --json's file lacks")
