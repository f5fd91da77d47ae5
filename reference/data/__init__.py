"""Files to micro-batches: corpora and their formats, the stream of tokens, packing, and the anchors that check them."""
