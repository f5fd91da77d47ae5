"""Reads run folders: as files, as frames, and as sums."""
