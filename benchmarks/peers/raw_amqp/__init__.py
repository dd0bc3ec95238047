"""pika and redis-py alone: the calls that machinery_py needs for a task, without a library."""
