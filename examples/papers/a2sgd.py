"""A2SGD: Bhattacharya et al., O(1) Communication for Distributed SGD through Two-Level Gradient
Averaging, 2021."""

from typing import Any

import jsparse

from .alone import Computing
from .convergence import Convergence
from .model import Model
from .records import Spread
from .times import Synchronised

ALGORITHMS = ("dense", "topk_allgather", "gaussiank", "qsgd", "a2sgd")
# Table I; the density is 0.001 throughout (section IV-A.1). The learning rate is multiplied by the
# workers, rises in the first epochs and falls as a square.
NETS = {"VGG-16": 14_728_266, "ResNet-20": 269_722, "FNN-3": 199_210, "LSTM-PTB": 66_034_000}
FNN3: dict[str, Any] = {
    "model": "fnn3",
    "data": "mnist",
    "workers": 8,
    "density": 0.001,
    "batch": 128,
    "schedule": "square",
    "warm_up": 5.0,
    "epochs": 30,
}


def at_papers_size(workers: int) -> Convergence:
    """Figure 4 for so many workers, without a search."""
    return Convergence(
        f"As above with {workers} workers. (At the paper's size and learning rate also without --full.)",
        ALGORITHMS,
        **dict(FNN3, workers=workers),
        rates=(0.01 * workers,),
    )


FIGURES = {
    "2": Spread(
        "The gradients are about normal around zero, and more of them come close to zero as the training goes on.",
        model="fnn3",
        data="mnist",
        algorithms=("dense",),
        workers=8,
        densities=(0.001,),
        batch=128,
        steps=2_340,  # 40 epochs.
        every=39,
        rate=0.08,
    ),
    "2, ResNet-20": Spread(
        "ResNet-20's gradients, too, are about normal around zero, and more of them come close to zero.",
        model="resnet20",
        data="cifar10",
        algorithms=("dense",),
        workers=8,
        densities=(0.001,),
        batch=128,
        steps=7_200,  # 150 epochs.
        every=48,
        rate=0.8,
        small={"data": "digits", "batch": 16, "steps": 440, "every": 11, "rate": 0.1},
    ),
    "3": Computing(
        claim="A2SGD computes a little less than Gaussian-k, and much less than Top-k and QSGD.",
        presets={
            "dense": lambda comm, density: jsparse.dense(comm),
            "topk_allgather": lambda comm, density: jsparse.topk_allgather(comm, density=density),
            "gaussiank": lambda comm, density: jsparse.gaussiank(comm, density=density),
            "qsgd": lambda comm, density: jsparse.qsgd(comm),
            "a2sgd": lambda comm, density: jsparse.a2sgd(comm),
        },
        sizes=(1_000_000, 4_000_000, 16_000_000, 66_034_000),
        small={"sizes": (1_000_000, 4_000_000, 16_000_000), "repeats": 5},
    ),
    "4 and Table III": Convergence(
        "A2SGD has the accuracy closest to dense sums, and a higher one than Top-k, Gaussian-k and QSGD, with 4, 8 and "
        "16 workers: 97.82 % with FNN-3 and 8.",
        ALGORITHMS,
        **FNN3,
        vary=("workers", (4, 8, 16)),
        rates=(0.04, 0.08, 0.16),
        small={"warm_up": None, "epochs": 5, "rates": (0.05, 0.2), "examples": 30_000},
    ),
    **{f"4 and Table III, {workers} workers": at_papers_size(workers) for workers in (4, 8, 16)},
    "Table III": Synchronised(
        "The throughput of 8 workers over that of 2 with dense sums: 1.7 to 1.8 with all for FNN-3, 6.4 with A2SGD and "
        "2.3 with dense sums for LSTM-PTB. (Here by the time of a synchronisation, so four times that of 2 workers "
        "with dense sums over that of 8.)",
        ALGORITHMS,
        hosts=(2, 8),
        sizes=tuple(NETS.values()),
        densities=(0.001,),
        rates=("10gbit",),
        small={"sizes": (NETS["FNN-3"], 1_472_826), "rates": ("1gbit",), "repeats": 5},
    ),
    "6 and 7": Synchronised(
        "On a fast network short gradients gain nothing; with long ones A2SGD and Gaussian-k take far less time than "
        "dense sums, Top-k and QSGD. LSTM-PTB trains 2.7 times as fast as with dense sums (the paper prints the ratio "
        "less one: 1.72).",
        ALGORITHMS,
        hosts=(2, 4, 8, 16),
        sizes=(NETS["ResNet-20"], NETS["VGG-16"], NETS["LSTM-PTB"]),
        densities=(0.001,),
        rates=("10gbit",),
        small={"hosts": (4,), "repeats": 5},
    ),
    "8 and 9": Synchronised(
        "On a slow network A2SGD trains VGG-16 1.7 to 2.3 times as fast as dense sums, and LSTM-PTB 5.6 to 11.4 times.",
        ("dense", "a2sgd"),
        hosts=(2, 4, 8, 16),
        sizes=(NETS["VGG-16"], NETS["LSTM-PTB"]),
        densities=(0.001,),
        small={"hosts": (2, 4, 8), "sizes": (1_472_826,), "repeats": 5},
    ),
    "11 and Table IV": Convergence(
        "With Adam A2SGD has a lower loss than dense sums, Top-k about theirs, and Gaussian-k a far higher one.",
        ALGORITHMS,
        model="resnet20",
        data="cifar10",
        workers=8,
        density=0.001,
        batch=128,
        epochs=150,
        schedule="square",
        warm_up=5.0,
        optimizer="adam",
        rates=(1e-3, 3e-3, 1e-2),
        small={"warm_up": None, "model": "fnn3", "data": "mnist", "epochs": 5, "rates": (1e-3, 3e-3)}
        | {"examples": 30_000},
    ),
    "Table II": Model(
        "A2SGD sends 64 bits, whatever the gradient's length.",
        "words",
        ("dense", "qsgd", "topk_allgather", "gaussiank", "a2sgd"),
        (8,),
        tuple(NETS.values()),
        (0.001,),
    ),
}
