"""Access control: names in clients' certificates."""
