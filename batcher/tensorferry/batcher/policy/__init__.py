"""Pure decisions: when a batch is closed, which requests it has, which are shed, whose turn it is."""
