"""Recovery of instances: error classification, watchdog, health."""
