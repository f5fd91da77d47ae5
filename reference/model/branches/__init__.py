"""Branches of features in place of a layer's attention or MLP: a file each, found by the name of the feature.

A file has `shapes(case)`, the parameters without the prefix of their layer, and `forward(run, layer, x_BSH,
visible_SS)`, the branch as a function of normed hidden states. `run` is the pass (`reference.model.decoder`).
`Core.replaced_branches` names the layers that have it. A branch after the decoder (`Core.behind_decoder`) is such a
file too. Its parameters have full names; a transformer layer of its own (`Core.blocks`) is one name among them. Its
`forward` is called with layer "", and its result is not used.

A file may also have `values(case)`: tensors by full name that no gradient changes. They are in `run.weights` beside the
parameters. `update_values(case, values, counts)` returns them as they are after a step with these counts.
"""
