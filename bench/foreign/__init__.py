"""Right parallel training code in many hands: subjects that are not ours in style, each with a truth of its own.

Every module here has one `subject`. The modules share nothing, so an assumption of one is none of another. Their truths
compute in float64 or in the dtype of the case, as functions or modules. Ranks return shards, DTensors or whole tensors.
`bench.foreign_bugs` draws cases of all of them.
"""
