"""Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP 2022."""

from typing import Any

from jsparse import cost

from .convergence import Convergence
from .model import Model
from .records import Balance, Counts, Thresholds, Xi
from .times import Synchronised

FORMS = ("dense", "dense, buckets", "topk_allgather", "topk_dsa", "gtopk, tree", "gaussiank", "oktopk")
ALGORITHMS = ("dense", "topk_allgather", "gtopk", "gaussiank", "oktopk")
MODELLED = ("dense", "topk_allgather", "gaussiank", "topk_dsa", "gtopk_tree", "oktopk")
# Piz Daint's network, about: 82 Gbit/s and 1.5 µs.
ARIES = cost.link(82, 1.5)
VGG16, LSTM, BERT = 14_728_266, 27_569_568, 133_547_324
CIFAR10: dict[str, Any] = {"model": "vgg16", "data": "cifar10", "batch": 16}
MNIST: dict[str, Any] = {"model": "fnn3", "data": "mnist", "batch": 16, "schedule": "constant"}


def weak_scaling(claim: str, size: int, density: float, hosts: tuple[int, ...], small: int) -> Synchronised:
    return Synchronised(
        claim,
        FORMS,
        hosts=hosts,
        sizes=(size,),
        densities=(density,),
        small={"hosts": (2, 4, 8), "sizes": (small,), "repeats": 5},
    )


FIGURES = {
    "4": Thresholds(
        "A threshold of more than 25 steps before still selects about k elements; that of a fitted normal distribution "
        "selects far fewer, above all after the first epochs.",
        **CIFAR10,
        algorithms=("oktopk",),
        workers=16,
        densities=(0.01, 0.02),
        steps=31_200,
        every=25,
        rate=0.1,
        schedule="steps",
        small=MNIST | {"workers": 8, "steps": 800, "every": 25, "rate": 0.05},
    ),
    "5": Xi(
        "ξ rises at first and then stays about as it is; it is mostly less at the higher density, and below the number "
        "of workers.",
        **CIFAR10,
        algorithms=("oktopk",),
        workers=16,
        densities=(0.01, 0.02),
        steps=31_200,
        every=100,
        rate=0.1,
        schedule="steps",
        small=MNIST | {"workers": 8, "steps": 800, "every": 10, "rate": 0.05},
    ),
    "6": Counts(
        "The counts that Ok-Topk selects, on each worker and of the sum, are off by less than 11 % of k on average, "
        "and too high in early epochs, but for BERT; Gaussian-k selects too many at first, and then a tenth of k.",
        **CIFAR10,
        algorithms=(
            "oktopk",
            "oktopk, thresholds corrected",
            "oktopk, thresholds kept",
            "gaussiank",
            "gaussiank, not adjusted",
        ),
        workers=16,
        densities=(0.01,),
        steps=31_200,
        every=20,
        rate=0.1,
        schedule="steps",
        small=MNIST | {"workers": 8, "steps": 800, "every": 2, "rate": 0.05},
    ),
    "7": Balance(
        "Regions of equal load make the reduction 1.13 to 1.75 times as fast as equal regions; balancing the parts "
        "makes the gather 1.12 to 1.43 times as fast.",
        **CIFAR10,
        algorithms=("oktopk", "oktopk, equal regions", "oktopk, not balanced"),
        workers=16,
        densities=(0.01,),
        steps=2_000,
        every=10,
        rate=0.1,
        small=MNIST | {"workers": 16, "steps": 100, "every": 2, "rate": 0.05},
    ),
    "7 by time": Synchronised(
        "As above, by time over slow links.",
        ("oktopk", "oktopk, equal regions", "oktopk, not balanced"),
        hosts=(2, 4, 8, 16),
        small={"sizes": (1_472_826,), "repeats": 5},
    ),
    "8": weak_scaling(
        "At density 2 % Ok-Topk has the least communication; that of TopkA and Gaussian-k doubles with the workers. It "
        "trains VGG-16 1.51 to 8.83 times as fast as the others on 32 GPUs.",
        VGG16,
        0.02,
        (16, 32),
        1_472_826,
    ),
    "9": Convergence(
        "Ok-Topk reaches an accuracy very close to that of dense sums, with a learning rate that falls.",
        ALGORITHMS,
        **CIFAR10,
        workers=16,
        density=0.02,
        epochs=160,
        schedule="steps",
        warm_up=0.0,
        rates=(0.025, 0.05, 0.1),
        small={
            "schedule": "constant",
            "model": "vgg-small",
            "workers": 4,
            "epochs": 4,
            "examples": 5_000,
            "rates": (0.02, 0.05),
        },
    ),
    "10": weak_scaling(
        "As in Figure 8, for the LSTM: 1.34 to 7.71 times as fast on 64 GPUs.", LSTM, 0.02, (32, 64), 2_756_957
    ),
    "11": Convergence(
        "Ok-Topk has a word error rate of 0.309, dense sums 0.308. (Here the share of right letters.)",
        ("dense", "gaussiank", "oktopk"),
        model="lstm-an4",
        data="an4",
        workers=32,
        density=0.02,
        batch=2,
        epochs=160,
        optimizer="sgd",
        rates=(3e-4, 1e-3, 3e-3),
        small={
            "model": "lstm-an4-small",
            "optimizer": "adam",
            "workers": 4,
            "batch": 8,
            "epochs": 30,
            "rates": (3e-3, 1e-2),
        },
    ),
    "12": weak_scaling(
        "As in Figure 8, for BERT at 1 %: on 256 GPUs TopkA and Gaussian-k communicate longer than dense sums, and "
        "Ok-Topk is 3.29 to 12.95 times as fast as the others.",
        BERT,
        0.01,
        (32, 64, 128, 256),
        13_354_732,
    ),
    "12 by the model": Model(
        "As above, without computing.", "ms", MODELLED, (32, 64, 128, 256), (BERT,), (0.01,), link=ARIES
    ),
    "13": Convergence(
        "BERT's training loss is 2.43 with Ok-Topk and 2.33 with dense sums. (Here on WikiText-2, small on the Penn "
        "Treebank.)",
        ("dense", "gaussiank", "oktopk"),
        model="bert-base",
        data="wikitext2",
        workers=32,
        density=0.01,
        batch=8,
        epochs=40,
        optimizer="adamw",
        schedule="linear",
        warm_up=0.0,
        rates=(1e-4, 2e-4, 4e-4),
        small={
            "model": "bert-small",
            "data": "ptb",
            "optimizer": "adam",
            "schedule": "constant",
            "workers": 4,
            "epochs": 3,
            "rates": (1e-3, 3e-3),
        },
    ),
    "Table 1": Model(
        "Ok-Topk sends 2k to 6k words, whatever the number of workers, so it is the most scalable of all.",
        "words",
        MODELLED,
        (2, 4, 8, 16, 32, 64, 256, 1024, 4096),
        (VGG16,),
        (0.01,),
    ),
}
