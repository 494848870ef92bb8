"""Plug-ins of cpumoe for other software."""
