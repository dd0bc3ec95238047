"""The worker: receiver, executors, settler, maintenance."""
