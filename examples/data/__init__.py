"""Readers of data sets in their standard files, from a directory that the user names.

A reader raises ``ValueError`` for what is missing or damaged. The message has the file, the line
or record, what is wrong, and the page from which the file comes. ``jsparse.bench.images`` reads
MNIST and CIFAR-10.
"""

from . import sparse
from .an4 import Utterances, read_an4
from .atis import Atis, Sentences, read_atis
from .libsvm import Rows, read_libsvm
from .text import Text, masked_pairs, read_ptb, read_wikitext2, windows

__all__ = [
    "Atis",
    "Rows",
    "Sentences",
    "Text",
    "Utterances",
    "masked_pairs",
    "read_an4",
    "read_atis",
    "read_libsvm",
    "read_ptb",
    "read_wikitext2",
    "sparse",
    "windows",
]
