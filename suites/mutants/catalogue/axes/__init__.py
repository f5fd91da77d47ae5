"""Bugs of a further axis: context, data parallel and ZeRO, pipeline."""
