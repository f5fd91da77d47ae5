"""Tests of ourselves, a folder for each room. Nothing here is shipped, and no file of the product imports from here."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The repository."""
INSTALLED = ("bugs", "harness", "parallel", "reference", "reports", "suites")
"""Folders at the top of the repository that are installed below `shardproof`."""
FOLDERS = ("shardproof", *INSTALLED, "bench")
"""The folders of the product."""
