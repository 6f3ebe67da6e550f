"""Part of plait."""
