"""Checkpoints for the outside: one file a target, and proof.py, which proves that an export computes what it should."""

from __future__ import annotations

from retrofit.export.folder import Target, export_model
from retrofit.export.proof import Proof, verify
from retrofit.export.runs import export_run

__all__ = ["Proof", "Target", "export_model", "export_run", "verify"]
