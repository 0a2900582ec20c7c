"""Engines that keep partitions elsewhere than on the disk of this machine: see ``kafka``."""
