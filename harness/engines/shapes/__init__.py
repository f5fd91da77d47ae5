"""The dry engine: one rank at a time on meta tensors, shapes without numbers."""
