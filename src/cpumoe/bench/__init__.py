"""``cpumoe bench``: a layer against the limits of the machine it runs on."""
