"""A fleet, seen and steered: its events, logical clock and orders, over a broker's topics."""
