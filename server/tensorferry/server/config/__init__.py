"""Server options: flags, environment variables, and the file of `--config`."""
