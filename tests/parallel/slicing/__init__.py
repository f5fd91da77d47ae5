"""Slicing: laws over generated shapes, DeepSpeed's and Hugging Face's own code beside ours."""
