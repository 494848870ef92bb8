"""The plug-in for transformers, and calibration, which runs its float models."""
