"""Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters,
MLSys 2021: MSTopK, HiTopKComm, DataCache and PTO (CommLib)."""

from collections.abc import Mapping
from typing import Any

from jsparse import cost

from .alone import Bench
from .convergence import Convergence
from .model import Model
from .times import Synchronised


def of_epochs(form: Mapping[str, Any]) -> dict[str, float]:
    return {f"{form['name']}, epoch {i + 1}": epoch["median_ms"] for i, epoch in enumerate(form["epochs"])}


def of_shares(form: Mapping[str, Any]) -> dict[str, float]:
    name = f"{form['task']}, {form['name']}"
    return {f"{name}, {where}": form[where]["median_ms"] for where in ("together", "alone")}


# 16 nodes of 8 V100s: 25 Gbit/s between them, and NVLink inside, about 300 Gbit/s.
NODE, SLOW = cost.Node(8, *cost.link(300, 5)), cost.link(25, 20)
ALGORITHMS = ("torus", "topk_allgather", "topk_allgather-mstopk", "hitopk")
RESNET50, TRANSFORMER = 25_557_032, 110_000_000

FIGURES = {
    "1": Synchronised(
        "Reading data and dense sums take a large part of a step of ResNet-50. Sums of the largest elements take "
        "little, but selecting these takes longer than forward and backward: 0.239 s to 0.204 s on a V100.",
        ("dense", "topk_allgather"),
        hosts=(16,),
        sizes=(RESNET50,),
        densities=(0.001,),
        rates=("25gbit",),
        devices=8,
        small={"hosts": (4,), "rates": ("1gbit",), "devices": 1, "repeats": 5},
    ),
    "6": Bench(
        "MSTopK selects in a small part of the time of an exact top-k, and in less than DGC's double sampling.",
        ("select", "--density=0.001", "--distribution=gaussian"),
        lambda form: {form["name"]: form["median_ms"]},
        by=("--size", (262_144, 1_048_576, 4_194_304, 16_777_216, 134_217_728)),
        small={"by": ("--size", (262_144, 1_048_576, 4_194_304, 16_777_216))},
    ),
    "7": Model(
        "HiTopKComm takes least time, then the torus, then a tree (here dense_hierarchical); gathering takes most.",
        "ms",
        ("dense", "torus", "dense_hierarchical", "topk_allgather", "hitopk"),
        (128,),
        (1_000_000, 4_000_000, 16_000_000, RESNET50, TRANSFORMER),
        (0.01,),
        link=SLOW,
        node=NODE,
    ),
    "7 and 8, measured": Synchronised(
        "The same between two levels: two devices on each host, each host's link shaped.",
        ("dense", "torus", "topk_allgather", "hitopk"),
        hosts=(4,),
        sizes=(RESNET50,),
        devices=2,
        small={"sizes": (2_555_703,), "repeats": 5},
    ),
    "9": Bench(
        "DataCache reads in less than a tenth of the time. (Training is about twice as fast then.)",
        ("data",),
        of_epochs,
        by=("--repeats", (9,)),
        small={"by": ("--repeats", (3,))},
    ),
    "10 and Table 2": Convergence(
        "Dense sums reach the highest accuracy; MSTopK is 0.2 points below, an exact top-k 0.6. (Here ResNet-20 on "
        "CIFAR-10.)",
        ALGORITHMS,
        model="resnet20",
        data="cifar10",
        workers=8,
        density=0.01,
        batch=32,
        epochs=90,
        rates=(0.05, 0.1, 0.2),
        small={"data": "digits", "workers": 4, "batch": 16, "epochs": 12, "rates": (0.05, 0.1)},
    ),
    "Table 2, Transformer": Convergence(
        "The Transformer loses 2.3 to 2.6 BLEU with the two sparse forms. (Here the share of right words.)",
        ALGORITHMS,
        model="transformer-small",
        data="wikitext2",
        workers=4,
        density=0.01,
        batch=16,
        epochs=10,
        optimizer="adam",
        rates=(1e-3, 3e-3, 1e-2),
        small={"data": "ptb", "epochs": 1, "rates": (3e-3, 1e-2)},
    ),
    "Tables 4 and 5": Convergence(
        "In the first 13 of 28 epochs images have 96 pixels and sums are sparse, later they have 128 to 288 and sums "
        "are dense: 93 % are reached in less time than before. Sparse sums in all epochs would cost accuracy. (Here "
        "ResNet-20 on CIFAR-10, and the time of a step.)",
        ("torus", "hitopk-warmup", "hitopk"),
        model="resnet20",
        data="cifar10",
        workers=8,
        density=0.001,
        batch=32,
        epochs=28,
        schedule="linear",
        warm_up=13.0,
        vary=("resolutions", ("", "16:13 24:11")),
        rates=(0.05, 0.1, 0.2),
        small={"workers": 4, "epochs": 6, "warm_up": 2.0, "vary": ("resolutions", ("", "16:2 24:2"))}
        | {"density": 0.01, "examples": 5_000, "rates": (0.1,)},
    ),
    "Table 3": Model(
        "MSTopK-SGD has the highest throughput, but for ResNet-50 at 224 x 224, where the torus is slightly faster.",
        "ms",
        ("dense", "torus", "hitopk"),
        (128,),
        (RESNET50, 143_667_240, TRANSFORMER),
        (0.01,),
        link=SLOW,
        node=NODE,
    ),
    "PTO": Bench(
        "Sharing the trust ratios among workers makes them about twice as fast: 11 to 7 ms for ResNet-50.",
        ("pto", "--workers=8"),
        of_shares,
        by=("--repeats", (9,)),
        small={"by": ("--repeats", (3,))},
    ),
}
