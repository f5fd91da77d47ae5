"""The only folder that uses private names of torch. A test refuses them everywhere else in the product.

Each use is a small function whose docstring lists the names of torch that it needs. Where this torch lacks a name, the
function does without it (the docstring states what is lost), or raises MachineError with one sentence that names the
feature. `tests/harness/torch_internals/test_torch_internals.py` tries each with the versions that `make compat` runs.
"""
