"""Renggli, Efficient Sparse AllReduce for Scalable Machine Learning, the SparCML thesis, 2017."""

from typing import Any

from jsparse import cost

from .alone import Summing
from .convergence import Convergence
from .model import Model
from .records import Distinct
from .times import Synchronised

FORMS = ("dense", "ssar_recursive_doubling", "ssar_split_allgather", "dsar_split_allgather")
N = 16_777_216
TOP = {f"top {count}": count / 512 for count in (2, 8, 32)}  # Of each bucket of 512.
RESNET110: dict[str, Any] = {
    "model": "resnet110",
    "data": "cifar10",
    "workers": 8,
    "batch": 64,
    "epochs": 160,
    "rates": (0.1,),
}
DIGITS: dict[str, Any] = {"model": "resnet20", "data": "digits", "epochs": 12, "rates": (0.05, 0.1)}

FIGURES = {
    "3.4 and 3.5": Model(
        "The size of the sum of uniformly drawn indices, by their number and the workers.",
        "union",
        (),
        (2, 4, 8, 16, 32, 64),
        (512,),
        (1 / 512, 16 / 512, 64 / 512, 256 / 512),
    ),
    "5.1 to 5.5": Synchronised(
        "Recursive doubling is fastest for few elements, where latency decides; splitting for more; above some density "
        "dynamic sums or dense ones. No sparse form takes longer than dense, but for small deviations.",
        FORMS,
        hosts=(8,),
        sizes=(N,),
        densities=(1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1),
        over="density",
        small={"hosts": (4,), "sizes": (1_048_576,), "densities": (1e-5, 1e-4, 1e-3, 1e-2, 1e-1), "repeats": 5},
    ),
    "5.3": Synchronised(
        "With groups of 8 that switch to dense vectors early, dynamic sums are faster at high densities or with very "
        "many workers. (Here groups of 2.)",
        ("dense", "dsar_split_allgather", "dsar_split_allgather, pairs"),
        hosts=(4, 8, 16),
        sizes=(N,),
        densities=(1e-2, 1e-1),
        small={"hosts": (4, 8), "sizes": (1_048_576,), "repeats": 5},
    ),
    "5.1 to 5.5 by workers": Synchronised(
        "The more workers, the sooner splitting wins over recursive doubling.",
        FORMS,
        hosts=(2, 4, 8, 16),
        sizes=(N,),
        densities=(1e-2,),
        small={"hosts": (2, 4, 8), "sizes": (1_048_576,), "repeats": 5},
    ),
    "5.1 to 5.5 by the model": Model(
        "As above, on 8 nodes of a fast network.",
        "ms",
        FORMS,
        (8,),
        (N,),
        (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1),
        link=cost.link(82, 1.5),
    ),
    "5.6": Summing(
        claim="Summing two sparse vectors costs as much as summing dense ones at a density of 6.25 %.",
        sizes=(N,),
        densities=(1e-3, 4e-3, 1.6e-2, 6.25e-2, 0.25),
    ),
    "5.7": Synchronised(
        "The throughput of a dense sum rises with its length until the bandwidth decides.",
        ("dense",),
        hosts=(2, 4, 8),
        sizes=(1_000, 10_000, 100_000, 1_000_000, 10_000_000),
        over="size",
        small={"hosts": (4,)},
    ),
    "5.12": Distinct(
        "The workers' indices together stop growing in number where they have many in common. (There: linear models.)",
        model="convnet",
        data="digits",
        algorithms=("topk_allgather",),
        workers=64,
        densities=(0.01,),
        batch=16,
        steps=100,
        every=5,
        rate=0.05,
        small={"workers": 32, "steps": 40},
    ),
    "5.13": Convergence(
        "Selecting 32 of each 512 elements converges as dense sums on 8 nodes, and more slowly on 32.",
        ("dense", "ssar_recursive_doubling-stochastic"),
        **RESNET110,
        density=32 / 512,
        vary=("workers", (4, 8, 32)),
        small=DIGITS | {"batch": 8, "vary": ("workers", (4, 16))},
    ),
    "5.14": Convergence(
        "Two of each 512 elements are enough for ResNet-110 on 8 nodes.",
        ("dense", "ssar_recursive_doubling-stochastic"),
        **RESNET110,
        density=2 / 512,
        vary=("density", tuple(TOP.values())),
        small=DIGITS | {"workers": 4, "batch": 16},
    ),
    "5.14, CIFAR-10": Convergence(
        "As above, for ResNet-20, with a learning rate that rises and falls; beside an exact top-k.",
        ("dense", "topk_allgather", "ssar_recursive_doubling-stochastic"),
        **dict(RESNET110, model="resnet20", schedule="linear"),
        density=2 / 512,
        vary=("density", (2 / 512, 32 / 512)),
        small={
            "workers": 4,
            "batch": 32,
            "epochs": 5,
            "examples": 5_000,
            "rates": (0.01, 0.03, 0.1),
        },
    ),
    "5.15": Synchronised(
        "VGG-19 trains 1.5 times as fast, as it communicates less.",
        ("dense", "ssar_recursive_doubling"),
        hosts=(8,),
        sizes=(143_667_240,),
        densities=(2 / 512,),
        small={"hosts": (4,), "sizes": (14_366_724,), "repeats": 3},
    ),
    "5.16": Convergence(
        "A fully connected net with 2 x 4,096 hidden units learns MNIST 4.6 times as fast, to the same accuracy.",
        ("dense", "ssar_recursive_doubling-stochastic"),
        model="fnn4096",
        data="mnist",
        workers=8,
        density=2 / 512,
        batch=64,
        epochs=10,
        rates=(0.01, 0.05),
        small={"model": "fnn3", "workers": 4, "batch": 32, "epochs": 3, "rates": (0.02, 0.05)},
    ),
    "5.17": Convergence(
        "An LSTM on ATIS trains 2.5 times as fast.",
        ("dense", "ssar_recursive_doubling-stochastic"),
        model="lstm-atis",
        data="atis",
        workers=8,
        density=2 / 512,
        batch=16,
        epochs=20,
        optimizer="adam",
        rates=(1e-3, 3e-3, 1e-2),
        small={"workers": 4, "rates": (3e-3, 1e-2)},
    ),
}
