"""The operations about pipelines: a part of ``catalog.py``."""

from __future__ import annotations

from typing import Annotated

from headrace.operations.arguments import Code, PipelineName
from headrace.operations.declaring import Http, operation
from headrace.operations.results import PipelineReport, PipelineStats, StopWanted


class PipelineOperations:
    """What runs on Spark, as it reports about itself."""

    @operation(
        permission="publish",
        about="pipeline",
        runs="leader",
        errors=("pipeline_replaced", "report_too_large"),
    )
    async def report_pipeline(
        self, pipeline: PipelineName, report: Annotated[PipelineReport, Code("invalid_report")]
    ) -> StopWanted:
        """Report the state of a pipeline. The answer says whether the pipeline should stop.

        Example::

            stop = (await client.report_pipeline("totals", report))["stop"]
        """

    @operation(
        permission="see",
        runs="leader",
        http=Http("GET", "/pipelines", "List pipelines"),
    )
    async def pipelines(self) -> list[PipelineStats]:
        """The last report of each pipeline.

        Example::

            for stats in await client.pipelines():
                print(stats["name"], stats["state"])
        """

    @operation(
        permission="see",
        about="pipeline",
        name="pipeline",
        runs="leader",
        errors=("pipeline_not_found",),
        http=Http("GET", "/pipelines/{pipeline}", "Describe a pipeline"),
    )
    async def pipeline_stats(self, pipeline: PipelineName) -> PipelineStats:
        """The last report of a pipeline.

        Example::

            print((await client.pipeline_stats("totals"))["state"])
        """

    @operation(
        permission="manage",
        about="pipeline",
        runs="leader",
        errors=("pipeline_not_found", "pipeline_not_running"),
        http=Http("POST", "/pipelines/{pipeline}/stop", "Ask a pipeline to stop"),
    )
    async def stop_pipeline(self, pipeline: PipelineName) -> PipelineStats:
        """Ask a pipeline to stop. The answer to its next report tells it to.

        Example::

            await client.stop_pipeline("totals")
        """

    @operation(
        permission="manage",
        about="pipeline",
        runs="leader",
        repeatable=False,
        answer="deleted",
        errors=("pipeline_not_found", "pipeline_running"),
        http=Http("DELETE", "/pipelines/{pipeline}", "Forget a pipeline that has ended"),
    )
    async def forget_pipeline(self, pipeline: PipelineName) -> None:
        """Drop a pipeline that has ended or is stale from the list, with its metrics and alerts.

        Example::

            await client.forget_pipeline("totals")
        """
