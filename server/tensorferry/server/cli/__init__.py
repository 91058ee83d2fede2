"""Subcommands of `tensorferry`: serve, inspect, config, token."""
