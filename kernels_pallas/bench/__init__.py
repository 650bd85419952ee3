"""The benchmark of the operations in each form, beside JAX and PyTorch.

To run it: ``python -m kernels_pallas.bench``.
"""
