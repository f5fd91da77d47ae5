"""Experts on ranks: who holds which, how tokens reach them and return, and the calls that this takes.

scheme     what experts replace of a strategy
block      the module in the place of an MLP, with its router and balance losses
dispatch   tokens to experts and back, by all-to-all or all-gather; how many an expert takes
counts     how many rows every rank sends to every expert, from integers, and the calls that follow
"""
