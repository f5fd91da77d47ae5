"""Checkpoints of other systems as full tensors under the names of the dense model: Hugging Face, Megatron-Core."""
