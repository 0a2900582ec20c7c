"""What a cluster must be before a node starts on it."""

import pytest

from headrace.cluster.agreed import Agreed, entry
from headrace.cluster.founding import IMPORTING, check_founded
from headrace.errors import Conflict, HeadraceError
from headrace.log.interface import TopicRecord
from headrace.log.storage import settings_content
from headrace.model import TopicSettings


def agreed(*names: str, secret: str = "") -> Agreed:
    found = Agreed()
    for name in names:
        found.fold(settings_content(TopicRecord(name, TopicSettings(), 1, 1)))
    if secret:
        found.fold(entry(kind="secret", secret=secret))
    return found


def test_a_new_cluster_and_a_founded_one_are_good() -> None:
    """The first node founds it; the others find a secret."""
    check_founded(agreed())
    check_founded(agreed("orders", secret="s"))


def test_half_an_import_is_refused() -> None:
    """The sentence says how to go on."""
    with pytest.raises(Conflict, match="cluster import") as refused:
        check_founded(agreed(IMPORTING, "orders"))
    assert refused.value.code == "import_unfinished"


def test_a_cluster_that_one_node_of_an_earlier_version_wrote_is_refused() -> None:
    """It has topics and no secret; starting on it does not help, so the error is final."""
    with pytest.raises(HeadraceError, match="slots=0") as refused:
        check_founded(agreed("orders"))
    assert refused.value.code == "cluster_too_old"
    assert not refused.value.retryable
