"""Files to micro-batches: corpora and their formats, the stream of tokens, and packing."""
