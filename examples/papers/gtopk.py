"""Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low
Bandwidth Networks, ICDCS 2019."""

from typing import Any

from .convergence import Convergence
from .model import Model
from .times import PingPong, Synchronised

ETHERNET = (0.436e-3, 3.6e-8)  # α and β, section IV-C.
VGG16, RESNET20, ALEXNET, RESNET50 = 14_728_266, 269_722, 61_100_840, 25_557_032
MODELLED = ("dense", "topk_allgather", "gtopk_tree", "gtopk")
# The densities fall in the first four epochs, with small learning rates (section IV-B). The paper
# does not say whether rates fall later.
WARM_UP: dict[str, Any] = {"schedule": "steps", "warm_up": 4.0}
RESNET: dict[str, Any] = WARM_UP | {"model": "resnet20", "data": "cifar10", "workers": 4, "batch": 128, "epochs": 140}
VGG: dict[str, Any] = RESNET | {"model": "vgg16"}
MANY: dict[str, Any] = RESNET | {"workers": 32, "batch": 32, "epochs": 120}
RATES = (0.025, 0.05, 0.1)
# Small runs are too short for a warm-up, unless it is what they show.
SHORT: dict[str, Any] = {"schedule": "constant", "warm_up": None}
SMALL_RESNET: dict[str, Any] = SHORT | {"data": "digits", "batch": 16, "epochs": 12, "rates": (0.05, 0.1)}
SMALL_VGG: dict[str, Any] = SHORT | {
    "model": "vgg-small",
    "batch": 32,
    "epochs": 5,
    "examples": 5_000,
    "rates": (0.02, 0.05),
}
SMALL_MANY: dict[str, Any] = SMALL_RESNET | {"workers": 16, "batch": 8, "density": 0.005}

FIGURES = {
    "1": Convergence(
        "ResNet-20 converges as with dense sums where only the k largest elements of the sum are applied.",
        ("dense", "topk_allgather", "gtopk-warmup"),
        **RESNET,
        density=0.001,
        rates=RATES,
        small=SMALL_RESNET | {"algorithms": ("dense", "topk_allgather", "gtopk"), "density": 0.01},
    ),
    "5": Convergence(
        "With warm-up VGG-16 converges slightly better than with dense sums. (Here sums are those of a butterfly.)",
        ("dense", "gtopk", "gtopk-warmup"),
        **VGG,
        density=0.001,
        rates=RATES,
        small=SMALL_VGG | {"warm_up": 1.0},
    ),
    "6": Convergence(
        "On ImageNet AlexNet converges slightly worse than with dense sums, ResNet-50 even faster. (Here ResNet-110 on "
        "CIFAR-10, or ResNet-20.)",
        ("dense", "gtopk-warmup"),
        **dict(RESNET, model="resnet110", batch=64, epochs=45),
        density=0.001,
        rates=(0.005, 0.01, 0.02),
        small={"schedule": "linear", "warm_up": None, "algorithms": ("dense", "gtopk"), "model": "resnet20"}
        | {"batch": 32, "epochs": 5, "density": 0.01, "rates": (0.03, 0.1), "examples": 5_000},
    ),
    "7": Convergence(
        "LSTM-PTB converges as with dense sums, at density 0.005. (Here the share of right words.)",
        ("dense", "gtopk-warmup"),
        **WARM_UP,
        model="lstm-ptb",
        data="ptb",
        workers=4,
        batch=100,
        epochs=40,
        density=0.005,
        rates=(0.25, 0.5, 1.0),
        small=SHORT
        | {"algorithms": ("dense", "gtopk"), "model": "lstm-small", "batch": 16, "epochs": 2}
        | {"examples": 12_000, "rates": (0.5, 1.0)},
    ),
    "8": PingPong("A message takes α + β L: on their 1 Gbit/s, 0.436 ms and 3.6e-5 ms a word.", ("1gbit", "100mbit")),
    "9, left": Model(
        "On 4 workers an all-gather is slightly faster; from 16 workers on gTop-k is faster.",
        "ms",
        MODELLED,
        (4, 8, 16, 32, 64, 128),
        (25_000_000,),
        (0.001,),
        link=ETHERNET,
    ),
    "9, right": Model(
        "The longer the gradient, the greater the advantage of gTop-k, on 32 workers.",
        "ms",
        MODELLED,
        (32,),
        (1_000_000, 10_000_000, 25_000_000, 50_000_000, 100_000_000),
        (0.001,),
        link=ETHERNET,
    ),
    "10": Synchronised(
        "On 32 workers gTop-k is 6.7 times as fast as dense sums on average, and 1.4 times as fast as Top-k (for "
        "AlexNet 12 and 1.7 times); the advantage grows with the workers.",
        ("dense", "topk_allgather", "gtopk, tree", "gtopk"),
        hosts=(2, 4, 8, 16, 32),
        sizes=(VGG16, RESNET20),
        densities=(0.001,),
        small={"hosts": (2, 4, 8), "sizes": (1_472_826, RESNET20), "repeats": 5},
    ),
    "11": Synchronised(
        "Selecting takes as long as computing for VGG-16 and AlexNet, where communication takes longest; both take "
        "less than computing for ResNet-20 and ResNet-50. (Here the synchronisation of VGG-16's gradient.)",
        ("dense", "topk_allgather", "gtopk, tree", "gtopk"),
        hosts=(32,),
        densities=(0.001,),
        small={"hosts": (4,), "repeats": 5},
    ),
    "12": Convergence(
        "A density as low as 0.0005 has no great effect on the accuracy of ResNet-20.",
        ("gtopk-warmup",),
        **RESNET,
        density=0.001,
        vary=("density", (0.0005, 0.001, 0.01)),
        rates=RATES,
        small=SMALL_RESNET | {"algorithms": ("gtopk",), "vary": ("density", (0.001, 0.005, 0.02))},
    ),
    "13": Convergence(
        "With few and large batches (1,024, 32 workers) gTop-k loses 9 points to Top-k with ResNet-20.",
        ("topk_allgather", "gtopk"),
        **MANY,
        density=0.001,
        rates=RATES,
        small=SMALL_MANY,
    ),
    "14": Convergence(
        "With smaller batches it loses only half a point with ResNet-20. (With larger ones it loses 6 with VGG-16.)",
        ("topk_allgather", "gtopk"),
        **MANY,
        density=0.001,
        vary=("batch", (4, 32)),
        rates=RATES,
        small=SMALL_MANY | {"vary": ("batch", (2, 8))},
    ),
    "12, VGG-16": Convergence(
        "A density as low as 0.0005 has no great effect on the accuracy of VGG-16.",
        ("gtopk-warmup",),
        **VGG,
        density=0.001,
        vary=("density", (0.0005, 0.001, 0.01)),
        rates=RATES,
        small=SMALL_VGG | {"algorithms": ("gtopk",), "vary": ("density", (0.001, 0.005, 0.02))},
    ),
    "13 and 14, VGG-16": Convergence(
        "With batches of 1,024 from 32 workers gTop-k loses a point to Top-k with VGG-16, with larger ones 6.",
        ("topk_allgather", "gtopk"),
        **dict(MANY, model="vgg16"),
        density=0.001,
        vary=("batch", (32, 64)),
        rates=RATES,
        small=SMALL_VGG | {"workers": 16, "vary": ("batch", (2, 8)), "density": 0.005, "rates": (0.008, 0.02, 0.05)},
    ),
    "Table IV": Model(
        "gTop-k trains 2.7 to 12.8 times as fast as dense sums on 32 GPUs, and 1.1 to 1.7 times as fast as Top-k.",
        "ms",
        MODELLED,
        (32,),
        (VGG16, RESNET20, ALEXNET, RESNET50),
        (0.001,),
        link=ETHERNET,
    ),
    "Table I": Model(
        "gTop-k's words grow as log P, those of an all-gather as P.",
        "words",
        MODELLED,
        (2, 4, 8, 16, 32, 64, 128),
        (VGG16,),
        (0.001,),
    ),
}
