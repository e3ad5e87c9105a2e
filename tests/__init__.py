"""Tests, one module for each module of the package."""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
DATA = CHECKOUT / "tests" / "data"
