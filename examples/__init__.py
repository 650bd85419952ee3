"""Examples: run them from the repository's root, such as ``python -m examples.train``."""
