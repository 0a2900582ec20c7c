"""The operations about pipelines: a part of ``catalog.py``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from headrace.operations.arguments import Code, KnownPipeline, PipelineName
from headrace.operations.declaring import deletion, operation, route
from headrace.operations.results import PipelineReport, PipelineStats, StopWanted

_on_pipeline = partial(operation, about="pipeline", runs="leader")


class PipelineOperations:
    """What runs on Spark, as it reports about itself."""

    @_on_pipeline(permission="publish", errors=("pipeline_replaced", "report_too_large"))
    async def report_pipeline(
        self, pipeline: PipelineName, report: Annotated[PipelineReport, Code("invalid_report")]
    ) -> StopWanted:
        """Report the state of a pipeline. The answer says whether the pipeline should stop.

        Example::

            stop = (await client.report_pipeline("totals", report))["stop"]
        """

    @operation(permission="see", runs="leader")
    @route("GET", "/pipelines", "List pipelines")
    async def pipelines(self) -> list[PipelineStats]:
        """The last report of each pipeline.

        Example::

            for stats in await client.pipelines():
                print(stats["name"], stats["state"])
        """

    @_on_pipeline(permission="see", name="pipeline")
    @route("GET", "/pipelines/{pipeline}", "Describe a pipeline")
    async def pipeline_stats(self, pipeline: KnownPipeline) -> PipelineStats:
        """The last report of a pipeline.

        Example::

            print((await client.pipeline_stats("totals"))["state"])
        """

    @_on_pipeline(permission="manage", errors=("pipeline_not_running",))
    @route("POST", "/pipelines/{pipeline}/stop", "Ask a pipeline to stop")
    async def stop_pipeline(self, pipeline: KnownPipeline) -> PipelineStats:
        """Ask a pipeline to stop. The answer to its next report tells it to.

        Example::

            await client.stop_pipeline("totals")
        """

    @deletion(permission="manage", about="pipeline", runs="leader", errors=("pipeline_running",))
    @route("DELETE", "/pipelines/{pipeline}", "Forget a pipeline that has ended")
    async def forget_pipeline(self, pipeline: KnownPipeline) -> None:
        """Drop a pipeline that has ended or is stale from the list, with its metrics and alerts.

        Example::

            await client.forget_pipeline("totals")
        """
