"""Models from elsewhere: their addresses, the hosts that have them, and the local cache."""
