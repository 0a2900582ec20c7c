"""A load test of a running broker: raw connections that publish, and clocks beside them."""
