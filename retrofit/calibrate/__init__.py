"""How the norm goes in without shock: `match` in closed form (moments.py), and `fit` on top of it (fit.py)."""

from __future__ import annotations

from retrofit.calibrate.describe import Init, LayerCalibration, calibrate, remarks
from retrofit.calibrate.excerpt import Excerpt
from retrofit.calibrate.measure import Images, Measured, batches_for, check_takes
from retrofit.calibrate.moments import LOGIT_LIMIT, SHIFT_RIDGE, Moments, shiftable
from retrofit.calibrate.rotation import rotations

__all__ = [
    "LOGIT_LIMIT",
    "SHIFT_RIDGE",
    "Excerpt",
    "Images",
    "Init",
    "LayerCalibration",
    "Measured",
    "Moments",
    "batches_for",
    "calibrate",
    "check_takes",
    "remarks",
    "rotations",
    "shiftable",
]
