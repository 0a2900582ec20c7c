"""Errors name the file, the pipeline and the key."""

import pytest

from headrace.errors import TopicNotFound
from headrace.spark.pipelines.sections import InvalidPipeline, Section, analysed


def test_what_goes_wrong_has_a_place() -> None:
    """Errors of ours keep their sentence; those that have a place already keep that."""
    section = Section({}, "a.toml", "pipeline p", path="to.")
    with (
        pytest.raises(InvalidPipeline, match=r"^a\.toml, pipeline p: to\.table: no$"),
        analysed(section, "table"),
    ):
        raise TopicNotFound("no")
    with pytest.raises(InvalidPipeline, match=r"^there$"), analysed(section, "table"):
        raise InvalidPipeline("there")
