"""Calibration of models before they are quantised."""
