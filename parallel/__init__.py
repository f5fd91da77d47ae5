"""The implementation under test: one mode, one file, one table; no instrumentation inside."""
