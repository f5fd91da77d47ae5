"""The implementation under test: one scheme, one file or folder, one table; no instrumentation inside.

`subject` is run, states what must hold, and finds the schemes by name. `modes.md`, `around.md` and `experts.md`
are design notes outside this repository. A folder imports only folders below it:

    schemes, context, data_parallel, pipeline    one way to split the work each
    training                                     the steps of a rank
    checkpoints                                  written by every rank, read at any other layout
    model                                        the strategy that schemes make, and the decoder under it
    layers                                       the modules of a transformer and their weights; random numbers
    slicing                                      DeepSpeed's slices
    communication                                mesh, layouts, schedules, collectives and their closed form
"""
