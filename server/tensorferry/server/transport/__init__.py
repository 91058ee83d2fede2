"""Protection of the transports against clients that leave, do not read or do not finish sending."""
