"""Slicing: laws over generated shapes, seed 004 by hand, DeepSpeed's and Hugging Face's own code beside ours."""
