"""Benchmarks, the peers that they compare with, and the data that they read. Nothing of the library imports this."""
