"""Times the operations, form by form, beside what JAX and PyTorch offer: ``python -m kernels_pallas.bench``."""
