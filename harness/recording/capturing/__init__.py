"""Captures of a program from outside: outputs and gradients of modules, dropout masks, draws, lower precision."""
