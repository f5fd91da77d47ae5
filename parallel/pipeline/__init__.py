"""Pipeline parallelism (axis pp): each stage holds consecutive layers, and activations travel from stage to stage.

execution   a step: the orders of `parallel.schedules`, executed with batches of isend and irecv
terms       the closed form: every term at its stage, the messages, the sums over stages
scheme      what a pipeline replaces of a strategy
"""
