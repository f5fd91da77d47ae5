"""Calls of torch.distributed as torch's documentation and tests make them: the list that engines are held to."""
