"""Several nodes that divide the partitions of one cluster. Read ``node.py`` first."""
