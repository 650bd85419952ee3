"""Data for training: a cache for samples from a slow central store."""

from .cache import CacheStats, DataCache, Tier

__all__ = ["CacheStats", "DataCache", "Tier"]
