"""One mode, one file: its choices, and its calls as rows (`parallel.communication.expectation.CallRow`).

`shardproof help calls CASE` prints the rows of a case. The rows of what modes have in common stand beside what issues
them: the data in `parallel.communication.batch`, the loss and the metric in `parallel.layers`, what happens once a step
in `parallel.data_parallel.calls`.
"""
