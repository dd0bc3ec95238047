"""Brokers hold messages until a worker has dealt with them. Import a store from its own file."""

from machinery_py.brokers.base import Broker, BrokerFeatures, Consumer, Delivery, Message

__all__ = ["Broker", "BrokerFeatures", "Consumer", "Delivery", "Message"]
