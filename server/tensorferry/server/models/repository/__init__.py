"""Where models come from: repositories on disk, declared and fetched models, uploaded files and labels."""
