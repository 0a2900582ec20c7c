"""A node over Kafka against Kafka's own Python client on the same Kafka: ``make bench-cluster``."""
