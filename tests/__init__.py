"""Tests of the product, a folder for each of its folders. Nothing is shipped, and the product imports nothing of it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The repository."""
INSTALLED = ("bugs", "harness", "parallel", "reference", "reports", "suites")
"""Folders at the top of the repository that are installed below `shardproof`."""
FOLDERS = ("shardproof", *INSTALLED, "bench")
"""The folders of the product."""
