"""redis-py alone: the commands that machinery_py needs for a task, with no library above them."""
