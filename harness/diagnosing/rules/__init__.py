"""The rules that explain wrong tensors: each looks for one kind of mistake in the numbers, and names its cause."""
