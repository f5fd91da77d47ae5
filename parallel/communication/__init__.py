"""Communication of ranks: the mesh, tensors on it, collectives alone and in pairs, the closed form of all calls.

layout       the groups of a rank, one an axis, and   collectives   on one axis, without autograd
             how a full tensor lies on their mesh     pairs         a collective and that of its gradient
batch        how a micro-batch reaches the ranks      expectation   the calls that every rank must issue, as terms
schedules    pipelines as pure functions: order and messages of every rank (no torch)
"""
