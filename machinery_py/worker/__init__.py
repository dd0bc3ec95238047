"""The worker: receiver, executors, settler, upkeep."""
