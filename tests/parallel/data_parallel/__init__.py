"""Buckets, shards and loss scales: laws over drawn layouts, and the classes of Megatron-Core beside them."""
