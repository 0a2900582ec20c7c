"""A few tests of the contract over slow logs, for ``make test``; ``make slow`` runs them all (``test_slow_log``)."""

from tests.contract.test_publishing import test_fetching_begins_at_a_time
from tests.contract.test_settling import test_a_nack_brings_it_again_with_the_next_attempt
from tests.contract.test_slow_log import slow
from tests.contract.test_subscribing import test_leaving_a_subscription_leaves_its_place

__all__ = [
    "slow",
    "test_a_nack_brings_it_again_with_the_next_attempt",
    "test_fetching_begins_at_a_time",
    "test_leaving_a_subscription_leaves_its_place",
]
