"""Pipeline parallelism (axis pp): each stage holds consecutive layers, and activations travel from stage to stage.

scheme      what a pipeline replaces of a strategy, and a step: orders of `parallel.schedules`, executed
prediction  which stages are alike, what each does in a step, and when
"""
