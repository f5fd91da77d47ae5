"""Data parallelism: how parameters lie in buckets and shards over data ranks, and the scale of half-precision losses.

Pure functions of sizes; nothing here knows a case or a running world.
"""
