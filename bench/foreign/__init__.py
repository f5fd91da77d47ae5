"""Right parallel training code in many hands: subjects that are not ours in style, each with a truth of its own.

Every module here has one `subject`. The modules share nothing, so what one of them assumes no other does. They are
written as people write such code: truths in float64 or in the dtype of the case, functions or modules, shards, DTensors
or whole tensors. `bench.foreign_cases` draws cases of all of them.
"""
