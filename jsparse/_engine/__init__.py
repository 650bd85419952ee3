"""The engine: how gradients become their mean.

A synchroniser is composed of four choices, each with a small base class: the *space* in which
vectors are formed, the *memory* of a worker, the *reducer* that sums, and the *mean* that is made
of the sum.
"""
