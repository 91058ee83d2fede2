"""How lines of any log leave the process: through bounded queues, each with a thread that writes."""
