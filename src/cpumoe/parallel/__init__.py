"""Over several processes: which rank has which experts, and what that costs."""
