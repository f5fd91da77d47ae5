"""Checkpoints as full tensors under the names of the dense model: torch's own format, Hugging Face, Megatron-Core."""
