"""The small model that comes with the package, and what ``cpumoe demo`` does with it."""
