"""How the tests of pipelines run them: a file is written, planned in the shared session, and run."""

import json
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.errors import TopicNotFound
from headrace.spark.pipelines.files import load
from headrace.spark.pipelines.planning import PipelinePlan, PipelineSetting, plan
from headrace.spark.pipelines.running import PipelineJob, Runner, RunningJob
from headrace.testing import RunningServer


class Bench:
    """A folder, a broker, a session: where pipelines of a test are at home."""

    def __init__(self, spark: Any, server: RunningServer, folder: Path):
        self.spark = spark
        self.server = server
        self.folder = folder
        self.setting = PipelineSetting({"servers": f"{server.host}:{server.port}"}, 100_000)

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    def plans(self, path: Path, names: Sequence[str] = ()) -> list[PipelinePlan]:
        return [
            plan(each, self.spark, str(self.folder / "checkpoints" / each.name), self.setting)
            for each in load(path).choose(names)
        ]

    def runner(self, path: Path, names: Sequence[str] = (), **options: Any) -> Runner:
        return Runner([PipelineJob(each) for each in self.plans(path, names)], **options)

    def run_once(self, path: Path, *names: str) -> dict[str, RunningJob]:
        """What is there now is done, one after the other; none may fail."""
        chosen = [each.name for each in load(path).choose(names)]
        ended = [job for name in chosen for job in self.runner(path, [name], once=True).run()]
        assert {job.name: job.error for job in ended if job.state != "finished"} == {}
        return {job.name: job for job in ended}

    def publish(self, topic: str, *values: Any, **options: Any) -> None:
        with self.server.client() as client:
            client.publish_many(topic, [as_bytes(value) for value in values], **options)

    def values(self, topic: str) -> list[bytes]:
        """Of a topic that need not be there yet."""
        with self.server.client() as client, suppress(TopicNotFound):
            return [message.value for message in client.fetch(topic, limit=1000)]
        return []

    def objects(self, topic: str) -> list[dict[str, Any]]:
        """The messages of a topic, which are JSON, in an order that does not depend on tasks."""
        return sorted(map(json.loads, self.values(topic)), key=json.dumps)


def as_bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()
