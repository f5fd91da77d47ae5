"""Latent attention under tensor parallelism: `attention`, its modules, and `scheme`, what it replaces of a strategy."""
