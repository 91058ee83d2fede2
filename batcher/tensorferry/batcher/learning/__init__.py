"""Models fitted online: batch cost, device speed, arrival rate, returning callers, memory."""
