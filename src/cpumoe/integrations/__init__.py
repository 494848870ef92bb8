"""Other software that cpumoe plugs into."""
