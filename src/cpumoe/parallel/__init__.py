"""Layouts on torch.distributed: ranks and what they exchange, experts spread over them, expert load balance."""
