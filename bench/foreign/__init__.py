"""Right parallel training code in many styles, none of which is ours.

Every module here has one `subject`. The modules share nothing, so they do not share assumptions. A subject has a truth
of its own, in float64 or in the dtype of the case, or is compared with itself on one rank ("alone"). Ranks return
shards, DTensors or whole tensors.
`bench.foreign_bugs` draws cases of all of them.
"""
