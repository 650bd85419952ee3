"""The cost model beside what is measured, by workers, lengths and densities; time to accuracy."""

from .times import Synchronised, TimeToAccuracy, Tuned

FORMS = ("dense", "topk_allgather", "topk_dsa", "gtopk", "oktopk")
CLAIM = "Does communication take as long as jsparse.cost predicts?"

FIGURES = {
    "by workers": Synchronised(
        CLAIM,
        FORMS,
        hosts=(2, 4, 8, 16),
        rates=("1gbit", "100mbit"),
        small={"sizes": (1_472_826,), "rates": ("100mbit",), "repeats": 5},
    ),
    "by length": Synchronised(
        CLAIM,
        FORMS,
        sizes=(1_000_000, 14_728_266, 133_547_324),
        over="size",
        small={"sizes": (147_282, 1_472_826, 14_728_266), "rates": ("100mbit",), "repeats": 5},
    ),
    "133 million": Synchronised(
        CLAIM + " With the length of BERT's gradient.",
        FORMS,
        hosts=(2, 4, 8, 16),
        sizes=(133_547_324,),
        small={"hosts": (2,), "repeats": 3},
    ),
    "by density": Synchronised(
        CLAIM,
        FORMS,
        densities=(0.001, 0.01, 0.1),
        over="density",
        small={"sizes": (1_472_826,), "rates": ("100mbit",), "repeats": 5},
    ),
    "tune": Tuned(
        "Does jsparse tune recommend what then is fastest?",
        cases=(
            (4, "1gbit", 14_728_266, 0.01),
            (4, "100mbit", 1_472_826, 0.001),
            (2, "1gbit", 147_282, 0.01),
            (8, "100mbit", 147_282, 0.1),
        ),
    ),
    "time to accuracy": TimeToAccuracy(
        "Does training gain what synchronisation gains?",
        ("dense", "topk_allgather", "gtopk", "oktopk", "oktopk, compact bf16"),
        (0.025, 0.05, 0.1),
        small={"width": 1024, "forms": ("dense", "topk_allgather", "oktopk", "oktopk, compact bf16"), "steps": 400},
    ),
}
