"""The plug-in for transformers, and calibration, which runs float models with it."""
