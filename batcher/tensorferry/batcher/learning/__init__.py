"""Models record_success online: batch cost, arrival rate, returning clients, memory limits; calibration."""
