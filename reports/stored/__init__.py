"""Run folders read: as files, as frames, and what they come to."""
