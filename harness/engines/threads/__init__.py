"""The in-process engines: every rank a thread of this process."""
