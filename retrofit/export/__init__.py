"""Checkpoints for the outside: one file a target, and proof.py, which proves that an export computes what it should."""

from __future__ import annotations

from retrofit.export.folder import export_model, export_run
from retrofit.export.proof import Proof, verify

__all__ = ["Proof", "export_model", "export_run", "verify"]
