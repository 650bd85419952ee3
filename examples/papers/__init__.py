"""The figures and tables of five papers, made again: ``python -m examples.papers``."""
