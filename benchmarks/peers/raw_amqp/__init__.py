"""pika and redis-py alone: what machinery_py needs of RabbitMQ and Redis for a task, with no library above them."""
