"""Subcommands of `tensorferry`: serve, config, token."""
