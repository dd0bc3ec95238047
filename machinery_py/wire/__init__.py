"""Go Machinery's wire format: signatures, states, arguments, and the values in them."""
