"""The modes, each with its choices, and its calls as rows (`parallel.communication.expectation.CallRow`).

`shardproof help calls CASE` prints the rows of a case. The rows of what modes have in common stand beside the code that
issues them. Data are in `parallel.communication.batch`, loss and metric in `parallel.layers`, the calls once a step in
`parallel.data_parallel.calls`.
"""
