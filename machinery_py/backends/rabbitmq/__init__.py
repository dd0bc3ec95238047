"""Results in RabbitMQ."""
