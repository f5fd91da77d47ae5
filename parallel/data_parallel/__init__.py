"""Data parallelism: buckets of gradients, a sharded optimizer, sharded parameters, and the calls of each.

scheme        what its words replace of a strategy; hashes of replicas
buckets       gradients in flat buckets, whole (zero=0) or a part on each rank (zero=1)
fsdp          parameters in shards of rows, gathered by units (zero=2, zero=3)
calls         the calls once a step, those of buckets and units among them; what Megatron-LM itself calls
"""
