"""State that a process keeps once and every rank thread has for itself."""
