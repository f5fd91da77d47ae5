"""Captures of a program from outside: outputs and gradients of modules, dropout masks, random
draws, lower precision.
"""
