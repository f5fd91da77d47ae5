"""The modules of a transformer on one rank, and what they compute: linears, attention, MLP, norms, embedding, loss."""
