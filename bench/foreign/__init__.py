"""Right parallel training code in many styles, none of which is ours. Each subject has a truth of its own.

Every module here has one `subject`. The modules share nothing, so they do not share assumptions. Their truths compute
in float64 or in the dtype of the case, as functions or modules. Ranks return shards, DTensors or whole tensors.
`bench.foreign_bugs` draws cases of all of them.
"""
