"""Messages in RabbitMQ."""
