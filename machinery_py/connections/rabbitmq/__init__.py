"""Connections to RabbitMQ."""
