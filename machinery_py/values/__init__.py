"""Values that Go machinery can carry, as Python has them."""
