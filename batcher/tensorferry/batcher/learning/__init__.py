"""Models fitted online: batch cost, arrival rate, returning clients, memory limits."""
